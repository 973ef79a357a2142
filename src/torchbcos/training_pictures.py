"""Explanations of the same few test images, drawn while a model is trained."""

from __future__ import annotations

from pathlib import Path

import torch

from torchbcos.data import ImageSet
from torchbcos.explain import explain
from torchbcos.models import BcosModel, in_mode
from torchbcos.render import figure

__all__ = ["draw"]

COUNT = 6


def draw(model: BcosModel, images: ImageSet, path: Path) -> None:
    """Why some of these images, from all over the set, are of their class."""
    every = max(1, len(images) // COUNT)
    chosen = torch.arange(0, len(images), every)[:COUNT]
    device = next(model.parameters()).device
    pictures, labels = (t.to(device) for t in images.batch(chosen))
    with in_mode(model, training=False):
        drawn = figure(pictures, explain(model, pictures, labels))
    drawn.savefig(path, dpi=80)
