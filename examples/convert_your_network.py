"""Make a B-cos network of your own architecture, set its scales, and train it for a few steps."""

import torch
import torch.nn.functional as F
from torch import nn

import torchbcos as tb
from torchbcos.data import shapes


class Block(nn.Module):
    """A residual block with squeeze-and-excitation, as many of today's networks have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width, 1), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.conv(x))
        return x + y * self.gate(y)


torch.manual_seed(0)
data = shapes(256, size=32, seed=1)
network = nn.Sequential(
    nn.Conv2d(3, 16, 5, stride=2, padding=2), nn.ReLU(), Block(16), nn.MaxPool2d(2), Block(16),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, len(data.classes)),
)  # fmt: skip

model = tb.convert(network, b=2.0, max_out=2, classes=data.classes, input_size=32)
print(model.report)
tb.calibrate(model, data.images[:64])
print(tb.signal(model, data.images[:64]))

optimiser = torch.optim.Adam(model.parameters(), 1e-3)
targets = F.one_hot(data.labels, len(data.classes)).float()
for _ in range(20):
    rows = torch.randint(0, 256, (64,))
    loss = F.binary_cross_entropy_with_logits(model(data.images[rows]), targets[rows])
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
print(f"loss after 20 steps: {loss.item():.3f}")
print(tb.explain(model.eval(), data.images[:8]))
