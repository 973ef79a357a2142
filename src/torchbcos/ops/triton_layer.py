"""A B-cos layer of one shape on a GPU: its convolution, and the launches around it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from torchbcos.ops import aside, kernels
from torchbcos.ops.launch import (
    Launch,
    Shape,
    by_pixels,
    dense_stride,
    empty,
    layout,
    lies_by_pixels,
    remember_squares,
    tile,
)

__all__ = ["Layer", "Pair", "is_dense"]

_convolution_backward = torch.ops.aten.convolution_backward.default
Pair = tuple[int, int]


class Layer:
    """The transform of tensors of given sizes, strides, types and device, with all its launches.

    Whatever does not depend on values is found here once, because a network of small layers waits
    for the host.
    """

    def __init__(
        self,
        x: Shape,
        x_stride: Shape,
        dtype: torch.dtype,
        weight: Shape,
        weight_stride: Shape,
        weight_dtype: torch.dtype,
        device: int,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
        b: float,
        units: int,
        scale: float,
        eps: float,
        frozen: bool,  # explanation mode: the factor is a constant
    ) -> None:
        self.x, self.x_stride, self.dtype = x, x_stride, dtype
        self.weight, self.weight_stride = tuple(weight), weight_stride
        self.weight_dtype = weight_dtype
        self.geometry, self.groups = (stride, padding, dilation), groups
        self.b, self.units, self.scale, self.eps = b, units, scale, eps
        self.frozen = frozen
        self.squares_itself = groups > 1 and groups == x[1]  # a channel's Σ x² is its square
        fits = is_dense if self.squares_itself else lies_by_pixels
        self.takes_all = fits(x, x_stride) and is_dense(weight, weight_stride)
        self.inner = groups if x_stride[1] == 1 else 1  # see `kernels`
        self.is_linear = len(weight) == 2
        self.taps = (1, 1) if self.is_linear else weight[2:]
        quarters = 4 * (b - 1)  # such exponents need no logarithm
        self.quarters = int(quarters) if quarters in range(13) else -1
        self.norms_matter = self.quarters != 0 and not frozen  # to the gradient by x
        self.rows_grad_is_reused = units == 1 and dtype == weight_dtype
        self.in_pixels = self._pixels(x)
        row, outputs = math.prod(weight[1:]), weight[0] // units // groups
        rows = (weight[0], row, outputs, units, min(triton.next_power_of_2(row), 4096))
        self.unit_rows = Launch(kernels.unit_rows, *rows)
        self.unit_rows_backward = Launch(kernels.unit_rows_backward, *rows)
        self.sum_of_squares = self._over(kernels.sum_of_squares, x, [x_stride])
        self.lin_stride: Shape | None = None  # known when there is an output; see `_settled`
        self._backward: dict[Any, Launch] = {}
        self._add_norm_gradient: dict[Shape, Launch] = {}

    def forward(
        self, x: Tensor, sq: Tensor | None, weight: Tensor, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """out, and for the backward pass the rows, Σ x² and which unit won."""
        rows = empty(self.weight, self.weight_stride, self.dtype)
        self.unit_rows(weight, rows)
        if self.is_linear:
            lin = F.linear(x[:, :, 0, 0], rows)[:, :, None, None]
        else:
            lin = torch.conv2d(x, rows, None, *self.geometry, self.groups)
        if lin.stride() != self.lin_stride:
            lin = self._settled(lin)
        if self.squares_itself:
            sq = x
        elif sq is None:
            sq = empty(*self.in_pixels, torch.float32)
            if self.quarters:
                self.sum_of_squares(x, sq)
        squares = empty(*self.out_pixels, torch.float32) if self.groups == 1 else sq
        if self.units == 1:
            out, winner = lin, None
            self.scale_units(lin, sq, out, squares, out)
        else:
            out = empty(*self.out, self.dtype)
            if keep:
                winner = empty(*self.out, torch.int8)
                self.scale_and_keep(lin, sq, out, squares, winner)
            else:
                winner = None
                self.scale_units(lin, sq, out, squares, out)
        if self.groups == 1:
            remember_squares(out, squares)
        return out, rows, sq, winner

    def _settled(self, lin: Tensor) -> Tensor:
        """`lin` in the memory format that the first one had, and all that follows from that."""
        n, channels, h, w = lin.shape
        if self.lin_stride is None:
            stride = lin.stride()
            if not lies_by_pixels(lin.shape, stride):
                stride = dense_stride(lin.shape, stride)
            shape = (n, channels // self.units, h, w)
            out_stride = stride if self.units == 1 else dense_stride(shape, stride)
            self.out, self.out_pixels = (shape, out_stride), self._pixels(shape)
            self.lin_grad = (tuple(lin.shape), dense_stride(lin.shape, out_stride))
            (self.scale_units, self.scale_and_keep) = (
                self._over(
                    kernels.forward, shape, [stride, out_stride], *self._places(), self.b,
                    self.scale, self.eps, *self.taps, self.units, self.quarters,
                    self.squares_itself, keep,
                )
                for keep in (False, True)
            )  # fmt: skip
            self.lin_stride = stride
        if lin.stride() == self.lin_stride:
            return lin
        return empty(tuple(lin.shape), self.lin_stride, lin.dtype).copy_(lin)

    def _places(self) -> tuple[int, ...]:
        (shape, _), (stride, padding, dilation) = self.out, self.geometry
        return (*self.x[2:], *shape[2:], *stride, *padding, *dilation)

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        rows: Tensor,
        sq: Tensor,
        winner: Tensor | None,
        by_x: bool,
        by_weight: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        norms = by_x and self.norms_matter
        launch = self._backward.get((grad.stride(), grad.dtype, norms))
        if launch is None or grad.data_ptr() & 15:
            grad = by_pixels(grad)
            launch = self._launch_backward(grad, norms)
        lin_grad = empty(*self.lin_grad, self.dtype)
        sq_norm_grad = empty(*self.out_pixels, torch.float32) if norms else sq
        launch(grad, out, sq, out if winner is None else winner, lin_grad, sq_norm_grad)

        weight_grad: Tensor | None = None
        # Of a leaf alone, whose gradient no other node reads.
        beside = aside.current() if by_x and by_weight and weight.is_leaf else None
        if beside is not None:
            weight_grad = beside.run(weight, self._by_weight, lin_grad, x, rows, weight)
        x_grad, rows_grad = self._pulled_back(lin_grad, x, rows, by_x, by_weight and beside is None)
        if norms:
            assert x_grad is not None
            launch = self._add_norm_gradient.get(x_grad.stride())
            if launch is None:
                x_grad = by_pixels(x_grad)
                launch = self._launch_add_norm_gradient(x_grad.stride())
            launch(x_grad, x, sq_norm_grad)
        if rows_grad is not None:
            weight_grad = self._by_direction(rows_grad, weight)
        return x_grad, weight_grad

    def _pulled_back(
        self, lin_grad: Tensor, x: Tensor, rows: Tensor, by_x: bool, by_rows: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of lin's by x and by the rows, as far as they are asked for."""
        if self.is_linear:
            flat = lin_grad[:, :, 0, 0]
            x_grad = (flat @ rows)[:, :, None, None] if by_x else None
            return x_grad, flat.t() @ x[:, :, 0, 0] if by_rows else None
        x_grad, rows_grad, _ = _convolution_backward(
            lin_grad, x, rows, None, *self.geometry, False, (0, 0), self.groups,
            (by_x, by_rows, False),
        )  # fmt: skip
        return x_grad, rows_grad

    def _by_weight(self, lin_grad: Tensor, x: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
        _, rows_grad = self._pulled_back(lin_grad, x, rows, False, True)
        assert rows_grad is not None
        return self._by_direction(rows_grad, weight)

    def _by_direction(self, rows_grad: Tensor, weight: Tensor) -> Tensor:
        """The gradient by the weight, of which only the direction matters."""
        if rows_grad.stride() != self.weight_stride:
            rows_grad = empty(self.weight, self.weight_stride, self.dtype).copy_(rows_grad)
        weight_grad = rows_grad
        if not self.rows_grad_is_reused:
            weight_grad = empty(self.weight, self.weight_stride, self.weight_dtype)
        self.unit_rows_backward(rows_grad, weight, weight_grad)
        return weight_grad

    def _launch_backward(self, grad: Tensor, norms: bool) -> Launch:
        key = (grad.stride(), grad.dtype, norms)
        if key not in self._backward:
            shape, stride = self.out
            self._backward[key] = self._over(
                kernels.backward, shape, [grad.stride(), stride, self.lin_grad[1]],
                *self._places(), self.b, self.scale, self.eps, *self.taps, self.units,
                self.quarters, self.squares_itself, self.frozen, norms,
            )  # fmt: skip
        return self._backward[key]

    def _launch_add_norm_gradient(self, stride: Shape) -> Launch:
        if stride not in self._add_norm_gradient:
            self._add_norm_gradient[stride] = self._over(
                kernels.add_norm_gradient, self.x, [stride, self.x_stride], *self._places(),
                *self.taps,
            )  # fmt: skip
        return self._add_norm_gradient[stride]

    def _over(self, kernel: Any, shape: Shape, strides: Sequence[Shape], *rest: Any) -> Launch:
        """`kernel` over the pixels of all groups of maps [N, C, H, W]."""
        n, channels, h, w = shape
        pixels, groups = n * self.groups * h * w, (self.groups // self.inner, self.inner)
        most = 128 if self.groups == 1 else 1024  # pixels at a time, for a group has few channels
        programs, blocks = tile(pixels, channels // self.groups, most)
        layouts = [number for stride in strides for number in layout(shape, stride)]
        return Launch(kernel, programs, pixels, h * w, *groups, *layouts, *rest, *blocks)

    def _pixels(self, shape: Shape) -> tuple[Shape, Shape]:
        """Size and stride of one number for each pixel of each group."""
        n, _, h, w = shape
        return (n * self.groups, h, w), (h * w, w, 1)


def is_dense(shape: Shape, stride: Shape) -> bool:
    """Whether a tensor lies in order or, of a map or a convolution's weight, with channels last."""
    like = torch.empty_strided(shape, stride, device="meta")
    return like.is_contiguous() or like.is_contiguous(memory_format=torch.channels_last)
