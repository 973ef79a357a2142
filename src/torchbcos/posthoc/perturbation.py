"""Methods that change the input and look at what becomes of the outputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchbcos.posthoc.registry import register
from torchbcos.posthoc.subject import Subject, probabilities
from torchbcos.targets import Targets

__all__ = ["occlusion", "rise", "rise_masks"]

MASKS, CELLS, KEPT = 500, 8, 0.1  # of RISE, as in the paper
PARTS = 12  # Occlusion's window is a 12th of the image, and moves by half of itself
CHUNK = 16  # changed images in one forward pass


@register("rise", label="RISE", perturbs=True)
@torch.no_grad()
def rise(
    model: nn.Module,
    images: Tensor,
    targets: Targets = None,
    masks: int = MASKS,
    cells: int = CELLS,
    kept: float = KEPT,
    seed: int = 0,
    chunk: int = CHUNK,
) -> Tensor:
    """Random masks, weighted by the probability that is left: Σ p·mask / (masks · kept).

    All masks count, the same for every image; they are made when needed and not kept.
    """
    subject = Subject.of(model, images, targets)
    x = subject.x
    total = x.new_zeros(*subject.targets.shape, *x.shape[-2:])
    for mask in _mask_chunks(masks, (x.shape[-2], x.shape[-1]), cells, kept, seed, chunk, x):
        for i in range(len(x)):
            p = probabilities(model, subject.logits(mask[:, None] * x[i]))
            total[i] += torch.einsum("mk,mhw->khw", p[:, subject.targets[i]], mask)
    return total / (masks * kept)


def rise_masks(
    count: int, size: tuple[int, int], cells: int = CELLS, kept: float = KEPT, seed: int = 0
) -> Tensor:
    """All of them, [count, H, W]."""
    like = torch.empty(0)
    return torch.cat(list(_mask_chunks(count, size, cells, kept, seed, count, like)))


def _mask_chunks(
    count: int,
    size: tuple[int, int],
    cells: int,
    kept: float,
    seed: int,
    chunk: int,
    like: Tensor,
) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    grids = (torch.rand(count, 1, cells, cells, generator=generator) < kept).to(like.dtype)
    steps = [-(-side // cells) for side in size]  # pixels of a cell, rounded up
    shifts = torch.stack([torch.randint(s, (count,), generator=generator) for s in steps], 1)
    grids, shifts = grids.to(like.device), shifts.to(like.device)
    for start in range(0, count, chunk):
        rows = slice(start, start + chunk)
        yield _enlarged(grids[rows], shifts[rows], size, steps)


def _enlarged(grids: Tensor, shifts: Tensor, size: tuple[int, int], steps: list[int]) -> Tensor:
    """Bilinear enlargement of [M, 1, s, s] to (s + 1) cells, cut to the image at its shift."""
    cells = grids.shape[-1]
    axes = []
    for d in (0, 1):
        pixel = torch.arange(size[d], device=grids.device) + shifts[:, d, None]  # [M, side]
        place = (pixel + 0.5) * cells / ((cells + 1) * steps[d]) - 0.5
        axes.append((2 * place / (cells - 1) - 1).to(grids.dtype))
    shape = (len(grids), *size)
    y, x = axes[0][:, :, None].expand(shape), axes[1][:, None, :].expand(shape)
    where = torch.stack([x, y], -1)
    return F.grid_sample(grids, where, padding_mode="reflection", align_corners=True)[:, 0]


# All targets share the forward passes; captum's Occlusion runs them once for each.
@register("occlusion", label="Occlusion", perturbs=True)
@torch.no_grad()
def occlusion(
    model: nn.Module,
    images: Tensor,
    targets: Targets = None,
    window: int | None = None,
    stride: int | None = None,
    chunk: int = CHUNK,
) -> Tensor:
    """How much the logit falls when a window of zeros covers a pixel, on average of the windows.

    By default the window is a twelfth of the image's side and moves by half of itself.
    """
    subject = Subject.of(model, images, targets)
    x = subject.x
    height, width = x.shape[-2:]
    window = max(1, round(min(height, width) / PARTS)) if window is None else window
    stride = max(1, window // 2) if stride is None else stride
    if not 1 <= window <= min(height, width) or not 1 <= stride <= window:
        raise ValueError(
            f"`window` (={window}) must be from 1 to {min(height, width)} pixels and `stride` "
            f"(={stride}) from 1 to the window."
        )
    places = [
        (t, v) for t in _starts(height, window, stride) for v in _starts(width, window, stride)
    ]
    rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
    total = x.new_zeros(*subject.targets.shape, height, width)
    often = x.new_zeros(height, width)
    before = subject.outputs(x)
    for part in torch.tensor(places, device=x.device).split(chunk):
        top, left = part[:, :1], part[:, 1:]
        in_rows = (rows >= top) & (rows < top + window)
        in_columns = (columns >= left) & (columns < left + window)
        covered = (in_rows[:, :, None] & in_columns[:, None, :]).to(x.dtype)  # [P, H, W]
        often += covered.sum(0)
        for i in range(len(x)):
            after = subject.logits((1 - covered[:, None]) * x[i])[:, subject.targets[i]]
            total[i] += torch.einsum("pk,phw->khw", before[i] - after, covered)
    return total / often


def _starts(side: int, window: int, stride: int) -> list[int]:
    """Window positions; the last one reaches the edge, cut there."""
    count = -(-(side - window) // stride) + 1
    return [i * stride for i in range(count)]
