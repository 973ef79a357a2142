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
from torch.nn import Parameter

from torchbcos.ops.powers import LARGEST_DENORMAL, power, raise_to

#: What makes of a factor the constant that explanation mode needs.
Hold = Callable[[Tensor], Tensor]


#: Values of one image that are worth a loop over the images.
LARGE = 2**17


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type the formula is computed in: float32 for the half types, otherwise the same."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def unit_rows(weight: Tensor) -> Tensor:
    """Each row (all dimensions but the first) scaled to unit norm; a zero row stays zero.

    >>> unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    rows: Tensor = _apply(_UnitRows, weight.to(accumulation_dtype(weight.dtype)))
    return rows.to(weight.dtype)


def _apply(function: Any, tensor: Tensor, *rest: Any) -> Any:
    """`function.apply`, without the cost of an autograd function where no gradient is needed."""
    run = function.forward if _only_values(tensor) else function.apply
    return run(tensor, *rest)


def _row_norms(w: Tensor) -> Tensor:
    return _norm(_squares_summed(w, list(range(1, w.dim()))))


class _UnitRows(torch.autograd.Function):
    """w / ‖w‖, with fewer passes over the weights in its backward than torch would take."""

    generate_vmap_rule = True

    @staticmethod
    def forward(w: Tensor) -> Tensor:
        return w / _row_norms(w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        w, rows = ctx.saved_tensors
        along = (grad * rows).sum(list(range(1, w.dim())), keepdim=True)
        return torch.addcmul(grad, rows, along, value=-1) / _row_norms(w)


def sum_of_squares(x: Tensor, dim: int, groups: int = 1) -> Tensor:
    """Σ x² over `dim`, which stays with size `groups`: one sum for each block of the dimension."""
    x = x.to(accumulation_dtype(x.dtype))
    if groups == 1:
        summed: Tensor = _apply(_SumOfSquares, x, dim)
        return summed
    squares = x.square()
    if groups == x.shape[dim]:
        return squares
    blocks: Tensor = squares.unflatten(dim, (groups, -1))
    return blocks.sum(dim + 1 if dim >= 0 else dim)


def _squares_summed(x: Tensor, dim: int | list[int]) -> Tensor:
    """Without a tensor of squares where the values to sum lie side by side."""
    if _only_values(x) and (isinstance(dim, list) or x.stride(dim) == 1):
        norms: Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
        return norms.square_()
    return x.square().sum(dim, keepdim=True)


def _only_values(x: Tensor) -> bool:
    """Whether plain values on a CPU are all that is wanted: no gradient, compiler or vmap."""
    return not (
        torch.compiler.is_compiling()
        or torch.is_grad_enabled()
        or torch._C._get_tracing_state() is not None
        or type(x) not in (Tensor, Parameter)
        or x.device.type != "cpu"
        or torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def _is_batched(x: Tensor) -> bool:
    """Whether vmap, the old one of `torch.autograd.grad` or another transform, holds it."""
    functorch = torch._C._functorch
    return functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x)


class _SumOfSquares(torch.autograd.Function):
    """As torch would do it, with one pass in place of three in its backward."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dim: int) -> Tensor:
        return _squares_summed(x, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return x * (2 * grad), None


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
    out: Tensor = _apply(_BcosScale, lin, sq_norm, b, scale)
    return out


def bcos_factor(lin: Tensor, sq_norm: Tensor, b: float, scale: float) -> Tensor:
    """scale · |lin/n|^(b-1), by which `bcos_scale` multiplies, in the type it computes in."""
    lin, n = lin.to(accumulation_dtype(lin.dtype)), _norm(sq_norm)
    if b == 2:
        return lin.abs() * (scale / n)
    return power(_cosine(lin, n, b), b - 1) * scale


def _constant_factor(lin: Tensor, sq_norm: Tensor, b: float, scale: float) -> Tensor:
    """`bcos_factor` to the bit, without derivatives and with fewer new tensors."""
    lin, n = lin.to(accumulation_dtype(lin.dtype)), _norm(sq_norm)
    if not _by_images(lin, n):
        return _factor(lin, n, b, scale)
    factor = torch.empty_like(lin)
    for image, own, part in zip(lin, n, factor, strict=True):
        _factor(image, own, b, scale, out=part)
    return factor


def _by_images(lin: Tensor, n: Tensor) -> bool:
    """Whether each image is worth a turn of its own, in which all of it stays in the cache."""
    if not (_only_values(lin) and lin.dim() == n.dim() > 0 and len(lin) == len(n) > 0):
        return False
    return lin[0].numel() >= LARGE


def _factor(lin: Tensor, n: Tensor, b: float, scale: float, out: Tensor | None = None) -> Tensor:
    if b == 2:
        return torch.abs(lin, out=out).mul_(scale / n)
    c = torch.div(lin, n, out=out).abs_()
    if b > 2:
        c = torch.clamp(c, max=1, out=out)  # vmap does not know it in place
    if b < 2.25:  # else its power is 0 anyway
        c = torch.threshold(c, LARGEST_DENORMAL[c.dtype], 0.0, out=out)
    raise_to(c, b - 1)
    return c if scale == 1 else c.mul_(scale)


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
    eps: float = 0.0,
) -> Tensor:  # [*, out_features]
    """The whole layer."""
    lin = F.linear(x, _unit_major(unit_rows(weight), 1, max_out))
    if max_out > 1:
        lin = _max_unit(lin.unflatten(-1, (max_out, -1)), -2)
    sq_norm = x if b == 1 else sum_of_squares(x, -1)  # b = 1 needs no norm
    if eps:
        sq_norm = sq_norm + eps
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
    eps: float = 0.0,
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
        if eps:
            sq_norm = sq_norm + eps
    out = _scaled(lin, sq_norm, b, scale, hold)
    return out.flatten(1, 2) if groups > 1 else out


def _scaled(lin: Tensor, sq_norm: Tensor, b: float, scale: float, hold: Hold | None) -> Tensor:
    if b == 1 or hold is None:
        exact = lin.dtype == accumulation_dtype(lin.dtype)
        if b != 1 and exact and _by_images(lin, sq_norm):
            return _scaled_in_place(lin, _norm(sq_norm), b, scale)
        return bcos_scale(lin, sq_norm, b, scale)
    if hold is Tensor.detach:
        with torch.no_grad():
            factor = _constant_factor(lin, sq_norm, b, scale)
        return multiply(lin, factor)
    return multiply(lin, hold(bcos_factor(lin, sq_norm, b, scale)))


def _scaled_in_place(lin: Tensor, n: Tensor, b: float, scale: float) -> Tensor:
    factor = torch.empty_like(lin[0])
    for image, own in zip(lin, n, strict=True):
        image.mul_(_factor(image, own, b, scale, out=factor))
    return lin


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
        first = _apply(_Larger, first, other)
    return first


class _Larger(torch.autograd.Function):
    """`torch.maximum`, with a backward in fewer passes; of equals the first takes the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b = inputs
        ctx.save_for_backward(a < b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (second,) = ctx.saved_tensors
        return grad.masked_fill(second, 0), grad.masked_fill(~second, 0)


def _norm(sq_norm: Tensor) -> Tensor:
    """n, or 1 where it is 0: what is divided by it is 0 there as well."""
    return _or_one(sq_norm).sqrt()


def _or_one(sq_norm: Tensor) -> Tensor:
    """n², or 1 where it is 0 or no normal number: compiled code on a GPU makes its root 0."""
    return torch.where(sq_norm >= torch.finfo(sq_norm.dtype).tiny, sq_norm, 1.0)


def _cosine(lin: Tensor, n: Tensor, b: float) -> Tensor:
    c = lin / n
    if b > 2:  # rounding makes |c| exceed 1 a little, which a large b amplifies
        c = c + (c.clamp(-1, 1) - c).detach()
    return c


class _BcosScale(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(lin: Tensor, sq_norm: Tensor, b: float, scale: float) -> Tensor:
        factor = _constant_factor(lin, sq_norm, b, scale)
        # What torch 2.11 compiles has no gradient by an output that was made in place, nor by one
        # that was cast to the type it had.
        out = factor * lin if torch.compiler.is_compiling() else factor.mul_(lin)
        return out if out.dtype == lin.dtype else out.to(lin.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        lin, sq_norm, ctx.b, ctx.scale = inputs
        ctx.save_for_backward(lin, sq_norm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        lin, sq_norm = ctx.saved_tensors
        b, scale, grad_sq_norm = ctx.b, ctx.scale, None
        wide_lin, wide_grad = (t.to(accumulation_dtype(t.dtype)) for t in (lin, grad))
        if torch.is_grad_enabled():  # differentiable operations, to be differentiated again
            grad_lin = bcos_factor(lin, sq_norm, b, scale * b) * wide_grad
        else:
            factor = _constant_factor(lin, sq_norm, b, scale * b)
            own = not torch.compiler.is_compiling() and not _is_batched(wide_grad)
            grad_lin = factor.mul_(wide_grad) if own else factor * wide_grad
        if ctx.needs_input_grad[1]:
            along = (grad_lin * wide_lin).sum_to_size(sq_norm.shape)
            grad_sq_norm = along * ((1 - b) / (2 * b)) / _or_one(sq_norm)
        return grad_lin.to(lin.dtype), grad_sq_norm, None, None
