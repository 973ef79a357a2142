"""A drawn data set: shapes on clutter, with the truth about where they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["SHAPES", "Shapes", "shapes"]

#: The classes of `shapes`.
SHAPES = ("disc", "ring", "square", "triangle", "cross", "star", "crescent", "bars")


@dataclass(frozen=True)
class Shapes:
    images: Tensor  # [N, 3, S, S] in 0..1
    labels: Tensor  # [N]
    masks: Tensor  # [N, S, S] bool: the object's pixels
    boxes: Tensor  # [N, 4] (top, left, bottom, right) of the mask, bottom and right exclusive
    classes: tuple[str, ...] = SHAPES


def shapes(count: int, *, size: int = 64, seed: int = 0, clutter: float = 1.0) -> Shapes:
    """One object per image, of any colour, place, size and angle, on textured clutter.

    The class is the shape alone: objects have every hue, saturated and bright, whatever their
    class, and the clutter, muted, has gradients, stripes and blobs of its own. The same arguments
    give the same images, and image i does not depend on `count`.

    >>> data = shapes(4, size=32, seed=1)
    >>> data.images.shape, [data.classes[i] for i in data.labels]
    (torch.Size([4, 3, 32, 32]), ['disc', 'ring', 'square', 'triangle'])
    """
    if count < 1 or size < 16:
        raise ValueError(f"`count` (={count}) and `size` (={size}) must be at least 1 and 16.")
    block = 256  # drawn in blocks of their own seed, so that a prefix stays the same
    parts = [
        _draw(min(block, count - start), start, size, seed * 1_000_003 + start, clutter)
        for start in range(0, count, block)
    ]
    images, labels, masks = (torch.cat(column) for column in zip(*parts, strict=True))
    return Shapes(images, labels, masks, _boxes(masks))


def _draw(
    count: int, start: int, size: int, seed: int, clutter: float
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        # Drawn for a whole block, whatever `count`, so that each image keeps its numbers.
        full = torch.rand(256, *shape, generator=generator)[:count]
        return low + (high - low) * full

    labels = (start + torch.arange(count)) % len(SHAPES)
    radius = uniform(low=0.16, high=0.3)
    centre = uniform(2, low=-0.5, high=0.5) * (1 - 2 * radius - 0.04)[:, None]
    angle = uniform(high=2 * math.pi)
    axis = (torch.arange(size) + 0.5) / size - 0.5
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    dy, dx = y - centre[:, 0, None, None], x - centre[:, 1, None, None]
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    u = (cos * dx + sin * dy) / radius[:, None, None]
    v = (cos * dy - sin * dx) / radius[:, None, None]
    masks = _inside(labels, u, v)

    ground = _ground(size, clutter, uniform)
    hue = uniform(1) + torch.tensor([0.0, 1 / 3, 2 / 3])
    colour = (3 * (2 * (hue % 1) - 1).abs() - 1).clamp(0, 1)  # a point of the colour wheel
    shade = 1 + 0.15 * uniform(1, low=-1.0)[..., None] * (u + v).clamp(-2, 2)
    object_ = (colour[:, :, None, None] * shade[:, None]).clamp(0, 1)
    images = torch.where(masks[:, None], object_, ground)
    noise = uniform(3, size, size, low=-0.03, high=0.03)
    return (images + noise).clamp(0, 1), labels, masks


def _inside(labels: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Which points, in units of the object's radius, are inside each of the shapes."""
    r = (u.square() + v.square()).sqrt()
    angle = torch.atan2(v, u)
    edge = torch.stack([u * math.sin(a) - v * math.cos(a) for a in (0.0, 2.0944, 4.1888)])
    kinds = {
        "disc": r < 0.85,
        "ring": (r < 0.95) & (r > 0.5),
        "square": (u.abs() < 0.72) & (v.abs() < 0.72),
        "triangle": edge.amax(0) < 0.45,
        "cross": (torch.minimum(u.abs(), v.abs()) < 0.24)
        & (torch.maximum(u.abs(), v.abs()) < 0.95),
        "star": r < 0.62 + 0.36 * torch.cos(5 * angle),
        "crescent": (r < 0.9) & ((u - 0.42).square() + v.square() > 0.55),
        "bars": (v.abs() < 0.8) & (((u + 0.9) % 0.72) < 0.36) & (u.abs() < 0.9),
    }
    chosen = torch.stack([kinds[name] for name in SHAPES])  # [K, N, S, S]
    return chosen[labels, torch.arange(len(labels))]


def _ground(size: int, clutter: float, draw: Callable[..., Tensor]) -> Tensor:
    """Smooth noise at three scales around a base colour, with stripes and soft blobs."""
    base = draw(1, low=0.15, high=0.6) + draw(3, low=-0.08, high=0.08)
    ground = base[:, :, None, None].expand(-1, -1, size, size)
    for cells, strength in ((3, 0.12), (7, 0.1), (17, 0.08)):
        coarse = draw(3, cells, cells, low=-strength, high=strength) * clutter
        ground = ground + F.interpolate(coarse, (size, size), mode="bilinear")
    axis = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    direction, frequency = draw(1, 1, high=math.pi), draw(1, 1, low=3.0, high=14.0)
    stripes = torch.sin(frequency * (x * direction.cos() + y * direction.sin()))[:, None]
    ground = ground + 0.06 * clutter * draw(1, 1, 1, low=-1.0) * stripes
    for _ in range(4):
        place, width = draw(2, 1, 1, low=-1.0), draw(1, 1, low=0.02, high=0.12)
        distance = (y - place[:, 0]).square() + (x - place[:, 1]).square()
        blob = torch.exp(-distance / width)[:, None]
        ground = ground + clutter * draw(3, 1, 1, low=-0.25, high=0.25) * blob
    return ground.clamp(0, 1)


def _boxes(masks: Tensor) -> Tensor:
    rows, columns = masks.any(2).int(), masks.any(1).int()
    ends = [rows.argmax(1), columns.argmax(1)]
    ends += [line.shape[1] - line.flip(1).argmax(1) for line in (rows, columns)]
    return torch.stack(ends, 1)
