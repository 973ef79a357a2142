"""Powers of cosines in plain torch, with derivatives that are finite where a cosine is 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LARGEST_DENORMAL = {
    kind: torch.nextafter(
        torch.tensor(torch.finfo(kind).tiny, dtype=kind), torch.tensor(0.0, dtype=kind)
    ).item()
    for kind in (torch.float32, torch.float64)
}


def power(c: Tensor, p: float) -> Tensor:
    """|c|^p for p > 0, with derivatives of any order that are 0, not NaN, at c = 0."""
    a = c.abs()
    if p == 1:
        return a
    nonzero = a >= torch.finfo(a.dtype).tiny
    a = torch.where(nonzero, a, 1.0)
    raised = a.pow(p) if torch.compiler.is_compiling() else _Power.apply(a, p)
    return torch.where(nonzero, raised, 0.0)


class _Power(torch.autograd.Function):
    """c^p as `raise_to` computes it, with the derivatives of a power."""

    generate_vmap_rule = True

    @staticmethod
    def forward(c: Tensor, p: float) -> Tensor:
        return raise_to(c.clone(), p)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        c, ctx.p = inputs
        ctx.save_for_backward(c)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (c,) = ctx.saved_tensors
        return grad * (ctx.p * c.pow(ctx.p - 1)), None


def raise_to(c: Tensor, p: float) -> Tensor:
    """c^p for c ≥ 0, in place; by roots, which are quick, where p is a number of quarters."""
    if torch.compiler.is_compiling() or 4 * p not in range(13):
        return c.pow_(p)
    whole, rest = divmod(int(4 * p), 4)
    if not rest:
        return c.pow_(whole)
    root = c.sqrt()
    if rest == 1:
        root.sqrt_()
    elif rest == 3:
        root.mul_(root.sqrt())
    return c.pow_(whole).mul_(root)
