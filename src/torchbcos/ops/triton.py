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
from typing import Any

import torch
from torch import Tensor

from torchbcos.ops import reference
from torchbcos.ops.launch import applied, by_pixels, remembered_squares
from torchbcos.ops.triton_layer import Layer, Pair, is_dense

__all__ = ["bcos_conv", "bcos_linear"]

_layer = lru_cache(maxsize=4096)(Layer)


# Autograd.


@cache
def _nothing(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


class _Bcos(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sq: Tensor | None, layer: Layer) -> Tensor:
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
    grad: Tensor, x: Tensor, weight: Tensor, layer: Layer, by_x: bool, by_weight: bool
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
            out = reference.bcos_conv(x, w, stride, padding, dilation, layer.groups, *how)
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
    """As `reference.bcos_conv`; `hold` is None or detaches."""
    held = hold is not None
    return _apply(x, weight, stride, padding, dilation, groups, b, max_out, scale, eps, held)  # type: ignore[arg-type]


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
    out = _apply(flat, weight, one, (0, 0), one, 1, b, max_out, scale, eps, hold is not None)
    return out.reshape(*x.shape[:-1], -1)


def _apply(
    x: Tensor,
    weight: Tensor,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    b: float,
    units: int,
    scale: float,
    eps: float,
    frozen: bool,
) -> Tensor:
    if torch.is_autocast_enabled("cuda"):
        x = x.to(torch.get_autocast_dtype("cuda"))
    sq = remembered_squares(x) if groups == 1 else None
    how = (x.get_device(), stride, padding, dilation, groups, b, units, scale, eps, frozen)
    # fmt: off
    layer = _layer(x.shape, x.stride(), x.dtype, weight.shape, weight.stride(), weight.dtype, *how)
    if not layer.takes_all or (x.data_ptr() | weight.data_ptr()) & 15:
        x, weight = by_pixels(x) if groups == 1 else _dense(x), _dense(weight)
        layer = _layer(x.shape, x.stride(), x.dtype, weight.shape, weight.stride(), weight.dtype,
                       *how)
    # fmt: on
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        out: Tensor = _apply_bcos(x, weight, sq, layer)
    else:
        out, *_ = layer.forward(x, sq, weight, False)
    return out


def _dense(t: Tensor) -> Tensor:
    """`t` itself where it is dense and begins at an even place, or a copy."""
    if is_dense(t.shape, t.stride()) and not t.data_ptr() & 15:
        return t
    last = t.dim() == 4 and t.stride(1) == 1
    return t.clone(memory_format=torch.channels_last if last else torch.contiguous_format)
