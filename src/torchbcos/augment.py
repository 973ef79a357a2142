"""Augmentations of a whole batch at once, each image with its own draw, on the batch's device.

All take images [N, C, H, W] in 0..1 and `Draws` for them, and return new images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
import torchvision.transforms.v2.functional as TF
from torch import Generator, Tensor

__all__ = [
    "AUGMENTATIONS",
    "Draws",
    "colour_jitter",
    "crops",
    "flip",
    "lighting",
    "padded_crop",
    "rand_augment",
    "resized_crop",
]


@dataclass(frozen=True)
class Draws:
    """Random numbers for the rows `rows` of a batch of `total` images, brought to `device`.

    Numbers are drawn for the whole batch and on the CPU, so that each image gets the same numbers
    however many processes share the batch, and on whatever device.
    """

    generator: Generator
    total: int
    rows: slice = field(default_factory=lambda: slice(None))
    device: torch.device | str = "cpu"

    def uniform(self, low: float, high: float) -> Tensor:
        full = torch.rand(self.total, generator=self.generator)
        return self._mine(full * (high - low) + low)

    def normal(self, count: int) -> Tensor:  # [N, count]
        return self._mine(torch.randn(self.total, count, generator=self.generator))

    def integers(self, high: int) -> Tensor:
        return self._mine(torch.randint(high, (self.total,), generator=self.generator))

    def _mine(self, full: Tensor) -> Tensor:
        return full[self.rows].to(self.device, non_blocking=True)


def flip(x: Tensor, draws: Draws) -> Tensor:
    """Left and right exchanged in half of the images."""
    turn = draws.uniform(0, 1) < 0.5
    return torch.where(turn[:, None, None, None], x.flip(-1), x)


def padded_crop(x: Tensor, draws: Draws, padding: int = 4) -> Tensor:
    """Moved by up to `padding` pixels each way; black comes in."""
    n, _, height, width = x.shape
    padded = F.pad(x, [padding] * 4)
    top, left = draws.integers(2 * padding + 1), draws.integers(2 * padding + 1)
    rows = top[:, None] + torch.arange(height, device=x.device)  # [N, H]
    columns = left[:, None] + torch.arange(width, device=x.device)
    image = torch.arange(n, device=x.device)[:, None, None]
    moved = padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]]
    return moved.permute(0, 3, 1, 2).contiguous()


def resized_crop(
    x: Tensor,
    draws: Draws,
    size: int | None = None,
    scale: tuple[float, float] = (0.25, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """A part of random area and shape, resized to `size` (by default the image's)."""
    n, _, height, width = x.shape
    area, shape, left, top = crops(draws, scale, ratio).unbind(1)
    w = (area * shape * (height / width)).sqrt().clamp(max=1)
    h = (area / shape * (width / height)).sqrt().clamp(max=1)
    cx, cy = (2 * left - 1) * (1 - w), (2 * top - 1) * (1 - h)
    zero = torch.zeros_like(w)
    matrix = torch.stack([torch.stack([w, zero, cx], 1), torch.stack([zero, h, cy], 1)], 1)
    out = (size, size) if size is not None else (height, width)
    grid = F.affine_grid(matrix, [n, 1, *out], align_corners=False)
    return F.grid_sample(x, grid.to(x.dtype), padding_mode="reflection", align_corners=False)


def crops(
    draws: Draws, scale: tuple[float, float], ratio: tuple[float, float] = (3 / 4, 4 / 3)
) -> Tensor:  # [N, 4]
    """The numbers of `resized_crop`, as `images.read_pixels` takes them."""
    area = draws.uniform(*scale)
    shape = torch.exp(draws.uniform(math.log(ratio[0]), math.log(ratio[1])))
    return torch.stack([area, shape, draws.uniform(0, 1), draws.uniform(0, 1)], 1)


def colour_jitter(x: Tensor, draws: Draws, strength: float = 0.4) -> Tensor:
    """Brightness, contrast and saturation each changed by a factor in 1 ± strength."""
    for change in (_brightness, _contrast, _saturation):
        x = change(x, draws.uniform(1 - strength, 1 + strength))
    return x


def lighting(x: Tensor, draws: Draws, strength: float = 0.1) -> Tensor:
    """Colours moved along the principal axes that the pixels of ImageNet have (AlexNet, 2012)."""
    values = x.new_tensor([0.2175, 0.0188, 0.0045])
    axes = x.new_tensor(
        [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
    )
    moved = (draws.normal(3).to(x.dtype) * strength * values) @ axes.T  # [N, 3]
    return (x + moved[:, :, None, None]).clamp(0, 1)


def rand_augment(x: Tensor, draws: Draws, n: int = 2, m: float = 9.0) -> Tensor:
    """RandAugment: for each image `n` operations at magnitude `m` of 30, drawn anew."""
    for _ in range(n):
        choice = replace(draws, device="cpu").integers(len(_OPERATIONS))  # a GPU need not wait
        sign = torch.where(draws.uniform(0, 1) < 0.5, -1.0, 1.0)
        result = x.clone()
        for index, operation in enumerate(_OPERATIONS):
            chosen = (choice == index).nonzero()[:, 0].to(x.device, non_blocking=True)
            if len(chosen):
                result[chosen] = operation(x[chosen], sign[chosen], m / 30).clamp(0, 1)
        x = result
    return x


AUGMENTATIONS: dict[str, Callable[[Tensor, Draws], Tensor]] = {
    "flip": flip,
    "padded_crop": padded_crop,
    "resized_crop": resized_crop,
    "colour_jitter": colour_jitter,
    "lighting": lighting,
    "rand_augment": rand_augment,
}


def _per_image(values: Tensor) -> Tensor:
    return values[:, None, None, None]


def _grey(x: Tensor) -> Tensor:
    weights = torch.tensor([0.299, 0.587, 0.114], device=x.device, dtype=x.dtype)
    return (x * weights[:, None, None]).sum(1, keepdim=True) if x.shape[1] == 3 else x


def _brightness(x: Tensor, factor: Tensor) -> Tensor:
    return (x * _per_image(factor)).clamp(0, 1)


def _contrast(x: Tensor, factor: Tensor) -> Tensor:
    mean = _grey(x).mean((1, 2, 3), keepdim=True)
    return (mean + (x - mean) * _per_image(factor)).clamp(0, 1)


def _saturation(x: Tensor, factor: Tensor) -> Tensor:
    grey = _grey(x)
    return (grey + (x - grey) * _per_image(factor)).clamp(0, 1)


def _affine(x: Tensor, rows: list[list[Tensor]]) -> Tensor:
    matrix = torch.stack([torch.stack(row, 1) for row in rows], 1)
    grid = F.affine_grid(matrix, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid.to(x.dtype), align_corners=False)


def _shear(x: Tensor, amount: Tensor, vertical: bool) -> Tensor:
    one, zero = torch.ones_like(amount), torch.zeros_like(amount)
    a, b = (zero, amount) if vertical else (amount, zero)
    return _affine(x, [[one, a, zero], [b, one, zero]])


def _translate(x: Tensor, amount: Tensor, vertical: bool) -> Tensor:
    one, zero = torch.ones_like(amount), torch.zeros_like(amount)
    a, b = (zero, amount) if vertical else (amount, zero)
    return _affine(x, [[one, zero, a], [zero, one, b]])


def _rotate(x: Tensor, angle: Tensor) -> Tensor:
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    return _affine(x, [[cos, -sin, zero], [sin, cos, zero]])


def _posterize(x: Tensor, m: float) -> Tensor:
    levels = 2 ** (8 - round(4 * m))
    step = 256 // levels
    posterised: Tensor = torch.floor(x * 255 / step) * step / 255
    return posterised


def _equalize(x: Tensor) -> Tensor:
    equalised: Tensor = TF.equalize((x * 255).round().to(torch.uint8))
    return equalised.to(x.dtype) / 255


def _sharpness(x: Tensor, factor: Tensor) -> Tensor:
    kernel = torch.ones(3, 3, device=x.device, dtype=x.dtype)
    kernel[1, 1] = 5
    channels = x.shape[1]
    blurred = x.clone()
    weight = (kernel / kernel.sum()).expand(channels, 1, 3, 3)
    blurred[:, :, 1:-1, 1:-1] = F.conv2d(x, weight, groups=channels)
    return blurred + (x - blurred) * _per_image(factor)


#: (images, sign of each, magnitude in 0..1) → images, with RandAugment's usual ranges.
_OPERATIONS: tuple[Callable[[Tensor, Tensor, float], Tensor], ...] = (
    lambda x, s, m: x,
    lambda x, s, m: _shear(x, 0.3 * m * s, vertical=False),
    lambda x, s, m: _shear(x, 0.3 * m * s, vertical=True),
    lambda x, s, m: _translate(x, 2 * 150 / 331 * m * s, vertical=False),
    lambda x, s, m: _translate(x, 2 * 150 / 331 * m * s, vertical=True),
    lambda x, s, m: _rotate(x, math.radians(30) * m * s),
    lambda x, s, m: _brightness(x, 1 + 0.9 * m * s),
    lambda x, s, m: _saturation(x, 1 + 0.9 * m * s),
    lambda x, s, m: _contrast(x, 1 + 0.9 * m * s),
    lambda x, s, m: _sharpness(x, 1 + 0.9 * m * s),
    lambda x, s, m: _posterize(x, m),
    lambda x, s, m: torch.where(x >= 1 - m, 1 - x, x),
    lambda x, s, m: TF.autocontrast(x),
    lambda x, s, m: _equalize(x),
)
