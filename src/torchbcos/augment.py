"""Augmentations of a whole batch at once, each image with its own draw, on the batch's device.

Each takes images [N, C, H, W] in 0..1 and its draws [K, N], and returns new images. Which
operations run depends on no value, and the host waits for none, so that any sequence of them can be
captured as a CUDA graph. Grids are made without matrix products, which TF32 would round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from torchbcos import ops

__all__ = [
    "AUGMENTATIONS",
    "Augmentation",
    "colour_jitter",
    "crops",
    "cutmix",
    "draw_cutmix",
    "erase",
    "exchanged",
    "flip",
    "lighting",
    "padded_crop",
    "rand_augment",
    "resized_crop",
]


class Augmentation(NamedTuple):
    """A change of images, and how the numbers [K, N] that it takes are drawn.

    Numbers are drawn for the whole batch and on the CPU, so that each image gets the same numbers
    however many processes share the batch, and on whatever device.
    """

    change: Callable[..., Tensor]  # (images, draws, settings)
    draw: Callable[..., Tensor]  # (generator, N, settings)


def flip(x: Tensor, draws: Tensor) -> Tensor:
    """Left and right exchanged in half of the images."""
    return torch.where(_per_image(draws[0] < 0.5), x.flip(-1), x)


def padded_crop(x: Tensor, draws: Tensor, padding: int = 4) -> Tensor:
    """Moved by up to `padding` pixels each way (draws from 0 to 2·padding); black comes in."""
    n, _, height, width = x.shape
    padded = F.pad(x, [padding] * 4)
    top, left = draws.long()
    rows = top[:, None] + torch.arange(height, device=x.device)  # [N, H]
    columns = left[:, None] + torch.arange(width, device=x.device)
    image = torch.arange(n, device=x.device)[:, None, None]
    moved = padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]]
    return moved.permute(0, 3, 1, 2).contiguous()


def resized_crop(
    x: Tensor,
    draws: Tensor,
    size: int | None = None,
    scale: tuple[float, float] = (0.25, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """A part of random area and shape, resized to `size` (by default the image's)."""
    height, width = x.shape[2:]
    area, shape, left, top = crops(draws, scale, ratio).to(x.dtype).unbind(1)
    w = (area * shape * (height / width)).sqrt().clamp(max=1)
    h = (area / shape * (width / height)).sqrt().clamp(max=1)
    cx, cy = (2 * left - 1) * (1 - w), (2 * top - 1) * (1 - h)
    zero = torch.zeros_like(w)
    matrix = torch.stack([w, zero, cx, zero, h, cy], 1).view(-1, 2, 3)
    return _sample(x, matrix, (size, size) if size is not None else (height, width), "reflection")


def crops(
    draws: Tensor, scale: tuple[float, float], ratio: tuple[float, float] = (3 / 4, 4 / 3)
) -> Tensor:  # [N, 4]
    """The area, shape and place of `resized_crop`'s parts, as `images.read_pixels` takes them."""
    area = _between(*scale, draws[0])
    shape = torch.exp(_between(math.log(ratio[0]), math.log(ratio[1]), draws[1]))
    return torch.stack([area, shape, draws[2], draws[3]], 1)


def colour_jitter(x: Tensor, draws: Tensor, strength: float = 0.4) -> Tensor:
    """Brightness, contrast and saturation each changed by a factor in 1 ± strength."""
    factors = _between(1 - strength, 1 + strength, draws).to(x.dtype)
    brightness, contrast, saturation = factors[..., None, None, None].unbind()
    x = (x * brightness).clamp(0, 1)
    mean = _grey(x).mean((1, 2, 3), keepdim=True)
    x = (mean + (x - mean) * contrast).clamp(0, 1)
    grey = _grey(x)
    return (grey + (x - grey) * saturation).clamp(0, 1)


def lighting(x: Tensor, draws: Tensor, strength: float = 0.1) -> Tensor:
    """Colours moved along the principal axes that the pixels of ImageNet have (AlexNet, 2012)."""
    along = draws.to(x.dtype).T[:, None] * _colour_axes(x.device, x.dtype)  # [N, 3, 3]
    moved: Tensor = x + strength * along.sum(2)[:, :, None, None]
    return moved.clamp(0, 1)


def erase(x: Tensor, draws: Tensor) -> Tensor:
    """Cutout: a window of half the height and width, about any pixel, becomes grey.

    Grey is 0.5, which the encoding [rgb, 1 - rgb] shows as alike in all six channels: no colour,
    neither bright nor dark.
    """
    inside = []
    for length, draw in zip(x.shape[2:], draws, strict=True):
        start = torch.floor(draw * length) - length // 4
        place = torch.arange(length, device=x.device) - start[:, None]
        inside.append((place >= 0) & (place < length // 2))  # [N, length]
    rows, columns = inside
    return x.masked_fill((rows[:, :, None] & columns[:, None])[:, None], 0.5)


def cutmix(x: Tensor, draws: Tensor, chance: float) -> tuple[Tensor, Tensor]:
    """CutMix: of each two neighbours, by `chance`, a window of any size and place is exchanged.

    The second result [N] is the share of each image that is still its own.
    """
    happens, area, *centre = draws[:, ::2].unsqueeze(2)  # each [N / 2, 1]
    side = area.sqrt() * (happens < chance)
    inside = []
    for length, middle in zip(x.shape[2:], centre, strict=True):
        place = (torch.arange(length, device=x.device) + 0.5) / length
        inside.append((place - middle).abs() < side / 2)  # [N / 2, length]
    rows, columns = inside
    window = (rows[:, :, None] & columns[:, None]).repeat_interleave(2, 0)  # [N, H, W]
    mixed = torch.where(window[:, None], exchanged(x), x)
    return mixed, 1 - window.to(draws.dtype).mean((1, 2))


def exchanged(x: Tensor) -> Tensor:
    """[N, …] with neighbours in each other's place: the second, the first, the fourth, …"""
    pairs: Tensor = x.unflatten(0, (-1, 2))
    return pairs.flip(1).flatten(0, 1)


def rand_augment(x: Tensor, draws: Tensor, m: float = 9.0) -> Tensor:
    """RandAugment: for each pair of draws one operation on each image, at magnitude `m` of 30."""
    for choice, side in draws.unflatten(0, (-1, 2)):
        x = _operate(x, choice.long(), (side >= 0.5).long(), m / 30)
    return x


def draw_cutmix(generator: Generator, total: int) -> Tensor:  # [4, N]
    return torch.rand(4, total, generator=generator)


def _draw_uniform(count: int) -> Callable[[Generator, int], Tensor]:
    return lambda generator, total: torch.rand(count, total, generator=generator)


def _draw_shifts(generator: Generator, total: int) -> Tensor:
    return torch.randint(9, (2, total), generator=generator, dtype=torch.float32)


def _draw_normal(generator: Generator, total: int) -> Tensor:
    return torch.randn(total, 3, generator=generator).T


def _draw_operations(generator: Generator, total: int, n: int = 2) -> Tensor:
    rows = []
    for _ in range(n):
        high = len(_OPERATIONS)
        rows.append(torch.randint(high, (total,), generator=generator, dtype=torch.float32))
        rows.append(torch.rand(total, generator=generator))
    return torch.stack(rows)


#: The place of each is part of the seed of its draws: new ones come last.
AUGMENTATIONS: dict[str, Augmentation] = {
    "flip": Augmentation(flip, _draw_uniform(1)),
    "padded_crop": Augmentation(padded_crop, _draw_shifts),
    "resized_crop": Augmentation(resized_crop, _draw_uniform(4)),
    "colour_jitter": Augmentation(colour_jitter, _draw_uniform(3)),
    "lighting": Augmentation(lighting, _draw_normal),
    "rand_augment": Augmentation(rand_augment, _draw_operations),
    "erase": Augmentation(erase, _draw_uniform(2)),
}


def _per_image(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def _between(low: float, high: float, uniform: Tensor) -> Tensor:
    return uniform * (high - low) + low


def _sample(x: Tensor, matrix: Tensor, size: tuple[int, int], padding: str = "zeros") -> Tensor:
    """The images as seen at `matrix` [N, 2, 3] times the place (x, y, 1), in -1..1."""
    down, across = (
        torch.linspace(1 / n - 1, 1 - 1 / n, n, device=x.device, dtype=x.dtype) for n in size
    )
    a, b, c = matrix[..., None, None].unbind(2)  # each [N, 2, 1, 1]
    grid = (a * across + (b * down[:, None] + c)).permute(0, 2, 3, 1)
    return F.grid_sample(x, grid, padding_mode=padding, align_corners=False)


def _grey(x: Tensor) -> Tensor:  # [N, 1, H, W]
    if x.shape[1] != 3:
        return x
    return x[:, :1] * 0.299 + x[:, 1:2] * 0.587 + x[:, 2:] * 0.114


def _blurred(x: Tensor) -> Tensor:
    """By [[1, 1, 1], [1, 5, 1], [1, 1, 1]] / 13; the outermost pixels stay."""
    rows = x[:, :, :-2] + x[:, :, 1:-1] + x[:, :, 2:]
    sums = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    blurred = x.clone()
    blurred[:, :, 1:-1, 1:-1].mul_(4).add_(sums).div_(13)
    return blurred


def _equalised(x: Tensor) -> Tensor:
    """Each channel's values spread evenly over 0..255, as Pillow and torchvision do it."""
    values = (x * 255).round().long().flatten(2)  # [N, C, HW]
    histogram = torch.zeros(*values.shape[:2], 256, dtype=torch.int32, device=x.device)
    histogram.scatter_add_(2, values, histogram.new_ones(()).expand_as(values))
    highest = histogram.gather(2, values.amax(2, keepdim=True))
    step = (values.shape[2] - highest) // 255  # pixels for each value
    below = histogram.cumsum(2, dtype=torch.int32) - histogram
    spread = ((below + step // 2) // step.clamp(min=1)).clamp(max=255)
    table = torch.where(step > 0, spread, torch.arange(256, device=x.device))
    return (table.to(x.dtype) / 255).gather(2, values).view(x.shape)


_OPERATIONS = (
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate",
    "brightness", "saturation", "contrast", "sharpness",
    "posterise", "solarise", "autocontrast", "equalise",
)  # fmt: skip


def _operate(x: Tensor, choice: Tensor, side: Tensor, m: float) -> Tensor:
    """`choice` [N] among `_OPERATIONS`, to the side 0 or 1, at magnitude `m` in 0..1.

    By the numbers of `_table` each image is changed by its own operation alone. Without a kernel
    all are computed for all images, and the others leave it as it is, to the bit.
    """
    own = _table(m, x.device, x.dtype)[choice, side]  # [N, 15]
    step = 2 ** round(4 * m)
    fused = ops.fused_augmentation(x, own, step)
    if fused is not None:
        return fused
    numbers = own[:, 6:, None, None, None].unbind(1)
    moves, saturates, contrasts, sharpens, factor, posterises, limit, stretches, equalises = numbers

    moved = _sample(x, own[:, :6].unflatten(1, (2, 3)), (x.shape[2], x.shape[3]))
    x = torch.lerp(x, moved, moves)

    grey = _grey(x)
    other = grey * saturates + grey.mean((1, 2, 3), keepdim=True) * contrasts
    x = torch.lerp(_blurred(x).mul_(sharpens).add_(other), x, factor)

    x = torch.lerp(x, (x * 255).div_(step).floor_().mul_(step).div_(255), posterises)
    x = torch.where(x >= limit, 1 - x, x)

    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    stretches = stretches * (high > low)
    width = torch.lerp(torch.ones_like(low), high - low, stretches)
    x = (x - low * stretches).div_(width).clamp_(0, 1)
    return torch.lerp(x, _equalised(x), equalises)


@cache
def _table(m: float, device: torch.device, dtype: torch.dtype) -> Tensor:  # [14, 2, 15]
    """RandAugment's usual ranges, for each operation to each side: first a matrix [2, 3]."""
    numbers = []
    for name in _OPERATIONS:
        for amount in (-m, m):
            shear, shift, angle = 0.3 * amount, 2 * 150 / 331 * amount, math.radians(30) * amount
            cos, sin = math.cos(angle), math.sin(angle)
            matrix = {
                "shear_x": [1, shear, 0, 0, 1, 0],
                "shear_y": [1, 0, 0, shear, 1, 0],
                "translate_x": [1, 0, shift, 0, 1, 0],
                "translate_y": [1, 0, 0, 0, 1, shift],
                "rotate": [cos, -sin, 0, sin, cos, 0],
            }.get(name)
            blended = name in ("brightness", "saturation", "contrast", "sharpness")
            numbers += [
                *(matrix or [1, 0, 0, 0, 1, 0]),
                matrix is not None,
                name == "saturation",
                name == "contrast",
                name == "sharpness",
                1 + 0.9 * amount if blended else 1,
                name == "posterise",
                1 - m if name == "solarise" else math.inf,
                name == "autocontrast",
                name == "equalise",
            ]
    return torch.tensor(numbers, dtype=dtype).view(len(_OPERATIONS), 2, -1).to(device)


@cache
def _colour_axes(device: torch.device, dtype: torch.dtype) -> Tensor:  # [channel, axis]
    """One standard deviation along each axis."""
    axes = [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
    deviations = [0.2175, 0.0188, 0.0045]
    return (torch.tensor(axes, dtype=dtype) * torch.tensor(deviations, dtype=dtype)).to(device)
