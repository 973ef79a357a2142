"""The B-cos transform on a GPU: what surrounds the convolution, fused into one pass each way.

With B = b, c = lin / n and out = scale · lin · |c|^(B-1), what the backward pass needs follows from
`out` and n² alone, so neither lin nor the factor is kept:

    |c|^(B-1) = (|out| / (scale · n))^((B-1)/B)         ∂out/∂n² = -(B-1)/2 · out / n²

`out` is the next layer's input and kept anyway. Its sum of squares over the channels is made while
it is in registers, and a layer that gets `out` as it is takes it from there. All arithmetic is
float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from torchbcos.ops import aside, kernels, reference
from torchbcos.ops.launch import (
    Launch,
    Shape,
    applied,
    by_pixels,
    dense_stride,
    empty,
    layout,
    lies_by_pixels,
    remember_squares,
    remembered_squares,
    tile,
)

__all__ = ["bcos_conv", "bcos_linear"]

_convolution_backward = torch.ops.aten.convolution_backward.default
Pair = tuple[int, int]


class _Layer:
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
        b: float,
        units: int,
        scale: float,
        eps: float,
        frozen: bool,  # explanation mode: the factor is a constant
    ) -> None:
        self.x, self.x_stride, self.dtype = x, x_stride, dtype
        self.weight, self.weight_stride = tuple(weight), weight_stride
        self.weight_dtype = weight_dtype
        self.geometry = (stride, padding, dilation)
        self.b, self.units, self.scale, self.eps = b, units, scale, eps
        self.frozen = frozen
        self.takes_all = lies_by_pixels(x, x_stride) and _rows_are_dense(weight, weight_stride)
        self.is_linear = len(weight) == 2
        self.taps = (1, 1) if self.is_linear else weight[2:]
        quarters = 4 * (b - 1)  # such exponents need no logarithm
        self.quarters = int(quarters) if quarters in range(13) else -1
        self.norms_matter = self.quarters != 0 and not frozen  # to the gradient by x
        self.rows_grad_is_reused = units == 1 and dtype == weight_dtype
        self.in_pixels = _pixels(x)
        row = math.prod(weight[1:])
        rows = (weight[0], row, weight[0] // units, units, min(triton.next_power_of_2(row), 4096))
        self.unit_rows = Launch(kernels.unit_rows, *rows)
        self.unit_rows_backward = Launch(kernels.unit_rows_backward, *rows)
        self.sum_of_squares = _over(kernels.sum_of_squares, x, [x_stride])
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
            lin = torch.conv2d(x, rows, None, *self.geometry)
        if lin.stride() != self.lin_stride:
            lin = self._settled(lin)
        if sq is None:
            sq = empty(*self.in_pixels, torch.float32)
            if self.quarters:
                self.sum_of_squares(x, sq)
        squares = empty(*self.out_pixels, torch.float32)
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
            self.out, self.out_pixels = (shape, out_stride), _pixels(shape)
            self.lin_grad = (tuple(lin.shape), dense_stride(lin.shape, out_stride))
            (self.scale_units, self.scale_and_keep) = (
                _over(
                    kernels.forward, shape, [stride, out_stride], *self._places(), self.b,
                    self.scale, self.eps, *self.taps, self.units, self.quarters, keep,
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
            lin_grad, x, rows, None, *self.geometry, False, (0, 0), 1, (by_x, by_rows, False)
        )
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
            self._backward[key] = _over(
                kernels.backward, shape, [grad.stride(), stride, self.lin_grad[1]],
                *self._places(), self.b, self.scale, self.eps, *self.taps, self.units,
                self.quarters, self.frozen, norms,
            )  # fmt: skip
        return self._backward[key]

    def _launch_add_norm_gradient(self, stride: Shape) -> Launch:
        if stride not in self._add_norm_gradient:
            self._add_norm_gradient[stride] = _over(
                kernels.add_norm_gradient, self.x, [stride, self.x_stride], *self._places(),
                *self.taps,
            )  # fmt: skip
        return self._add_norm_gradient[stride]


def _over(kernel: Any, shape: Shape, strides: Sequence[Shape], *rest: Any) -> Launch:
    """`kernel` over the pixels of maps [N, C, H, W]."""
    places = shape[2] * shape[3]
    programs, blocks = tile(shape[0] * places, shape[1])
    layouts = [number for stride in strides for number in layout(shape, stride)]
    return Launch(kernel, programs, shape[0] * places, places, *layouts, *rest, *blocks)


def _pixels(shape: Shape) -> tuple[Shape, Shape]:
    """Size and stride of one number for each pixel, [N, H, W]."""
    n, _, h, w = shape
    return (n, h, w), (h * w, w, 1)


def _rows_are_dense(weight: Shape, stride: Shape) -> bool:
    """Whether a weight lies in order or, of a convolution, with its channels last."""
    like = torch.empty_strided(weight, stride, device="meta")
    return like.is_contiguous() or like.is_contiguous(memory_format=torch.channels_last)


_layer = lru_cache(maxsize=4096)(_Layer)


# Autograd.


@cache
def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


class _Bcos(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sq: Tensor | None, layer: _Layer) -> Tensor:
        out, rows, sq, winner = layer.forward(x, sq, weight, True)
        # As `.data`, so that changing the output in place is no error; `watch` has no content but
        # counts such changes.
        watch = out.detach()
        watch.data = _nothing(out.device)
        ctx.layer, ctx.watch = layer, watch
        ctx.save_for_backward(x, weight, out.data, rows, sq, winner)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out, rows, sq, winner = ctx.saved_tensors
        by_x, by_weight, *_ = ctx.needs_input_grad
        if by_x and by_weight:
            by_weight = _is_wanted(ctx.next_functions[1][0])
        if torch.is_grad_enabled() or ctx.watch._version:
            by = _reference_backward(grad, x, weight, ctx.layer, by_x, by_weight)
        else:
            by = ctx.layer.backward(grad, x, weight, out, rows, sq, winner, by_x, by_weight)
        return *by, None, None


_apply_bcos = applied(_Bcos)


def _is_wanted(node: Any) -> bool:
    """Whether this backward pass will use a gradient: `torch.autograd.grad` may not ask for it."""
    try:
        wanted: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that was asked for by name
        return True
    return wanted


def _reference_backward(
    grad: Tensor, x: Tensor, weight: Tensor, layer: _Layer, by_x: bool, by_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """For derivatives of derivatives, and for outputs that were overwritten."""
    create_graph = torch.is_grad_enabled()
    if not create_graph:
        x, weight = x.detach().requires_grad_(by_x), weight.detach().requires_grad_(by_weight)
    how = (layer.b, layer.units, layer.scale, Tensor.detach if layer.frozen else None, layer.eps)
    with torch.enable_grad():
        w = weight.to(x.dtype)
        if layer.is_linear:
            out = reference.bcos_linear(x[:, :, 0, 0], w, *how)[:, :, None, None]
        else:
            stride, padding, dilation = layer.geometry
            out = reference.bcos_conv(x, w, stride, padding, dilation, 1, *how)
    wanted = [tensor for tensor, want in ((x, by_x), (weight, by_weight)) if want]
    found = iter(torch.autograd.grad(out, wanted, grad, create_graph=create_graph))
    return next(found) if by_x else None, next(found) if by_weight else None


# Public.


def bcos_conv(
    x: Tensor,  # [N, C, H, W]
    weight: Tensor,  # [out_channels · max_out, C, kH, kW]
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    b: float,
    max_out: int,
    scale: float,
    hold: reference.Hold | None,
    eps: float = 0.0,
) -> Tensor:
    """As `reference.bcos_conv`; `hold` is None or detaches, `groups` is 1."""
    assert groups == 1
    held = hold is not None
    return _apply(x, weight, stride, padding, dilation, b, max_out, scale, eps, held)  # type: ignore[arg-type]


def bcos_linear(
    x: Tensor,  # [*, C]
    weight: Tensor,  # [out_features · max_out, C]
    b: float,
    max_out: int,
    scale: float,
    hold: reference.Hold | None,
    eps: float = 0.0,
) -> Tensor:
    """As `reference.bcos_linear`; `hold` is None or detaches."""
    one = (1, 1)
    flat = x.reshape(-1, x.shape[-1])[:, :, None, None]
    out = _apply(flat, weight, one, (0, 0), one, b, max_out, scale, eps, hold is not None)
    return out.reshape(*x.shape[:-1], -1)


def _apply(
    x: Tensor,
    weight: Tensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    b: float,
    units: int,
    scale: float,
    eps: float,
    frozen: bool,
) -> Tensor:
    if torch.is_autocast_enabled("cuda"):
        x = x.to(torch.get_autocast_dtype("cuda"))
    sq = remembered_squares(x)
    # fmt: off
    layer = _layer(x.shape, x.stride(), x.dtype, weight.shape, weight.stride(), weight.dtype,
                   x.get_device(), stride, padding, dilation, b, units, scale, eps, frozen)
    if not layer.takes_all or (x.data_ptr() | weight.data_ptr()) & 15:
        x, weight = by_pixels(x), _by_rows(weight)
        layer = _layer(x.shape, x.stride(), x.dtype, weight.shape, weight.stride(), weight.dtype,
                       x.get_device(), stride, padding, dilation, b, units, scale, eps, frozen)
    # fmt: on
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        out: Tensor = _apply_bcos(x, weight, sq, layer)
    else:
        out, *_ = layer.forward(x, sq, weight, False)
    return out


def _by_rows(weight: Tensor) -> Tensor:
    """`weight` itself where its rows are dense and begin at an even place, or a copy."""
    if _rows_are_dense(weight.shape, weight.stride()) and not weight.data_ptr() & 15:
        return weight
    return weight.clone(memory_format=torch.contiguous_format)
