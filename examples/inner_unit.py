"""Explain a unit in the middle of a network, and let an explanation stand in a loss."""

from pathlib import Path

import torch

import torchbcos as tb
from torchbcos.images import read_image

model = tb.load("cifar10")
photo = Path(__file__).parent / "photos" / "cat.jpg"
image = read_image(photo, model.input_size)[None]

# The unit of block 8 that fires most, where it fires most, and the patch of the image it sees.
strongest = tb.explain(model, image, layer="8", unit=lambda a: a.flatten(1).amax(1))
top, left, bottom, right = strongest.window()
print(strongest)
print(f"it sees rows {top} to {bottom - 1} and columns {left} to {right - 1} of the image")

# W(x) is differentiable: here, how the share of the score outside of the centre depends on weights.
e = tb.explain(model, image, "cat", create_graph=True)
outside = e.contributions[0, 0].clone()
outside[8:24, 8:24] = 0
share = outside.clamp(min=0).sum() / e.contributions[0, 0].clamp(min=0).sum()
share.backward()
norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
print(f"positive contributions outside of the centre: {share.item():.1%}; gradient norm {norm:.2e}")
