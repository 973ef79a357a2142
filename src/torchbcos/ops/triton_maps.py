"""Average pools and sums of maps on a GPU, which leave their sum of squares for the next layer."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torchbcos.ops import kernels
from torchbcos.ops.launch import Launch, Shape, by_pixels, dense_stride, empty, layout, remember_squares, tile

__all__ = ["add", "avg_pool2d"]

_cached = lru_cache(maxsize=4096)
Pair = tuple[int, int]


@_cached
def _launch_average(
    x: Shape, x_stride: Shape, out: Shape, out_stride: Shape,
    kernel: Pair, stride: Pair, padding: Pair, backward: bool, where: Any,
) -> Launch:  # fmt: skip
    shape = x if backward else out
    places = shape[2] * shape[3]
    programs, *blocks = tile(shape[0] * places, shape[1])
    geometry = (*x[2:], *out[2:], *stride, *padding, 1, 1)
    strides = (layout(x, x_stride), layout(out, out_stride))
    first, second = strides[::-1] if backward else strides
    return Launch(
        kernels.average_backward if backward else kernels.average, programs,
        shape[0] * places, places, *first, *second, *geometry, *kernel, shape[1], *blocks,
    )  # fmt: skip


@_cached
def _launch_add(shape: Shape, a: Shape, b: Shape, out: Shape, where: Any) -> Launch:
    places = shape[2] * shape[3]
    programs, *blocks = tile(shape[0] * places, shape[1])
    strides = (*layout(shape, a), *layout(shape, b), *layout(shape, out))
    return Launch(kernels.add, programs, shape[0] * places, places, *strides, shape[1], *blocks)


class _AveragePool(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: Pair, stride: Pair, padding: Pair, made: list[Tensor]
    ) -> Tensor:
        ctx.like, ctx.geometry = x.shape, (kernel, stride, padding)
        ctx.channels_last = x.stride(1) == 1
        n, c, h, w = x.shape
        high, wide = (
            (size + 2 * p - k) // s + 1
            for size, k, s, p in zip((h, w), kernel, stride, padding, strict=True)
        )
        shape = (n, c, high, wide)
        out = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_format(x))
        squares = torch.empty((n, high, wide), dtype=torch.float32, device=x.device)
        where = (x.device.index, x.dtype)
        _launch_average(
            x.shape, x.stride(), out.shape, out.stride(), kernel, stride, padding, False, where
        )(x, out, squares)
        made.append(squares)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernel, stride, padding = ctx.geometry
        if torch.is_grad_enabled():  # the pool is linear, so only the derivative by grad is asked
            like = grad.new_empty(ctx.like)
            by_x = torch.ops.aten.avg_pool2d_backward(
                grad, like, kernel, stride, padding, False, True, None
            )
            return by_x, None, None, None, None
        grad = by_pixels(grad)
        x_grad = torch.empty(
            ctx.like,
            dtype=grad.dtype,
            device=grad.device,
            memory_format=torch.channels_last if ctx.channels_last else torch.contiguous_format,
        )
        where = (grad.device.index, grad.dtype)
        _launch_average(
            x_grad.shape, x_grad.stride(), grad.shape, grad.stride(), kernel, stride, padding,
            True, where,
        )(grad, x_grad)  # fmt: skip
        return x_grad, None, None, None, None


def _format(x: Tensor) -> torch.memory_format:
    return torch.channels_last if x.stride(1) == 1 else torch.contiguous_format


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return _sum(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


def _sum(a: Tensor, b: Tensor) -> Tensor:
    shape, stride, dtype = tuple(a.shape), a.stride(), a.dtype
    n, _, h, w = shape
    out_stride = dense_stride(shape, stride)
    out = empty(shape, out_stride, dtype)
    squares = empty((n, h, w), (h * w, w, 1), torch.float32)
    where = (a.get_device(), dtype)
    _launch_add(shape, stride, b.stride(), out_stride, where)(a, b, out, squares)
    remember_squares(out, squares)
    return out


def avg_pool2d(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Means over patches, with the zeros of the padding counted."""
    made: list[Tensor] = []
    out: Tensor = _AveragePool.apply(by_pixels(x), kernel, stride, padding, made)
    remember_squares(out, made[0])
    return out


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, of the same shape and type."""
    a, b = by_pixels(a), by_pixels(b)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        out: Tensor = _Add.apply(a, b)
        return out
    return _sum(a, b)
