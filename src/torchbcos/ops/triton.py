"""The B-cos transform on a GPU: what surrounds the convolution, fused into one pass each way.

With B = b, c = lin / n and out = scale · lin · |c|^(B-1), what the backward pass needs follows from
`out` and n² alone, so neither lin nor the factor is kept:

    |c|^(B-1) = (|out| / (scale · n))^((B-1)/B)         ∂out/∂n² = -(B-1)/2 · out / n²

`out` is the next layer's input and kept anyway. Its sum of squares over the channels is made while
it is in registers, and a layer that gets `out` as it is takes it from there. All arithmetic is
float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from torchbcos.ops import kernels, reference
from torchbcos.ops.launch import (
    Launch,
    Shape,
    by_pixels,
    empty_map,
    layout,
    remember_squares,
    remembered_squares,
    tile,
)

__all__ = ["bcos_conv", "bcos_linear"]


class _Transform(NamedTuple):
    """What a layer does, apart from its tensors."""

    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    b: float
    units: int
    scale: float
    frozen: bool  # explanation mode: the factor is a constant


_convolution_backward = torch.ops.aten.convolution_backward.default


class _Layer:
    """A transform of tensors of given shapes, strides, types and device, with all its launches."""

    def __init__(
        self, t: _Transform, x: Shape, x_stride: Shape, weight: Shape, row: int, *_: Any
    ) -> None:
        self.t, self.x, self.x_stride = t, x, x_stride
        self.is_linear = len(weight) == 2
        self.taps = (1, 1) if self.is_linear else weight[2:]
        self.channels = weight[0] // t.units
        quarters = 4 * (t.b - 1)  # such exponents need no logarithm
        self.quarters = int(quarters) if quarters in range(13) else -1
        rows = (weight[0], row, self.channels, t.units, min(triton.next_power_of_2(row), 4096))
        self.unit_rows = Launch(kernels.unit_rows, *rows)
        self.unit_rows_backward = Launch(kernels.unit_rows_backward, *rows)
        self.sum_of_squares = self._over(kernels.sum_of_squares, x, [x_stride])
        self._made: dict[Any, Launch] = {}

    def _over(self, kernel: Any, shape: Shape, strides: Sequence[Shape], *rest: Any) -> Launch:
        """`kernel` over the pixels of maps [N, C, H, W]."""
        places = shape[2] * shape[3]
        programs, block_m, block_c = tile(shape[0] * places, shape[1])
        layouts = [number for stride in strides for number in layout(shape, stride)]
        return Launch(
            kernel, programs, shape[0] * places, places, *layouts, *rest, shape[1], block_m, block_c
        )

    def _geometry(self, out: Shape) -> tuple[int, ...]:
        return (*self.x[2:], *out[2:], *self.t.stride, *self.t.padding, *self.t.dilation)

    def forward(
        self, x: Tensor, sq: Tensor | None, weight: Tensor, keep: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """out, Σ out², and for the backward pass the rows, Σ x² and which unit won."""
        t = self.t
        rows = torch.empty_like(weight, dtype=x.dtype)
        self.unit_rows(weight, rows)
        if self.is_linear:
            lin = F.linear(x[:, :, 0, 0], rows)[:, :, None, None]
        else:
            lin = by_pixels(F.conv2d(x, rows, None, t.stride, t.padding, t.dilation))
        n, _, h, w = lin.shape
        out, winner = lin, lin
        if t.units > 1:
            out = empty_map(lin, self.channels, lin.dtype)
            winner = torch.empty_like(out, dtype=torch.int8) if keep else out
        if sq is None:
            sq = torch.empty((n, *self.x[2:]), dtype=torch.float32, device=x.device)
            if self.quarters:
                self.sum_of_squares(x, sq)
        squares = sq.new_empty((n, h, w))
        key = (lin.stride(), keep)
        launch = self._made.get(key)
        if launch is None:
            launch = self._made[key] = self._over(
                kernels.forward, out.shape, [lin.stride(), out.stride()],
                *self._geometry(out.shape), t.b, t.scale, *self.taps, t.units, self.quarters,
                keep and t.units > 1,
            )  # fmt: skip
        launch(lin, sq, out, squares, winner)
        return out, squares, rows, sq, winner

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        rows: Tensor,
        sq: Tensor,
        winner: Tensor,
        by_x: bool,
        by_weight: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        t = self.t
        norms = self.quarters != 0 and by_x and not t.frozen
        grad = by_pixels(grad)
        lin_grad = empty_map(out, self.channels * t.units, out.dtype)
        sq_norm_grad = sq.new_empty((out.shape[0], *out.shape[2:])) if norms else sq
        key = (grad.stride(), grad.dtype, norms)
        launch = self._made.get(key)
        if launch is None:
            launch = self._made[key] = self._over(
                kernels.backward, out.shape, [grad.stride(), out.stride(), lin_grad.stride()],
                *self._geometry(out.shape), t.b, t.scale, *self.taps, t.units, self.quarters,
                t.frozen, norms,
            )  # fmt: skip
        launch(grad, out, sq, winner, lin_grad, sq_norm_grad)

        x_grad: Tensor | None
        rows_grad: Tensor | None
        if self.is_linear:
            flat = lin_grad[:, :, 0, 0]
            x_grad = (flat @ rows)[:, :, None, None] if by_x else None
            rows_grad = flat.t() @ x[:, :, 0, 0] if by_weight else None
        else:
            x_grad, rows_grad, _ = _convolution_backward(
                lin_grad, x, rows, None, t.stride, t.padding, t.dilation, False, (0, 0), 1,
                (by_x, by_weight, False),
            )  # fmt: skip
        if norms:
            assert x_grad is not None
            x_grad = by_pixels(x_grad)
            launch = self._made.get(x_grad.stride())
            if launch is None:
                launch = self._made[x_grad.stride()] = self._over(
                    kernels.add_norm_gradient, self.x, [x_grad.stride(), self.x_stride],
                    *self._geometry(out.shape), *self.taps,
                )  # fmt: skip
            launch(x_grad, x, sq_norm_grad)
        if rows_grad is None:
            return x_grad, None
        if rows_grad.stride() != weight.stride():
            rows_grad = torch.empty_like(weight, dtype=rows_grad.dtype).copy_(rows_grad)
        in_place = t.units == 1 and rows_grad.dtype == weight.dtype
        weight_grad = rows_grad if in_place else torch.empty_like(weight)
        self.unit_rows_backward(rows_grad, weight, weight_grad)
        return x_grad, weight_grad


_layer = lru_cache(maxsize=4096)(_Layer)


# Autograd.


@cache
def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


class _Bcos(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, sq: Tensor | None, layer: _Layer, made: list[Tensor]
    ) -> Tensor:
        out, squares, rows, sq, winner = layer.forward(x, sq, weight, keep=True)
        made.append(squares)  # not an output, to which autograd would bring a gradient of zeros
        # As `.data`, so that changing the output in place is no error; `watch` has no content but
        # counts such changes.
        watch = out.detach()
        watch.data = _nothing(out.device)
        ctx.layer, ctx.watch = layer, watch
        ctx.save_for_backward(x, weight, out.data, rows, sq, winner if layer.t.units > 1 else None)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out, rows, sq, winner = ctx.saved_tensors
        by_x, by_weight, *_ = ctx.needs_input_grad
        if by_x and by_weight:
            by_weight = _is_wanted(ctx.next_functions[1][0])
        if torch.is_grad_enabled() or ctx.watch._version:
            by = _reference_backward(grad, x, weight, ctx.layer.t, by_x, by_weight)
        else:
            winner = out if winner is None else winner
            by = ctx.layer.backward(grad, x, weight, out, rows, sq, winner, by_x, by_weight)
        return *by, None, None, None


def _is_wanted(node: Any) -> bool:
    """Whether this backward pass will use a gradient: `torch.autograd.grad` may not ask for it."""
    try:
        wanted: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf that was asked for by name
        return True
    return wanted


def _reference_backward(
    grad: Tensor, x: Tensor, weight: Tensor, t: _Transform, by_x: bool, by_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """For derivatives of derivatives, and for outputs that were overwritten."""
    create_graph = torch.is_grad_enabled()
    if not create_graph:
        x, weight = x.detach().requires_grad_(by_x), weight.detach().requires_grad_(by_weight)
    hold = Tensor.detach if t.frozen else None
    with torch.enable_grad():
        w = weight.to(x.dtype)
        if weight.dim() == 2:
            out = reference.bcos_linear(x[:, :, 0, 0], w, t.b, t.units, t.scale, hold)
            out = out[:, :, None, None]
        else:
            out = reference.bcos_conv(
                x, w, t.stride, t.padding, t.dilation, 1, t.b, t.units, t.scale, hold
            )
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
) -> Tensor:
    """As `reference.bcos_conv`; `hold` is None or detaches, `groups` is 1."""
    assert groups == 1
    t = _Transform(stride, padding, dilation, b, max_out, scale, hold is not None)  # type: ignore[arg-type]
    return _apply(x, weight, t)


def bcos_linear(
    x: Tensor,  # [*, C]
    weight: Tensor,  # [out_features · max_out, C]
    b: float,
    max_out: int,
    scale: float,
    hold: reference.Hold | None,
) -> Tensor:
    """As `reference.bcos_linear`; `hold` is None or detaches."""
    one = (1, 1)
    t = _Transform(one, (0, 0), one, b, max_out, scale, hold is not None)
    out = _apply(x.reshape(-1, x.shape[-1])[:, :, None, None], weight, t)
    return out.reshape(*x.shape[:-1], -1)


def _apply(x: Tensor, weight: Tensor, t: _Transform) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    rows_are_dense = weight.is_contiguous() or weight.is_contiguous(
        memory_format=torch.channels_last
    )
    if not rows_are_dense or weight.data_ptr() & 15:
        weight = weight.clone(memory_format=torch.contiguous_format)
    sq = remembered_squares(x)
    x = by_pixels(x)
    # fmt: off
    layer = _layer(t, x.shape, x.stride(), weight.shape, weight.stride(0),
                   x.device, x.dtype, weight.dtype)
    # fmt: on
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        made: list[Tensor] = []
        out: Tensor = _Bcos.apply(x, weight, sq, layer, made)
        remember_squares(out, made[0])
    else:
        out, squares, *_ = layer.forward(x, sq, weight, keep=False)
        remember_squares(out, squares)
    return out
