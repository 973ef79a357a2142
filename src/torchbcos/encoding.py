"""The input encoding [r, g, b, 1-r, 1-g, 1-b], its inverse, and checks of what users pass.

The encoding gives dark pixels as much to contribute as bright ones, and the direction of a pixel
alone, whatever its length, tells its colour (paper, Sec. 4 and supplement D).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["begin_check_values", "check_images", "check_values", "decode", "encode"]

_NO_FLOATS = (
    "`images` (dtype {}) must be floating point in 0..1: use images.float() / 255 for 8-bit images."
)


def encode(images: Tensor) -> Tensor:
    """[…, C, H, W] in 0..1 → […, 2C, H, W]: the channels, then one minus each.

    >>> encode(torch.tensor([0.25, 0.5, 1.0]).view(3, 1, 1)).flatten()
    tensor([0.2500, 0.5000, 1.0000, 0.7500, 0.5000, 0.0000])
    """
    if not images.is_floating_point():
        raise TypeError(_NO_FLOATS.format(images.dtype))
    return torch.cat([images, 1 - images], dim=-3)


def decode(encoded: Tensor) -> Tensor:
    """[…, 2C, H, W] → […, C, H, W]: the colour that the direction of each pixel stands for.

    Inverts `encode`, and reads weights W(x) as colours: a pair (r, 1-r) of any length, negative
    parts cut to 0, is scaled to sum 1. A pair of zeros gives 0.

    >>> decode(3 * encode(torch.tensor([0.25, 0.5, 1.0]).view(3, 1, 1))).flatten()
    tensor([0.2500, 0.5000, 1.0000])
    """
    if encoded.dim() < 3 or encoded.shape[-3] % 2:
        raise ValueError(
            f"`encoded` (shape {tuple(encoded.shape)}) must be […, 2C, H, W]: an even number of "
            "channels, the second half for one minus the first."
        )
    colour, inverse = encoded.clamp(min=0).chunk(2, dim=-3)
    total = colour + inverse
    return colour / torch.where(total > 0, total, 1.0)


def check_images(images: Tensor, channels: int = 3) -> None:
    """Raise if `images` cannot be [N, channels, H, W] of a floating type; reads no values."""
    if not isinstance(images, Tensor):
        raise TypeError(
            f"`images` (a {type(images).__name__}) must be a tensor [N, {channels}, H, W] with "
            "values in 0..1: use torchvision.transforms.functional.to_tensor for a PIL image."
        )
    shape = tuple(images.shape)
    if images.dim() != 4:
        remedy = "add the batch dimension with images[None]" if images.dim() == 3 else "reshape it"
        raise ValueError(f"`images` (shape {shape}) must be [N, {channels}, H, W]: {remedy}.")
    if shape[1] != channels:
        if shape[3] == channels:
            remedy = "the channels are last, so use images.permute(0, 3, 1, 2)"
        elif shape[1] == 2 * channels:
            remedy = "these look already encoded; pass plain images, the model encodes them itself"
        elif shape[1] == 1 and channels == 3:
            remedy = "repeat the grey channel with images.expand(-1, 3, -1, -1)"
        elif shape[1] == 4 and channels == 3:
            remedy = "drop the alpha channel with images[:, :3]"
        elif shape[1] == 3 and channels == 1:
            remedy = "make it grey with torchvision.transforms.functional.rgb_to_grayscale(images)"
        else:
            remedy = f"this model was made for images of {channels} channels"
        raise ValueError(f"`images` (shape {shape}) must be [N, {channels}, H, W]: {remedy}.")
    if not images.is_floating_point():
        raise TypeError(_NO_FLOATS.format(images.dtype))
    if 0 in shape:
        raise ValueError(f"`images` (shape {shape}) is empty.")


def check_values(images: Tensor) -> None:
    """Raise if the values of `images` are not in 0..1, and say what they look like instead."""
    _check_range(*torch.stack(torch.aminmax(images.detach())).tolist())


def begin_check_values(images: Tensor) -> Callable[[], None]:
    """`check_values`, which on a GPU is ended by calling what is returned: work that is started in
    between need not wait until the GPU is done with earlier work.
    """
    if not images.is_cuda:
        check_values(images)
        return lambda: None
    ends = torch.stack(torch.aminmax(images.detach()))
    here = torch.empty_like(ends, device="cpu", pin_memory=True)
    here.copy_(ends, non_blocking=True)
    copied = torch.cuda.current_stream(images.device).record_event()

    def end() -> None:
        copied.synchronize()
        _check_range(*here.tolist())

    return end


def _check_range(low: float, high: float) -> None:
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(
            f"`images` (from {low:g} to {high:g}) must be finite: look for a division by zero "
            "before this call."
        )
    slack = 1e-3  # what a resize in half precision may overshoot
    if low >= -slack and high <= 1 + slack:
        return
    if low >= 0 and high > 2:
        remedy = f"they look like 0..{255 if high <= 255 else 65535}; divide by that"
    elif low >= -0.2 and high <= 1.2:
        remedy = "they overshoot a little, as after a bicubic resize; use images.clamp(0, 1)"
    elif low >= -1 - slack and high <= 1 + slack:
        remedy = "they look scaled to -1..1; use (images + 1) / 2"
    else:
        remedy = (
            "they look normalised by mean and deviation; leave that transform out, the model needs "
            "plain 0..1"
        )
    raise ValueError(f"`images` (from {low:g} to {high:g}) must have values in 0..1: {remedy}.")
