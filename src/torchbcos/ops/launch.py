"""Launching kernels over the pixels of maps [N, C, H, W] at little cost to the host.

Triton looks at every argument of every launch anew, for longer than a small layer takes to compute.
A `Launch` fixes all but the tensors; the functions that make one are cached by shapes and strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

__all__ = [
    "Launch",
    "by_pixels",
    "empty_map",
    "layout",
    "remember_squares",
    "remembered_squares",
    "tile",
]

Shape = tuple[int, ...]


class Launch:
    """A kernel with its grid and all arguments but the tensors, which come first.

    The tensors must begin at multiples of 16 bytes, as torch's own allocations do.
    """

    def __init__(self, kernel: Any, programs: int, *rest: Any) -> None:
        self._kernel, self._grid, self._rest = kernel, (programs, 1, 1), rest
        self._device = 0
        self._between: tuple[Any, ...] = ()
        self._start: Callable[..., None] | None = None

    def __call__(self, *tensors: Tensor) -> None:
        if self._start is None:
            made = self._kernel[self._grid](*tensors, *self._rest)
            if made is not None:  # the interpreter makes nothing
                self._device = tensors[0].device.index
                # function, metadata, and no hooks: what stands between the stream and the arguments
                self._between = (made.function, made.packed_metadata, None, None, None)
                self._start = made.run
            return
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        pointers = [t.data_ptr() for t in tensors]
        try:
            self._start(*self._grid, stream, *self._between, *pointers, *self._rest)
        except TypeError:  # a Triton that starts its kernels in another way
            self._kernel[self._grid](*tensors, *self._rest)


def tile(pixels: int, channels: int) -> tuple[int, int, int]:
    """Programs, and the pixels and channels that each takes at a time, about 4096 elements."""
    block_c = min(triton.next_power_of_2(channels), 512)
    block_m = max(1, min(4096 // block_c, 128, triton.next_power_of_2(pixels)))
    return triton.cdiv(pixels, block_m), block_m, block_c


def layout(shape: Shape, stride: Shape) -> tuple[int, int, int]:
    """The strides of images, of pixels in an image, and of channels."""
    return stride[0], stride[3] if shape[3] > 1 else stride[2], stride[1]


def by_pixels(x: Tensor) -> Tensor:
    """`x` itself where its pixels follow each other at one stride from an even start, or a copy."""
    _, _, height, width = x.shape
    _, _, down, right = x.stride()
    if (height == 1 or width == 1 or down == width * right) and not x.data_ptr() & 15:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def empty_map(like: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """A map of other channels in the memory format of `like`."""
    n, _, h, w = like.shape
    last = like.stride(1) == 1
    strides = (
        (h * w * channels, 1, w * channels, channels) if last else (h * w * channels, h * w, w, 1)
    )
    return torch.empty_strided((n, channels, h, w), strides, dtype=dtype, device=like.device)


_SQUARES = "_bcos_squares"  # the attribute of a map that holds its Σ x² and the version it is of


def remember_squares(x: Tensor, squares: Tensor) -> None:
    """Leave Σ x² over the channels, [N, H, W], for the layer that x comes to."""
    if not x.is_inference():  # whose changes cannot be noticed
        setattr(x, _SQUARES, (squares, x._version))


def remembered_squares(x: Tensor) -> Tensor | None:
    """Σ x², if it was left and x is unchanged since."""
    squares, version = getattr(x, _SQUARES, (None, None))
    return squares if squares is not None and version == x._version else None
