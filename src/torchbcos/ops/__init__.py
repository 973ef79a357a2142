"""The numerical operations that every B-cos layer is made of, and the choice between twins."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from torchbcos.ops import reference
from torchbcos.ops.reference import Hold, accumulation_dtype

__all__ = [
    "accumulation_dtype",
    "add",
    "avg_pool2d",
    "bcos_conv",
    "bcos_linear",
    "fused_augmentation",
    "fused_batch_norm",
    "fused_scale",
]


def bcos_linear(
    x: Tensor,
    weight: Tensor,
    b: float,
    max_out: int,
    scale: float,
    hold: Hold | None,
    eps: float = 0.0,
) -> Tensor:
    """See `reference.bcos_linear`."""
    if _holds_plainly(hold) and _fusible(x, weight):
        fused: Tensor = _twin("triton").bcos_linear(x, weight, b, max_out, scale, hold, eps)
        return fused
    return reference.bcos_linear(x, weight, b, max_out, scale, hold, eps)


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
    eps: float = 0.0,
) -> Tensor:
    """See `reference.bcos_conv`."""
    dims = weight.dim() - 2
    fusible = dims < 3 and _holds_plainly(hold) and _fusible(x, weight)
    if fusible and (groups == 1 or x.numel() < 2**30):  # pixels of groups are counted in 32 bits
        bcos_conv = _twin("triton").bcos_conv
        if dims == 1:
            x, weight = x[:, :, None], weight[:, :, None]
            stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
        # fmt: off
        out: Tensor = bcos_conv(x, weight, stride, padding, dilation, groups, b, max_out, scale,
                                hold, eps)
        # fmt: on
        return out.squeeze(2) if dims == 1 else out
    return reference.bcos_conv(
        x, weight, stride, padding, dilation, groups, b, max_out, scale, hold, eps
    )


def avg_pool2d(
    x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int]
) -> Tensor:
    """Means over patches, with the zeros of the padding counted."""
    # Whoever watches torch's functions is to see the pool: posthoc.head does.
    watched = torch._C._is_torch_function_mode_enabled()
    if x.dim() == 4 and not watched and _fusible(x):
        fused: Tensor = _twin("triton_maps").avg_pool2d(x, kernel, stride, padding)
        return fused
    return F.avg_pool2d(x, kernel, stride, padding)


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b."""
    if a.dim() == 4 and a.shape == b.shape and a.dtype == b.dtype and _fusible(a, b):
        fused: Tensor = _twin("triton_maps").add(a, b)
        return fused
    return a + b


def fused_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: Tensor | None,
    momentum: float | None,
) -> tuple[Tensor, Tensor, bool] | None:
    """x / √(var + eps) · weight + bias, the variance, and whether `running` went on by `momentum`
    towards it; where there is a kernel for it.
    """
    if x.dim() != 4 or not (_fusible(x) and _are_fusible(weight, bias)):
        return None
    tracks = (
        running is not None
        and momentum is not None
        and _is_known(running)
        and running.dtype == torch.float32
        and running.is_contiguous()
        and not running.data_ptr() & 15
    )
    given = (running, momentum) if tracks else ()
    out, variance = _twin("triton_norms").batch_norm(x, weight, bias, eps, *given)
    return out, variance, tracks


def fused_scale(
    x: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor | None:
    """`fused_batch_norm` with a given variance, where there is a kernel and nothing is to learn."""
    learns = any(t is not None and t.requires_grad for t in (x, weight, bias))
    if x.dim() != 4 or (learns and torch.is_grad_enabled()):
        return None
    if not (_fusible(x) and _are_fusible(weight, bias)):
        return None
    inverse = (variance.float() + eps).rsqrt()
    fused: Tensor = _twin("triton_norms").scale(x, inverse, weight, bias)
    return fused


def fused_augmentation(x: Tensor, numbers: Tensor, levels: int) -> Tensor | None:
    """One operation of RandAugment on each image, where there is a kernel for it."""
    plain = x.dim() == 4 and x.shape[1] == 3 and x.dtype == torch.float32
    if not plain or x.requires_grad or not _fusible(x, numbers):
        return None
    fused: Tensor = _twin("triton_augment").operate(x, numbers, levels)
    return fused


def _are_fusible(*parameters: Tensor | None) -> bool:
    return all(p is None or _is_known(p) for p in parameters)


@cache
def _twin(name: str) -> Any:
    """The module of this name, imported when it is first needed."""
    return import_module(f"torchbcos.ops.{name}")


def _fusible(x: Tensor, other: Tensor | None = None) -> bool:
    """Whether the fused kernels know these tensors here.

    They do not know float64, subclasses of tensors, transforms such as vmap, forward-mode
    derivatives, and devices other than the current one; a compiler fuses the reference by itself.
    """
    return (
        x.is_cuda
        and _HAS_TRITON
        and not torch.compiler.is_compiling()
        and _is_known(x)
        and (other is None or _is_known(other))
        and forward_ad._current_level < 0
        and torch._C._functorch.maybe_current_level() is None
        and not torch._C._get_tracing_state()
    )


def _is_known(t: Tensor) -> bool:
    return (
        t.is_cuda
        and t.dtype in _FUSED_DTYPES
        and type(t) in _PLAIN
        and t.numel() > 0
        and t.get_device() == torch._C._cuda_getDevice()
    )


_HAS_TRITON = find_spec("triton") is not None
_FUSED_DTYPES = frozenset([torch.float32, torch.bfloat16, torch.float16])
_PLAIN = frozenset([Tensor, torch.nn.Parameter])


def _holds_plainly(hold: Hold | None) -> bool:
    """Whether factors are used and then forgotten; those on a tape must be seen by it."""
    return hold is None or hold is Tensor.detach
