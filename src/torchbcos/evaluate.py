"""How good a model is on a set of images."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from torchbcos.batches import at_once, find_damaged, in_order
from torchbcos.data import ImageFiles, ImageSet, Split, open_data
from torchbcos.models import BcosModel, in_mode

__all__ = ["Evaluation", "evaluate", "evaluate_classes", "open_as_trained", "tally"]


def open_as_trained(
    model: BcosModel,
    data: str | os.PathLike[str],
    size: int | None = None,
    *,
    only: str = "test",
    console: Console | None = None,
) -> Split:
    """One set of `data` as the model's training saw it; the size is the model's by default.

    As much of each test image is seen as then, and if damaged files were left out, they are again;
    `console` is told how many.
    """
    height, width = model.input_size
    if not size and height != width:
        raise ValueError(
            f"`model` (of {height}×{width} px) takes no squares, and data sets are read as "
            "squares: make a torchbcos.data.Images of its size yourself."
        )
    config = model.provenance.get("config")
    if not isinstance(config, dict):  # someone's own words
        config = {}
    bad, part = config.get("bad", "fail"), config.get("test_part", 1.0)
    split = open_data(
        data, size or height, bad=bad, part=part, only=only, channels=model.in_channels
    )
    images = split.train if only == "train" else split.test
    if isinstance(images, ImageFiles) and bad == "skip":
        images = images.without(find_damaged(images), bad)
        split = replace(split, train=images) if only == "train" else replace(split, test=images)
    if console is not None and split.skipped:
        told = f"skipped {len(split.skipped)}, the first: {split.skipped[0]}"
        console.print(told, highlight=False, markup=False, soft_wrap=True)
    return split


def evaluate(
    model: nn.Module,
    images: ImageSet,
    batch: int = 0,
    *,
    console: Console | None = None,
) -> tuple[float, float]:
    """(accuracy, mean loss) over a set; the model's mode is as before afterwards.

    If `console` is a terminal, it shows how far this is.
    """
    correct, loss, count = tally(model, images, batch, console=console).tolist()
    return correct / count, loss / count


@dataclass(frozen=True)
class Evaluation:
    """How good a model is, and on which classes."""

    accuracy: float
    loss: float
    classes: tuple[tuple[str, int, int], ...]  # name, images, how many of them are right

    @property
    def balanced_accuracy(self) -> float:
        """The mean over the classes: what always says the same has 1/K."""
        return sum(right / count for _, count, right in self.classes) / len(self.classes)

    def __str__(self) -> str:
        count = sum(count for _, count, _ in self.classes)
        return (
            f"{self.accuracy:.2%} of {count} images, {self.balanced_accuracy:.2%} as a mean over "
            f"the classes, loss {self.loss:.4f}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy,
            "balanced_accuracy": self.balanced_accuracy,
            "loss": self.loss,
            "images": sum(count for _, count, _ in self.classes),
            "classes": [
                {"name": name, "accuracy": right / count, "images": count}
                for name, count, right in self.classes
            ],
        }


def evaluate_classes(
    model: nn.Module,
    images: ImageSet,
    classes: Sequence[str],
    *,
    console: Console | None = None,
) -> Evaluation:
    """As `evaluate`, for each of the classes that has images."""
    by_class = torch.zeros(len(classes), 2, dtype=torch.long)
    right, loss, count = tally(model, images, console=console, by_class=by_class).tolist()
    found = zip(classes, by_class.tolist(), strict=True)
    return Evaluation(
        right / count, loss / count, tuple((name, of, own) for name, (of, own) in found if of)
    )


@torch.no_grad()
def tally(
    model: nn.Module,
    images: ImageSet,
    batch: int = 0,  # 0: as many as fit
    *,
    rank: int = 0,
    world: int = 1,
    workers: int | None = None,
    console: Console | None = None,
    by_class: Tensor | None = None,  # [K, 2], to which images and right ones are added
) -> Tensor:  # [3]
    """How many are right, the sum of the losses, and how many there are, in one process's share."""
    device = next(model.parameters()).device
    total = torch.zeros(3, device=device)
    batch = batch or at_once(images.size, device)
    batches: Iterable[tuple[Tensor, Tensor, Tensor]]
    batches = in_order(images, batch, device, rank=rank, world=world, workers=workers)
    if console is not None and console.is_terminal:
        count = -(-len(images) // (batch * world))
        batches = track(batches, "batches", count, console=console, transient=True)
    with in_mode(model, training=False):
        for x, labels, counts in batches:
            logits = model(x).float()
            target = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
            losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(1)
            right = logits.argmax(1) == labels
            total += torch.stack([right * counts, losses * counts, counts.float()]).sum(1)
            if by_class is not None:
                each = torch.stack([counts, right * counts], 1).long()
                by_class.index_add_(0, labels.cpu(), each.cpu())
    return total
