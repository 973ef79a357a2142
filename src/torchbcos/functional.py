"""The B-cos transform as functions: `bcos_linear`, `bcos_conv1d`, `bcos_conv2d`, `bcos_conv3d`.

They take the arguments of their namesakes in `torch.nn.functional`, without `bias`, and four
more: `b`, the exponent; `max_out`, how many adjacent rows of `weight` compete for one output;
`scale`, the paper's γ; and `eps`, which is added to ‖x‖² and only of use to networks that were
trained with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchbcos import ops
from torchbcos._arguments import (
    check_groups,
    check_padding_mode,
    check_transform,
    int_tuple,
    padding_pairs,
)
from torchbcos.mode import (
    add_offset,
    collect_offsets,
    explanation_mode,
    gate,
    hold,
    holder,
    in_explanation_mode,
    offset,
    record_factors,
    replay_factors,
)

__all__ = [
    "add",
    "add_offset",
    "avg_pool2d",
    "bcos_conv1d",
    "bcos_conv2d",
    "bcos_conv3d",
    "bcos_linear",
    "collect_offsets",
    "explanation_mode",
    "gate",
    "hold",
    "in_explanation_mode",
    "offset",
    "record_factors",
    "replay_factors",
]


def bcos_linear(
    input: Tensor,  # [*, in_features]
    weight: Tensor,  # [out_features · max_out, in_features]
    *,
    b: float = 2.0,
    max_out: int = 1,
    scale: float = 1.0,
    eps: float = 0.0,
) -> Tensor:  # [*, out_features]
    """B-cos in place of `torch.nn.functional.linear`.

    >>> bcos_linear(torch.tensor([3.0, 4.0]), torch.tensor([[1.0, 0.0], [0.0, 2.0]]), b=2)
    tensor([1.8000, 3.2000])
    """
    check_transform(b, max_out, scale, eps)
    _check_weight(weight.shape, 2, max_out)
    _check_float(input)
    if input.dim() < 1 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"`input` (shape {tuple(input.shape)}) must end in {weight.shape[1]} features, the "
            f"second size of `weight` (shape {tuple(weight.shape)})."
        )
    return ops.bcos_linear(input, weight, b, max_out, scale, holder(), eps)


def bcos_conv1d(
    input: Tensor,
    weight: Tensor,
    stride: int | Iterable[int] = 1,
    padding: str | int | Iterable[int] = 0,
    dilation: int | Iterable[int] = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    b: float = 2.0,
    max_out: int = 1,
    scale: float = 1.0,
    eps: float = 0.0,
) -> Tensor:
    """B-cos in place of `torch.nn.functional.conv1d`; see `bcos_conv2d`."""
    return _bcos_conv(
        1, input, weight, stride, padding, dilation, groups, padding_mode, b, max_out, scale, eps
    )


def bcos_conv2d(
    input: Tensor,
    weight: Tensor,
    stride: int | Iterable[int] = 1,
    padding: str | int | Iterable[int] = 0,
    dilation: int | Iterable[int] = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    b: float = 2.0,
    max_out: int = 1,
    scale: float = 1.0,
    eps: float = 0.0,
) -> Tensor:
    """B-cos in place of `torch.nn.functional.conv2d`.

    `input` is [N, C, H, W] or [C, H, W]; `weight` is [out_channels · max_out, C / groups, kH, kW]
    and of any norm. The norm of a patch counts what the kernel sees there, padding included.

    >>> x, w = torch.rand(2, 6, 8, 8), torch.randn(20, 6, 3, 3)
    >>> bcos_conv2d(x, w, padding="same", padding_mode="reflect", max_out=2).shape
    torch.Size([2, 10, 8, 8])
    """
    return _bcos_conv(
        2, input, weight, stride, padding, dilation, groups, padding_mode, b, max_out, scale, eps
    )


def bcos_conv3d(
    input: Tensor,
    weight: Tensor,
    stride: int | Iterable[int] = 1,
    padding: str | int | Iterable[int] = 0,
    dilation: int | Iterable[int] = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    b: float = 2.0,
    max_out: int = 1,
    scale: float = 1.0,
    eps: float = 0.0,
) -> Tensor:
    """B-cos in place of `torch.nn.functional.conv3d`; see `bcos_conv2d`."""
    return _bcos_conv(
        3, input, weight, stride, padding, dilation, groups, padding_mode, b, max_out, scale, eps
    )


def avg_pool2d(
    input: Tensor,  # [N, C, H, W]
    kernel_size: int | Iterable[int],
    stride: int | Iterable[int] | None = None,
    padding: int | Iterable[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """`torch.nn.functional.avg_pool2d`, faster on a GPU for what it is mostly asked for."""
    kernel = int_tuple("kernel_size", kernel_size, 2, minimum=1)
    pad = int_tuple("padding", padding, 2, minimum=0)
    step = int_tuple("stride", stride, 2, minimum=1) if stride else kernel
    plain = divisor_override is None and not ceil_mode and (count_include_pad or not any(pad))
    if plain and all(2 * p <= k for p, k in zip(pad, kernel, strict=True)):
        return ops.avg_pool2d(input, kernel, step, pad)  # type: ignore[arg-type]
    return F.avg_pool2d(input, kernel, step, pad, ceil_mode, count_include_pad, divisor_override)


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b; on a GPU a B-cos layer that follows finds the norms of the sum made already."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return ops.add(a, b)
    return a + b


def _bcos_conv(
    dims: int,
    x: Tensor,
    weight: Tensor,
    stride: int | Iterable[int],
    padding: str | int | Iterable[int],
    dilation: int | Iterable[int],
    groups: int,
    padding_mode: str,
    b: float,
    max_out: int,
    scale: float,
    eps: float,
) -> Tensor:
    _check_float(x)
    if x.dim() == dims + 1:
        # fmt: off
        return _bcos_conv(dims, x.unsqueeze(0), weight, stride, padding, dilation, groups,
                          padding_mode, b, max_out, scale, eps).squeeze(0)
        # fmt: on
    given = (stride, padding, dilation, groups, padding_mode, b, max_out, scale, eps)
    if torch.compiler.is_compiling():
        geometry = _check_conv(dims, x.shape, weight.shape, *given)
    else:
        try:
            geometry = _check_conv_once(dims, x.shape, weight.shape, *given)  # type: ignore[arg-type]
        except TypeError:  # lists and symbolic sizes cannot be looked up
            geometry = _check_conv(dims, x.shape, weight.shape, *given)
    if geometry.borders:
        x = F.pad(x, geometry.borders, mode=geometry.border_mode)
    # fmt: off
    return ops.bcos_conv(x, weight, geometry.stride, geometry.padding, geometry.dilation, groups,
                         b, max_out, scale, holder(), eps)
    # fmt: on


class _Geometry(NamedTuple):
    stride: tuple[int, ...]
    padding: tuple[int, ...]  # with zeros, by the convolution
    dilation: tuple[int, ...]
    borders: tuple[int, ...]  # before the convolution, in the order of `F.pad`; () for none
    border_mode: str


def _check_conv(
    dims: int,
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    stride: int | Iterable[int],
    padding: str | int | Iterable[int],
    dilation: int | Iterable[int],
    groups: int,
    padding_mode: str,
    b: float,
    max_out: int,
    scale: float,
    eps: float,
) -> _Geometry:
    check_transform(b, max_out, scale, eps)
    check_padding_mode(padding_mode)
    _check_weight(weight, dims + 2, max_out)
    check_groups(groups, weight[1] * groups, weight[0] // max_out)
    _check_conv_input(shape, weight[1] * groups, dims)
    kernel = tuple(weight[2:])
    stride = int_tuple("stride", stride, dims, minimum=1)
    dilation = int_tuple("dilation", dilation, dims, minimum=1)
    pairs = padding_pairs(padding, kernel, stride, dilation)
    _check_extent(shape, kernel, dilation, pairs, padding_mode)
    pad = tuple(before for before, _ in pairs)
    if any(before != after for before, after in pairs) or (padding_mode != "zeros" and any(pad)):
        mode = "constant" if padding_mode == "zeros" else padding_mode
        borders = tuple(p for pair in reversed(pairs) for p in pair)
        return _Geometry(stride, (0,) * dims, dilation, borders, mode)
    return _Geometry(stride, pad, dilation, (), "")


# By type too, because True, 1 and 1.0 are equal and not all of them are allowed.
_check_conv_once = lru_cache(maxsize=4096, typed=True)(_check_conv)


def _check_float(x: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(
            f"`input` (dtype {x.dtype}) must be a floating-point tensor: convert it with .float(), "
            "and divide 8-bit images by 255."
        )


def _check_weight(shape: tuple[int, ...], dim: int, max_out: int) -> None:
    if len(shape) != dim:
        raise ValueError(f"`weight` (shape {tuple(shape)}) must have {dim} dimensions.")
    if shape[0] % max_out:
        raise ValueError(
            f"`max_out` (={max_out}) must divide the {shape[0]} rows of `weight` (shape "
            f"{tuple(shape)}): each output owns `max_out` adjacent rows."
        )


def _check_conv_input(shape: tuple[int, ...], channels: int, dims: int) -> None:
    if len(shape) != dims + 2:
        raise ValueError(
            f"`input` (shape {tuple(shape)}) must have {dims + 2} dimensions, [N, C, …], or "
            f"{dims + 1} without a batch."
        )
    if shape[-dims - 1] != channels:
        hint = ""
        if channels == 2 * shape[-dims - 1]:
            hint = " Did you mean torchbcos.encoding.encode(input), which doubles the channels?"
        raise ValueError(f"`input` (shape {tuple(shape)}) must have {channels} channels.{hint}")


def _check_extent(
    shape: tuple[int, ...],
    kernel: tuple[int, ...],
    dilation: tuple[int, ...],
    pairs: tuple[tuple[int, int], ...],
    padding_mode: str,
) -> None:
    for size, k, d, pair in zip(shape[2:], kernel, dilation, pairs, strict=True):
        most = {"reflect": size - 1, "circular": size}.get(padding_mode)
        if most is not None and max(pair) > most:
            raise ValueError(
                f"`padding` (={max(pair)}) must be at most {most} with padding_mode="
                f"{padding_mode!r} on an input of extent {size}: use less, or 'zeros' or "
                "'replicate'."
            )
        if size + sum(pair) < d * (k - 1) + 1:
            raise ValueError(
                f"`input` (shape {tuple(shape)}) is smaller than the kernel, which spans "
                f"{d * (k - 1) + 1} of {size + sum(pair)} padded pixels: enlarge it or pad more."
            )
