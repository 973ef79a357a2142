"""Uncentred batch norms on a GPU: two passes over a map each way, and nothing kept but the map.

With r = 1 / √(var + eps) and y = weight · r · x + bias over M values of a channel,

    ∂L/∂x = weight · (r · g - r³ · (x - mean) · Σ g·x / M),    ∂L/∂weight = r · Σ g·x

The output's sum of squares over the channels is left for the layer that it comes to.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from torchbcos.ops import norm_kernels as kernels
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

__all__ = ["batch_norm", "scale"]

PROGRAMS = 1024  # about as many as keep a GPU busy; each sums over its share of the pixels


class _Norm:
    """The launches for maps of one size, stride, type and device."""

    def __init__(
        self, shape: Shape, stride: Shape, affine: tuple[bool, bool], eps: float, *_: Any
    ) -> None:
        n, channels, h, w = shape
        self.shape, self.stride, self.affine = shape, stride, affine
        self.out_stride = dense_stride(shape, stride)
        self.pixels = n * h * w
        self.squares = ((n, h, w), (h * w, w, 1))
        programs, self.tile = tile(self.pixels, channels)
        blocks = triton.cdiv(channels, self.tile[2])
        self.steps = triton.cdiv(programs, max(1, PROGRAMS // blocks))
        self.parts = triton.cdiv(programs, self.steps)
        self.sizes = (self.pixels, h * w)
        self.programs, self.summing = programs, self.parts * blocks
        x = layout(shape, stride)
        self.moments = Launch(
            kernels.moments, self.summing, self.steps, *self.sizes, *x, *self.tile
        )
        few = min(triton.next_power_of_2(channels), 16)
        self._few = (triton.cdiv(channels, few), channels, few)
        self._eps, self._x_c = eps, x[2]
        self._statistics: dict[float | None, Launch] = {}
        self.gradient_statistics = Launch(
            kernels.gradient_statistics, self._few[0], self.parts, channels, 256, few
        )
        self.normalise = Launch(
            kernels.normalise, programs, *self.sizes, *x, *layout(shape, self.out_stride),
            *affine, *self.tile,
        )  # fmt: skip
        self._backward: dict[Any, tuple[Launch, Launch]] = {}

    def statistics(self, momentum: float | None) -> Launch:
        """With None no running variance goes on."""
        if momentum not in self._statistics:
            programs, channels, few = self._few
            self._statistics[momentum] = Launch(
                kernels.statistics, programs, self.parts, self.pixels, self._eps, momentum or 0.0,
                self._x_c, channels, momentum is not None, 256, few,
            )  # fmt: skip
        return self._statistics[momentum]

    def backward(self, grad: Tensor) -> tuple[Launch, Launch]:
        key = (grad.stride(), grad.dtype)
        if key not in self._backward:
            g, x = layout(self.shape, grad.stride()), layout(self.shape, self.stride)
            self._backward[key] = (
                Launch(
                    kernels.gradient_sums, self.summing, self.steps, *self.sizes, *g, *x,
                    *self.tile,
                ),
                Launch(
                    kernels.normalise_backward, self.programs, *self.sizes, *g, *x,
                    *layout(self.shape, self.out_stride), self.affine[0], *self.tile,
                ),
            )  # fmt: skip
        return self._backward[key]


_norm = lru_cache(maxsize=4096)(_Norm)


def _of(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> _Norm:
    affine = (weight is not None, bias is not None)
    kinds = [t.dtype for t in (x, weight, bias) if t is not None]
    return _norm(tuple(x.shape), x.stride(), affine, eps, x.get_device(), *kinds)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
        running: Tensor | None, momentum: float, made: Any,
    ) -> Tensor:  # fmt: skip
        out, mean, variance, inverse = _normalised(x, weight, bias, eps, running, momentum)
        made.append(variance)  # not an output, to which autograd would bring a gradient of zeros
        ctx.eps = eps
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_reference_backward(grad, x, weight, bias, ctx.eps), None, None, None, None
        norm, grad = _of(x, weight, bias, ctx.eps), by_pixels(grad)
        sum_gradients, by_x = norm.backward(grad)
        channels = x.shape[1]
        parts = empty((norm.parts, 2, channels), (2 * channels, channels, 1), torch.float32)
        sum_gradients(grad, x, parts)
        sums = empty((2, channels), (channels, 1), torch.float32)
        by_weight = empty((channels,), (1,), torch.float32)
        norm.gradient_statistics(parts, inverse, sums, by_weight)
        x_grad = empty(norm.shape, norm.out_stride, x.dtype)
        by_x(grad, x, mean, inverse, _or_x(weight, x), sums, x_grad)
        weight_grad = None if weight is None else by_weight.to(weight.dtype)
        bias_grad = None if bias is None else sums[0].to(bias.dtype)
        return x_grad, weight_grad, bias_grad, None, None, None, None


_apply_batch_norm = applied(_BatchNorm)


def _even(parameter: Tensor | None) -> Tensor | None:
    """It itself where it begins at a multiple of 16 bytes, or a copy."""
    if parameter is None or not parameter.data_ptr() & 15:
        return parameter
    return parameter.clone()


def _or_x(parameter: Tensor | None, x: Tensor) -> Tensor:
    """A tensor for a kernel that will not read it."""
    return x if parameter is None else parameter


def _normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    running: Tensor | None, momentum: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output, and each channel's mean, variance and 1/deviation."""
    norm, channels = _of(x, weight, bias, eps), x.shape[1]
    parts = empty((norm.parts, 2, channels), (2 * channels, channels, 1), torch.float32)
    norm.moments(x, parts)
    mean, variance, inverse = (empty((channels,), (1,), torch.float32) for _ in range(3))
    if running is None:
        norm.statistics(None)(parts, x, mean, variance, inverse, variance)
    else:
        norm.statistics(momentum)(parts, x, mean, variance, inverse, running)
        torch.autograd.graph.increment_version(running)
    return _scaled(norm, x, inverse, weight, bias), mean, variance, inverse


def _scaled(
    norm: _Norm, x: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    out = empty(norm.shape, norm.out_stride, x.dtype)
    squares = empty(*norm.squares, torch.float32)
    norm.normalise(x, inverse, _or_x(weight, x), _or_x(bias, x), out, squares)
    remember_squares(out, squares)
    return out


def _reference_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor | None, ...]:
    """For derivatives of derivatives."""
    each = (1, -1, 1, 1)
    out = x.float() * (x.float().var((0, 2, 3), correction=0, keepdim=True) + eps).rsqrt()
    if weight is not None:
        out = out * weight.view(each)
    if bias is not None:
        out = out + bias.view(each)
    given = [t for t in (x, weight, bias) if t is not None and t.requires_grad]
    found = iter(torch.autograd.grad(out, given, grad.float(), create_graph=True))
    return tuple(
        next(found) if t is not None and t.requires_grad else None for t in (x, weight, bias)
    )


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: Tensor | None = None,
    momentum: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """x / √(var + eps) · weight + bias, and the variance [C] over images and pixels.

    `running`, in float32, goes on by `momentum` towards the unbiased variance.
    """
    x, weight, bias = by_pixels(x), _even(weight), _even(bias)
    learns = any(t is not None and t.requires_grad for t in (x, weight, bias))
    if torch.is_grad_enabled() and learns:
        made: list[Tensor] = []
        out: Tensor = _apply_batch_norm(x, weight, bias, eps, running, momentum, made)
        return out, made[0]
    out, _, variance, _ = _normalised(x, weight, bias, eps, running, momentum)
    return out, variance


def scale(x: Tensor, inverse: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """x · inverse · weight + bias for one number of each per channel; without derivatives."""
    x, weight, bias = by_pixels(x), _even(weight), _even(bias)
    return _scaled(_of(x, weight, bias, 0.0), x, inverse, weight, bias)
