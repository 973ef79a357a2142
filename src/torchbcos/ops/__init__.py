"""The numerical operations that every B-cos layer is made of, and the choice between twins."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from torchbcos.ops import reference
from torchbcos.ops.reference import (
    Hold,
    accumulation_dtype,
    bcos_factor,
    bcos_scale,
    box_sum,
    multiply,
    sum_of_squares,
    unit_rows,
)

__all__ = [
    "accumulation_dtype",
    "add",
    "avg_pool2d",
    "bcos_conv",
    "bcos_factor",
    "bcos_linear",
    "bcos_scale",
    "box_sum",
    "multiply",
    "sum_of_squares",
    "unit_rows",
]


def bcos_linear(
    x: Tensor, weight: Tensor, b: float, max_out: int, scale: float, hold: Hold | None
) -> Tensor:
    """See `reference.bcos_linear`."""
    if _holds_plainly(hold) and _fusible(x, weight):
        from torchbcos.ops import triton

        return triton.bcos_linear(x, weight, b, max_out, scale, hold)
    return reference.bcos_linear(x, weight, b, max_out, scale, hold)


def bcos_conv(
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    b: float,
    max_out: int,
    scale: float,
    hold: Hold | None,
) -> Tensor:
    """See `reference.bcos_conv`."""
    fused = groups == 1 and _holds_plainly(hold)
    if fused and weight.dim() < 5 and _fusible(x, weight):
        from torchbcos.ops import triton

        if weight.dim() == 4:
            return triton.bcos_conv(
                x, weight, stride, padding, dilation, 1, b, max_out, scale, hold
            )
        flat, rows, geometry = x[:, :, None], weight[:, :, None], ((1, *stride), (0, *padding))
        return triton.bcos_conv(
            flat, rows, *geometry, (1, *dilation), 1, b, max_out, scale, hold
        ).squeeze(2)
    return reference.bcos_conv(
        x, weight, stride, padding, dilation, groups, b, max_out, scale, hold
    )


def avg_pool2d(
    x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """Means over patches, with the zeros of the padding counted."""
    if x.dim() == 4 and _fusible(x):
        from torchbcos.ops import triton_maps

        return triton_maps.avg_pool2d(x, kernel, stride, padding)
    return F.avg_pool2d(x, kernel, stride, padding)


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b."""
    if a.dim() == 4 and a.shape == b.shape and a.dtype == b.dtype and _fusible(a, b):
        from torchbcos.ops import triton_maps

        return triton_maps.add(a, b)
    return a + b


def _fusible(*tensors: Tensor) -> bool:
    """Whether the fused kernels know these tensors here.

    They do not know float64, subclasses of tensors, transforms such as vmap, forward-mode
    derivatives, and devices other than the current one; a compiler fuses the reference by itself.
    """
    for t in tensors:
        if not t.is_cuda or t.dtype not in _FUSED_DTYPES or type(t) not in _PLAIN or not t.numel():
            return False
        if t.device.index != torch._C._cuda_getDevice():
            return False
    return (
        _HAS_TRITON
        and not torch.compiler.is_compiling()
        and forward_ad._current_level < 0
        and torch._C._functorch.maybe_current_level() is None
        and not torch._C._get_tracing_state()
    )


_HAS_TRITON = find_spec("triton") is not None
_FUSED_DTYPES = frozenset([torch.float32, torch.bfloat16, torch.float16])
_PLAIN = frozenset([Tensor, torch.nn.Parameter])


def _holds_plainly(hold: Hold | None) -> bool:
    """Whether factors are used and then forgotten; those on a tape must be seen by it."""
    return hold is None or hold is Tensor.detach
