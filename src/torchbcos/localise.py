"""The grid pointing game: how grids are chosen, put together and scored; pure functions.

A grid is n×n images of different classes. An explanation of one of these classes is as good as the
share of its positive attribution that lies in that class's own cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchbcos.smoothing import smoothed

__all__ = [
    "Summary",
    "compose",
    "default_kernel",
    "plan_grids",
    "score_cells",
    "split_cells",
    "summarise",
]

PRESETS = ("paper", "released")
THRESHOLD = 0.5  # "released": the least sigmoid(logit)


def plan_grids(
    logits: Tensor,  # [N, K]
    labels: Tensor,  # [N]
    *,
    grids: int = 500,
    n: int = 3,
    preset: str = "paper",
    seed: int = 42,
) -> Tensor:
    """[grids, n·n] indices of images, row by row of each grid; none is used twice.

    Only rightly classified images take part, in each class the most confident first. Each grid
    draws its classes at random from those that have images left.

    preset="released" is the authors' code: images need sigmoid(logit) > 0.5, more than n·n classes
    must be left, after each grid one image is passed over, and cells fill up column by column.

    >>> labels = torch.arange(40) % 10
    >>> plan = plan_grids(torch.eye(10)[labels], labels, grids=4, n=3)
    >>> plan.shape, len(plan.unique())
    (torch.Size([4, 9]), 36)
    """
    _check_plan(logits, labels, grids, n, preset)
    confidence, predicted = (v.cpu() for v in logits.detach().max(1))
    labels = labels.cpu()
    usable = predicted == labels
    if preset == "released":
        usable &= confidence.sigmoid() > THRESHOLD
    queues = {
        c: _most_confident_first(confidence, usable & (labels == c)) for c in range(logits.shape[1])
    }
    if preset == "released":
        found = _released(queues, labels.tolist(), grids, n * n, seed)
    else:
        found = _fair(queues, grids, n * n, seed)
    if len(found) < grids:
        counts = [len(q) for q in queues.values()]
        remedy = "ask for at most that many" if found else "take a model that gets more right"
        if n > 2:
            remedy += ", or a smaller `n`"
        raise ValueError(
            f"`grids` (={grids}) of {n}×{n} need {grids * n * n} images that the model gets right"
            f"{' and is sure of' if preset == 'released' else ''}, of {n * n} classes at a time; "
            f"there are {sum(counts)} in {sum(map(bool, counts))} classes, enough for "
            f"{len(found)}: {remedy}, or give more images."
        )
    plan = torch.tensor(found)
    if preset == "released":
        plan = plan.view(grids, n, n).transpose(1, 2).reshape(grids, n * n)
    return plan


def check_preset(preset: str) -> None:
    if preset not in PRESETS:
        raise ValueError(f"`preset` (={preset!r}) must be 'paper' or 'released'.")


def _check_plan(logits: Tensor, labels: Tensor, grids: int, n: int, preset: str) -> None:
    check_preset(preset)
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"`logits` (shape {tuple(logits.shape)}) and `labels` (shape {tuple(labels.shape)}) "
            "must be [N, K] and [N]."
        )
    if n < 2:
        raise ValueError(f"`n` (={n}) must be at least 2 cells a side.")
    if grids < 1:
        raise ValueError(f"`grids` (={grids}) must be at least 1.")
    least = n * n + (preset == "released")
    if logits.shape[1] < least:
        raise ValueError(
            f"`n` (={n}) needs {least} different classes, and there are {logits.shape[1]}: "
            + ("use a smaller `n`." if n > 2 else "the game cannot be played with so few.")
        )


def _most_confident_first(confidence: Tensor, chosen: Tensor) -> list[int]:
    indices = chosen.nonzero().flatten()
    order = confidence[indices].argsort(descending=True, stable=True)
    return indices[order].tolist()


def _fair(queues: dict[int, list[int]], grids: int, cells: int, seed: int) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    left = {c: list(reversed(q)) for c, q in queues.items()}
    found: list[list[int]] = []
    while len(found) < grids:
        classes = [c for c, q in left.items() if q]
        if len(classes) < cells:
            break
        drawn = generator.choice(classes, cells, replace=False)
        found.append([left[int(c)].pop() for c in drawn])
    return found


def _released(
    queues: dict[int, list[int]], labels: Sequence[int], grids: int, cells: int, seed: int
) -> list[list[int]]:
    """One long list first, in blocks of different classes; then grids from it, out of step."""
    generator = np.random.RandomState(seed)
    left = {c: list(reversed(q)) for c, q in queues.items()}
    listed: list[int] = []
    while len(classes := [c for c, q in left.items() if q]) > cells:
        drawn = generator.choice(classes, cells, replace=False)
        listed += [left[int(c)].pop() for c in drawn]
    found: list[list[int]] = []
    position = 0
    while len(found) < grids:
        grid: dict[int, int] = {}  # by class
        while len(grid) < cells and position < len(listed):
            grid.setdefault(labels[listed[position]], listed[position])
            position += 1
        if len(grid) < cells:
            break
        found.append(list(grid.values()))
        position += 1
    return found


def compose(cells: Tensor, n: int) -> Tensor:
    """[G·n·n, C, H, W] → [G, C, n·H, n·W], cells row by row."""
    if len(cells) % (n * n):
        raise ValueError(f"`cells` (={len(cells)} images) must be a multiple of n·n = {n * n}.")
    _, channels, height, width = cells.shape
    rows = cells.view(-1, n, n, channels, height, width).permute(0, 3, 1, 4, 2, 5)
    return rows.reshape(-1, channels, n * height, n * width)


def split_cells(grids: Tensor, n: int) -> Tensor:
    """[G, C, n·H, n·W] → [G·n·n, C, H, W]; undoes `compose`."""
    count, channels, height, width = grids.shape
    if height % n or width % n:
        raise ValueError(
            f"`grids` (of {height}×{width} positions) cannot be cut into {n}×{n} cells: choose "
            "images, or for DiPart a layer, whose sides are multiples of it."
        )
    cells = grids.view(count, channels, n, height // n, n, width // n)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(-1, channels, height // n, width // n)


def default_kernel(cell: int) -> int:
    """The side of the smoothing window for cells of this many pixels, as the paper has it: 15 from
    224 on, 3 at 32, and in proportion between.
    """
    return min(15, max(3, 2 * round((15 * cell / 224 - 1) / 2) + 1))


def check_kernel(smooth: int) -> None:
    if smooth < 0 or (smooth and smooth % 2 == 0):
        raise ValueError(f"`smooth` (={smooth}) must be an odd number of pixels, or 0 for none.")


def check_window(smooth: int, height: int, width: int) -> None:
    """Refuse to smooth grids with a window that is larger than they are."""
    if smooth > min(height, width):
        raise ValueError(
            f"`smooth` (={smooth}) must be at most the grid's {height}×{width} pixels: choose a "
            "smaller window, or 0 for none."
        )


def score_cells(attributions: Tensor, n: int, smooth: int = 0) -> Tensor:
    """[G, n·n, H, W], a map for each cell's class → [G, n·n], the share in its own cell.

    Maps are averaged over `smooth`×`smooth` pixels, zeros beyond the edge, if that is not 0; then
    negative values count as 0. A map without positive values scores 0, one that is not finite nan.

    >>> maps = torch.zeros(1, 4, 2, 2)
    >>> maps[0, 0] = torch.tensor([[3.0, 1.0], [0.0, -5.0]])
    >>> score_cells(maps, n=2)
    tensor([[0.7500, 0.0000, 0.0000, 0.0000]], dtype=torch.float64)
    """
    if attributions.dim() != 4 or attributions.shape[1] != n * n:
        raise ValueError(
            f"`attributions` (shape {tuple(attributions.shape)}) must be [G, {n * n}, H, W]: one "
            f"map for each cell of {n}×{n}."
        )
    height, width = attributions.shape[-2:]
    if height % n or width % n:
        raise ValueError(f"`attributions` ({height}×{width} px) must be {n}×{n} equal cells.")
    check_kernel(smooth)
    check_window(smooth, height, width)
    maps = attributions.detach().float()
    broken = ~maps.isfinite().flatten(2).all(2)
    if smooth:
        maps = smoothed(maps, smooth)
    maps = maps.clamp(min=0).view(-1, n * n, n, height // n, n, width // n)
    mass = maps.sum((3, 5), dtype=torch.float64).flatten(2)  # [G, target, cell]
    own, total = mass.diagonal(dim1=1, dim2=2), mass.sum(2)
    empty = total == 0
    scores = torch.where(empty, 0.0, own / torch.where(empty, 1.0, total))
    return scores.masked_fill(broken, torch.nan)


@dataclass(frozen=True)
class Summary:
    """Scores of all cells of all grids in a few numbers."""

    mean: float
    interval: tuple[float, float]  # 95 % of the mean, by resampling whole grids
    quartiles: tuple[float, float, float]
    grids: int


def summarise(scores: np.ndarray | Tensor, *, resamples: int = 2000, seed: int = 0) -> Summary:
    """Of scores [G, cells]. The cells of a grid share its images, so grids are resampled whole."""
    values = np.asarray(scores, dtype=np.float64)
    if values.ndim != 2 or not values.size:
        raise ValueError(f"`scores` (shape {values.shape}) must be [grids, cells], not empty.")
    means = values.mean(1)
    drawn = np.random.default_rng(seed).integers(len(means), size=(resamples, len(means)))
    low, high = np.percentile(means[drawn].mean(1), [2.5, 97.5])
    first, second, third = np.percentile(values, [25, 50, 75])
    return Summary(
        float(values.mean()),
        (float(low), float(high)),
        (float(first), float(second), float(third)),
        len(values),
    )
