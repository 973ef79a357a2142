"""The B-cos transform in plain torch: the definition every faster implementation is held to.

With `lin` = ŵᵀx, `n` = ‖x‖ and c = lin / n the transform is

    out = scale · lin · |c|^(b-1)

and its derivatives, finite for every b ≥ 1 without an epsilon, are

    ∂out/∂lin = scale · b · |c|^(b-1)            ∂out/∂n = -scale · (b-1) · |c|^(b-1) · c

The functions take `sq_norm` = n² and not n, because n² is what a sum and a box filter give, and
because the square root's infinite slope at 0 then never appears.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: What makes of a factor the constant that explanation mode needs.
Hold = Callable[[Tensor], Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type the formula is computed in: float32 for the half types, otherwise the same."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def unit_rows(weight: Tensor) -> Tensor:
    """Each row (all dimensions but the first) scaled to unit norm; a zero row stays zero.

    >>> unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    w = weight.to(accumulation_dtype(weight.dtype))
    # Not vector_norm, whose second derivative is NaN at a zero row.
    sq_norm = w.square().sum(list(range(1, w.dim())), keepdim=True)
    return (w / torch.where(sq_norm > 0, sq_norm, 1.0).sqrt()).to(weight.dtype)


def sum_of_squares(x: Tensor, dim: int, groups: int = 1) -> Tensor:
    """Σ x² over `dim`, which stays with size `groups`: one sum for each block of the dimension."""
    squares = x.to(accumulation_dtype(x.dtype)).square()
    if groups == 1:
        return squares.sum(dim, keepdim=True)
    if groups == x.shape[dim]:
        return squares
    blocks: Tensor = squares.unflatten(dim, (groups, -1))
    return blocks.sum(dim + 1 if dim >= 0 else dim)


_AVG_POOL = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def box_sum(
    x: Tensor,  # [N, C, *spatial]
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Σ over the taps of a convolution's kernel, with that convolution's geometry (zeros outside).

    >>> box_sum(torch.ones(1, 1, 4), kernel=[3], stride=[1], padding=[1], dilation=[1])
    tensor([[[2., 3., 3., 2.]]])
    """
    # Torch's pools are fast but know neither dilation nor a padding beyond half the kernel, and
    # the one in three dimensions wants an input larger than the kernel before it is padded.
    beyond = any(p > k // 2 for p, k in zip(padding, kernel, strict=True))
    if beyond or (len(kernel) == 3 and any(padding)):
        x = F.pad(x, [p for p in reversed(padding) for _ in range(2)])
        padding = [0] * len(kernel)
    if all(k == 1 or d == 1 for k, d in zip(kernel, dilation, strict=True)):
        taps = math.prod(kernel)
        if taps == 1 and not any(padding):
            every = tuple(slice(None, None, s) for s in stride)
            return x[(slice(None), slice(None), *every)]
        return _AVG_POOL[len(kernel)](x, tuple(kernel), tuple(stride), tuple(padding)) * taps
    if any(padding):
        x = F.pad(x, [p for p in reversed(padding) for _ in range(2)])
    for i, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        dim = i - len(kernel)
        last = x.shape[dim] - d * (k - 1)
        before, after = (slice(None),) * (x.dim() + dim), (slice(None),) * (-dim - 1)
        taps_along = [x[(*before, slice(j * d, j * d + last, s), *after)] for j in range(k)]
        x = torch.stack(taps_along).sum(0) if k > 1 else taps_along[0]
    return x


def bcos_scale(lin: Tensor, sq_norm: Tensor, b: float, scale: float) -> Tensor:
    """scale · lin · |lin/n|^(b-1); `sq_norm` = n² broadcasts against `lin`.

    >>> bcos_scale(torch.tensor([3.0, -4.0, 0.0]), torch.tensor(25.0), 2.0, 1.0)
    tensor([ 1.8000, -3.2000,  0.0000])
    """
    if b == 1:
        return lin if scale == 1 else lin * scale
    out: Tensor = _BcosScale.apply(lin, sq_norm, b, scale)
    return out


def bcos_factor(lin: Tensor, sq_norm: Tensor, b: float, scale: float) -> Tensor:
    """scale · |lin/n|^(b-1), by which `bcos_scale` multiplies, in the type it computes in."""
    c, _ = _cosine(lin.to(accumulation_dtype(lin.dtype)), sq_norm, b)
    return _power(c, b - 1) * scale


def multiply(lin: Tensor, factor: Tensor) -> Tensor:
    """lin · factor, rounded to the type of `lin` once."""
    return (lin.to(factor.dtype) * factor).to(lin.dtype)


def bcos_linear(
    x: Tensor,  # [*, C]
    weight: Tensor,  # [out_features · max_out, C]
    b: float,
    max_out: int,
    scale: float,
    hold: Hold | None,  # None outside of explanation mode
) -> Tensor:  # [*, out_features]
    """The whole layer."""
    lin = F.linear(x, _unit_major(unit_rows(weight), 1, max_out))
    if max_out > 1:
        lin = _max_unit(lin.unflatten(-1, (max_out, -1)), -2)
    sq_norm = x if b == 1 else sum_of_squares(x, -1)  # b = 1 needs no norm
    return _scaled(lin, sq_norm, b, scale, hold)


_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def bcos_conv(
    x: Tensor,  # [N, C, *spatial]
    weight: Tensor,  # [out_channels · max_out, C / groups, *kernel]
    stride: Sequence[int],
    padding: Sequence[int],  # with zeros
    dilation: Sequence[int],
    groups: int,
    b: float,
    max_out: int,
    scale: float,
    hold: Hold | None,  # None outside of explanation mode
) -> Tensor:  # [N, out_channels, *]
    """The whole layer."""
    kernel = tuple(weight.shape[2:])
    rows = _unit_major(unit_rows(weight), groups, max_out)
    lin = _CONV[len(kernel)](x, rows, None, stride, padding, dilation, groups)
    if groups > 1 or max_out > 1:
        lin = lin.unflatten(1, (groups, max_out, -1))
        lin = _max_unit(lin, 2)  # [N, groups, out_channels / groups, *]
        if groups == 1:
            lin = lin.squeeze(1)
    sq_norm = x
    if b != 1:
        sq_norm = box_sum(sum_of_squares(x, 1, groups), kernel, stride, padding, dilation)
        if groups > 1:
            sq_norm = sq_norm.unsqueeze(2)
    out = _scaled(lin, sq_norm, b, scale, hold)
    return out.flatten(1, 2) if groups > 1 else out


def _scaled(lin: Tensor, sq_norm: Tensor, b: float, scale: float, hold: Hold | None) -> Tensor:
    if b == 1 or hold is None:
        return bcos_scale(lin, sq_norm, b, scale)
    return multiply(lin, hold(bcos_factor(lin, sq_norm, b, scale)))


def _unit_major(rows: Tensor, groups: int, max_out: int) -> Tensor:
    """Rows from (group, output, unit) to (group, unit, output) order.

    The maximum over units is then one over whole blocks of channels, which vectorises.
    """
    if max_out == 1:
        return rows
    blocks: Tensor = rows.unflatten(0, (groups, -1, max_out))
    return blocks.transpose(1, 2).flatten(0, 2)


def _max_unit(lin: Tensor, dim: int) -> Tensor:
    """The transform grows with lin, so the largest lin is the unit with the largest output."""
    first, *others = lin.unbind(dim)
    for other in others:
        first = torch.maximum(first, other)
    return first


def _cosine(lin: Tensor, sq_norm: Tensor, b: float) -> tuple[Tensor, Tensor]:
    """(c, n). Where n is 0 so is lin, and any other divisor gives the right c = 0."""
    n = torch.where(sq_norm > 0, sq_norm, 1.0).sqrt()
    c = lin / n
    if b > 2:  # rounding makes |c| exceed 1 a little, which a large b amplifies
        c = c + (c.clamp(-1, 1) - c).detach()
    return c, n


def _power(c: Tensor, p: float) -> Tensor:
    """|c|^p for p > 0, with derivatives of any order that are 0, not NaN, at c = 0."""
    a = c.abs()
    if p == 1:
        return a
    nonzero = a >= torch.finfo(a.dtype).tiny
    return torch.where(nonzero, torch.where(nonzero, a, 1.0).pow(p), 0.0)


class _BcosScale(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(lin: Tensor, sq_norm: Tensor, b: float, scale: float) -> Tensor:
        return multiply(lin, bcos_factor(lin, sq_norm, b, scale))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        lin, sq_norm, ctx.b, ctx.scale = inputs
        ctx.save_for_backward(lin, sq_norm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Made of differentiable operations on the saved inputs, so it can be differentiated again.
        lin, sq_norm = ctx.saved_tensors
        wide_grad = grad.to(accumulation_dtype(grad.dtype))
        c, n = _cosine(lin.to(accumulation_dtype(lin.dtype)), sq_norm, ctx.b)
        common = wide_grad * (_power(c, ctx.b - 1) * ctx.scale)
        grad_sq_norm = None
        if ctx.needs_input_grad[1]:
            grad_sq_norm = (common * c * ((1 - ctx.b) / 2) / n).sum_to_size(sq_norm.shape)
        return (common * ctx.b).to(lin.dtype), grad_sq_norm, None, None
