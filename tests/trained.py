"""Small networks trained on the shapes set within seconds, for tests of what training brings."""

import torch
import torch.nn.functional as F
import torchvision

import torchbcos as tb
from torchbcos.data import shapes

CLASSES = ("disc", "ring", "cross", "bars")
SIZE = 32


def some_shapes(count, seed):
    """Images, labels and masks of `count` shapes of the four classes."""
    data = shapes(2 * count, size=SIZE, seed=seed)  # half of the eight classes
    kinds = torch.tensor([data.classes.index(name) for name in CLASSES])
    chosen = (data.labels[:, None] == kinds).any(1)
    labels = (data.labels[chosen][:, None] == kinds).int().argmax(1)
    return data.images[chosen], labels, data.masks[chosen]


def train_on_shapes(b, *, steps=250, shuffle_labels=False):
    """A B-cos `mini` of half its width; with `shuffle_labels` it learns random ones."""
    images, labels, _ = some_shapes(2048, seed=1)
    batch = 64 if b == 1 else 32  # a network so nearly linear learns less from each
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if shuffle_labels:
            labels = labels[torch.randperm(len(labels))]
        model = tb.create_model(
            "mini", classes=CLASSES, b=b, input_size=SIZE, width=16, norm="uncentred"
        )
        tb.calibrate(model, images[:64], logit_rms=0.5)
        optimiser = torch.optim.Adam(model.parameters(), 3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, 3e-3, total_steps=steps, pct_start=0.2
        )
        for _ in range(steps):
            rows = torch.randint(len(labels), (batch,))
            target = F.one_hot(labels[rows], len(CLASSES)).float()
            loss = F.binary_cross_entropy_with_logits(model(images[rows]), target)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return model.eval()


def make_vit():
    """It takes images of 16×16 px only."""
    torch.manual_seed(0)
    network = torchvision.models.VisionTransformer(16, 8, 1, 2, 16, 32, num_classes=4)
    model = tb.convert(network, input_size=16, classes=CLASSES)
    tb.calibrate(model, torch.rand(4, 3, 16, 16))
    return model.eval()
