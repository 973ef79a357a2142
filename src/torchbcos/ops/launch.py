"""Launching kernels over the pixels of maps [N, C, H, W] at little cost to the host.

Triton looks at every argument of every launch anew, for longer than a small layer takes to compute.
A `Launch` fixes all but the tensors; the functions that make one are cached by shapes and strides.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

__all__ = [
    "Launch",
    "applied",
    "by_pixels",
    "dense_stride",
    "empty",
    "layout",
    "lies_by_pixels",
    "remember_squares",
    "remembered_squares",
    "tile",
]

Shape = tuple[int, ...]

_guards: Any = torch._C._dynamo.guards
#: (size, stride, dtype) → a tensor on the current device, in a third of `torch.empty_strided`'s
#: time; what Inductor's compiled code calls.
empty: Callable[[Shape, Shape, torch.dtype], Tensor] = (
    _guards._empty_strided_cuda if torch.cuda.is_available() else _guards._empty_strided_cpu
)


class Launch:
    """A kernel with its grid and all arguments but the tensors, which come first.

    The tensors must begin at multiples of 16 bytes, as torch's own allocations do.
    """

    def __init__(self, kernel: Any, programs: int, *rest: Any) -> None:
        self._kernel, self._grid, self._rest = kernel, (programs, 1, 1), rest
        self._device = 0
        self._start: Callable[..., None] | None = None
        self._between: tuple[Any, ...] = ()  # the stream and the pointers, for `_start`
        self._packed = False  # whether `_start` takes the kernel's arguments as one tuple

    def __call__(self, *tensors: Tensor) -> None:
        start = self._start
        if start is None:
            self._first(tensors)
            return
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if self._packed:
            arguments = (*map(Tensor.data_ptr, tensors), *self._rest)
            start(*self._grid, stream, *self._between, arguments)
        else:
            start(*self._grid, stream, *self._between, *map(Tensor.data_ptr, tensors), *self._rest)

    def _first(self, tensors: tuple[Tensor, ...]) -> None:
        """Let Triton compile and launch, and learn what its launcher calls in the end."""
        made = self._kernel[self._grid](*tensors, *self._rest)
        if made is None or not hasattr(made.run, "launch"):  # as the interpreter
            return
        seen: list[tuple[Any, ...]] = []
        launcher = copy.copy(made.run)
        launcher.launch = lambda *arguments: seen.append(arguments)
        stream, own = object(), (*map(Tensor.data_ptr, tensors), *self._rest)
        launcher(*self._grid, stream, made.function, made.packed_metadata, None, None, None, *own)
        (called,) = seen
        before = len(self._grid) + 1
        if called[:before] == (*self._grid, stream):
            self._device, self._packed = tensors[0].device.index, called[-1] == own
            if self._packed:
                self._between, self._start = called[before:-1], made.run.launch
            elif called[-len(own) :] == own:
                self._between, self._start = called[before : -len(own)], made.run.launch


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without its search for transforms such as vmap, which takes 6 µs in some
    versions of torch: whoever gets here has made sure that there are none.
    """
    found: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return found


def tile(
    pixels: int, channels: int, most_pixels: int = 128
) -> tuple[int, tuple[int, int, int, bool]]:
    """Programs, and a kernel's last arguments: the channels, the pixels and channels that it takes
    at a time, about 4096 elements, and whether those are the channels.
    """
    block_c = min(triton.next_power_of_2(channels), 512)
    block_m = max(1, min(4096 // block_c, most_pixels, triton.next_power_of_2(pixels)))
    return triton.cdiv(pixels, block_m), (channels, block_m, block_c, block_c == channels)


def layout(shape: Shape, stride: Shape) -> tuple[int, int, int]:
    """The strides of images, of pixels in an image, and of channels."""
    return stride[0], stride[3] if shape[3] > 1 else stride[2], stride[1]


def lies_by_pixels(shape: Shape, stride: Shape) -> bool:
    """Whether the pixels of each image follow each other at one stride."""
    return shape[2] == 1 or shape[3] == 1 or stride[2] == shape[3] * stride[3]


def by_pixels(x: Tensor) -> Tensor:
    """`x` itself where its pixels follow each other at one stride from an even start, or a copy."""
    if lies_by_pixels(x.shape, x.stride()) and not x.data_ptr() & 15:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def dense_stride(shape: Shape, like: Shape) -> Shape:
    """The stride of a new map in the memory format of one with the stride `like`."""
    _, c, h, w = shape
    return (h * w * c, 1, w * c, c) if like[1] == 1 else (h * w * c, h * w, w, 1)


_SQUARES = "_bcos_squares"  # the attribute of a map that holds its Σ x² and the version it is of


def remember_squares(x: Tensor, squares: Tensor) -> None:
    """Leave Σ x² over the channels, [N, H, W], for the layer that x comes to."""
    if not x.is_inference():  # whose changes cannot be noticed
        setattr(x, _SQUARES, (squares, x._version))


def remembered_squares(x: Tensor) -> Tensor | None:
    """Σ x², if it was left and x is unchanged since."""
    squares, version = getattr(x, _SQUARES, (None, None))
    return squares if squares is not None and version == x._version else None
