"""Average pools and sums of maps on a GPU, which leave their sum of squares for the next layer."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torchbcos.ops import map_kernels as kernels
from torchbcos.ops.launch import (
    Launch,
    Shape,
    applied,
    by_pixels,
    dense_stride,
    empty,
    layout,
    remember_squares,
    tile,
)

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
    programs, blocks = tile(shape[0] * places, shape[1])
    geometry = (*x[2:], *out[2:], *stride, *padding, 1, 1)
    strides = (layout(x, x_stride), layout(out, out_stride))
    first, second = strides[::-1] if backward else strides
    return Launch(
        kernels.average_backward if backward else kernels.average, programs,
        shape[0] * places, places, *first, *second, *geometry, *kernel, *blocks,
    )  # fmt: skip


@_cached
def _launch_add(shape: Shape, a: Shape, b: Shape, out: Shape, where: Any) -> Launch:
    places = shape[2] * shape[3]
    programs, blocks = tile(shape[0] * places, shape[1])
    strides = (*layout(shape, a), *layout(shape, b), *layout(shape, out))
    return Launch(kernels.add, programs, shape[0] * places, places, *strides, *blocks)


class _AveragePool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
        ctx.like, ctx.geometry = (tuple(x.shape), x.stride()), (kernel, stride, padding)
        return _average(x, kernel, stride, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (shape, stride), geometry = ctx.like, ctx.geometry
        if torch.is_grad_enabled():  # the pool is linear, so only the derivative by grad is asked
            x_grad = torch.ops.aten.avg_pool2d_backward(
                grad, grad.new_empty(shape), *geometry, False, True, None
            )
        else:
            grad = by_pixels(grad)
            dense = dense_stride(shape, stride)
            x_grad = empty(shape, dense, grad.dtype)
            where = (grad.get_device(), grad.dtype)
            _launch_average(shape, dense, grad.shape, grad.stride(), *geometry, True, where)(
                grad, x_grad
            )
        return x_grad, None, None, None


_apply_average_pool = applied(_AveragePool)


def _average(x: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    n, c, *size = x.shape
    h, w = (
        (s + 2 * p - k) // d + 1 for s, k, d, p in zip(size, kernel, stride, padding, strict=True)
    )
    shape = (n, c, h, w)
    out_stride = dense_stride(shape, x.stride())
    out = empty(shape, out_stride, x.dtype)
    squares = empty((n, h, w), (h * w, w, 1), torch.float32)
    where = (x.get_device(), x.dtype)
    _launch_average(x.shape, x.stride(), shape, out_stride, kernel, stride, padding, False, where)(
        x, out, squares
    )
    remember_squares(out, squares)
    return out


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return _sum(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


_apply_add = applied(_Add)


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
    x = by_pixels(x)
    if torch.is_grad_enabled() and x.requires_grad:
        out: Tensor = _apply_average_pool(x, kernel, stride, padding)
        return out
    return _average(x, kernel, stride, padding)


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, of the same shape and type."""
    a, b = by_pixels(a), by_pixels(b)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        out: Tensor = _apply_add(a, b)
        return out
    return _sum(a, b)
