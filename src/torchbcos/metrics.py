"""Explanations against the truth, where it is known which pixels are the object."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["box_masks", "energy_pointing_game", "overlap", "pointing_game"]


def box_masks(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """[N, 4] (top, left, bottom, right), ends exclusive → bool [N, H, W]."""
    if boxes.dim() != 2 or boxes.shape[1] != 4:
        raise ValueError(f"`boxes` (shape {tuple(boxes.shape)}) must be [N, 4].")
    y = torch.arange(size[0], device=boxes.device)
    x = torch.arange(size[1], device=boxes.device)
    top, left, bottom, right = boxes.T[:, :, None]
    rows: Tensor = (y >= top) & (y < bottom)
    columns: Tensor = (x >= left) & (x < right)
    return rows[:, :, None] & columns[:, None, :]


def energy_pointing_game(attributions: Tensor, truth: Tensor) -> Tensor:
    """[N, K]: the share of the positive attribution [N, K, H, W] that lies on the object.

    `truth` is masks [N, H, W] or boxes [N, 4]. A map without positive values scores 0.

    >>> maps = torch.tensor([[[[3.0, 1.0], [-2.0, 0.0]]]])
    >>> energy_pointing_game(maps, torch.tensor([[0, 0, 1, 1]]))
    tensor([[0.7500]], dtype=torch.float64)
    """
    mask = _masks(attributions, truth)
    positive = attributions.detach().clamp(min=0)
    total = positive.sum((2, 3), dtype=torch.float64)
    inside = (positive * mask[:, None]).sum((2, 3), dtype=torch.float64)
    return torch.where(total > 0, inside / torch.where(total > 0, total, 1.0), 0.0)


def pointing_game(attributions: Tensor, truth: Tensor, *, tolerance: int = 0) -> Tensor:
    """Bool [N, K]: is the largest attribution on the object, or at most `tolerance` px from it?

    Distance is Euclidean; the original game allows 15 px. Among equals, the first counts.
    """
    mask = _masks(attributions, truth)
    if tolerance < 0:
        raise ValueError(f"`tolerance` (={tolerance}) must be at least 0 pixels.")
    width = attributions.shape[-1]
    place = attributions.detach().flatten(2).argmax(2)  # [N, K]
    y, x = place // width, place % width
    rows = torch.arange(attributions.shape[-2], device=place.device)
    columns = torch.arange(width, device=place.device)
    dy, dx = rows - y[..., None], columns - x[..., None]
    near = dy.square()[..., :, None] + dx.square()[..., None, :] <= tolerance**2
    return (near & mask[:, None]).flatten(2).any(2)


def overlap(attributions: Tensor, truth: Tensor, *, threshold: float | None = None) -> Tensor:
    """[N, K]: intersection over union of the object with the pixels that the map marks.

    These are the ones above `threshold` times the map's maximum; by default as many of the largest
    values as the object has pixels, which needs no threshold. Only positive values are marked.
    """
    mask = _masks(attributions, truth)[:, None]
    values = attributions.detach()
    if threshold is None:
        size = mask.sum((2, 3)).clamp(min=1)  # [N, 1]
        ranked = values.flatten(2).sort(dim=2, descending=True).values
        level = ranked.gather(2, (size - 1)[:, :, None].expand(-1, values.shape[1], 1))[..., None]
        marked = (values >= level) & (values > 0)
    else:
        if not 0 <= threshold < 1:
            raise ValueError(f"`threshold` (={threshold}) must be from 0 to below 1.")
        marked = (values > threshold * values.amax((2, 3), keepdim=True)) & (values > 0)
    both, either = (marked & mask).sum((2, 3)), (marked | mask).sum((2, 3))
    return both.double() / either.clamp(min=1)


def _masks(attributions: Tensor, truth: Tensor) -> Tensor:
    if attributions.dim() != 4:
        raise ValueError(
            f"`attributions` (shape {tuple(attributions.shape)}) must be [N, K, H, W]."
        )
    if not bool(torch.isfinite(attributions).all()):
        raise ValueError("`attributions` hold values that are not finite: leave such maps out.")
    size = (attributions.shape[-2], attributions.shape[-1])
    truth = truth.to(attributions.device)
    masks = box_masks(truth, size) if truth.dim() == 2 else truth.bool()
    if masks.shape != (len(attributions), *size):
        raise ValueError(
            f"`truth` (shape {tuple(truth.shape)}) must be masks [N, H, W] or boxes [N, 4] for the "
            f"{len(attributions)} maps of {size[0]}×{size[1]} px."
        )
    return masks
