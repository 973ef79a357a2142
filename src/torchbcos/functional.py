"""The B-cos transform as functions: `bcos_linear`, `bcos_conv1d`, `bcos_conv2d`, `bcos_conv3d`.

They take the arguments of their namesakes in `torch.nn.functional`, without `bias`, and three
more: `b`, the exponent; `max_out`, how many adjacent rows of `weight` compete for one output; and
`scale`, the paper's γ.
"""

from __future__ import annotations

from collections.abc import Iterable

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
    in_explanation_mode,
    offset,
    record_factors,
    replay_factors,
)

__all__ = [
    "add_offset",
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
) -> Tensor:  # [*, out_features]
    """B-cos in place of `torch.nn.functional.linear`.

    >>> bcos_linear(torch.tensor([3.0, 4.0]), torch.tensor([[1.0, 0.0], [0.0, 2.0]]), b=2)
    tensor([1.8000, 3.2000])
    """
    check_transform(b, max_out, scale)
    _check_weight(weight, 2, max_out)
    _check_float(input)
    if input.dim() < 1 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"`input` (shape {tuple(input.shape)}) must end in {weight.shape[1]} features, the "
            f"second size of `weight` (shape {tuple(weight.shape)})."
        )
    rows = _unit_major(ops.unit_rows(weight), 1, max_out)
    lin = F.linear(input, rows)
    if max_out > 1:
        lin = _max_unit(lin.unflatten(-1, (max_out, -1)), -2)
    return _scaled(lin, _sq_norm(input, b, -1), b, scale)


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
) -> Tensor:
    """B-cos in place of `torch.nn.functional.conv1d`; see `bcos_conv2d`."""
    return _bcos_conv(
        1, input, weight, stride, padding, dilation, groups, padding_mode, b, max_out, scale
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
) -> Tensor:
    """B-cos in place of `torch.nn.functional.conv2d`.

    `input` is [N, C, H, W] or [C, H, W]; `weight` is [out_channels · max_out, C / groups, kH, kW]
    and of any norm. The norm of a patch counts what the kernel sees there, padding included.

    >>> x, w = torch.rand(2, 6, 8, 8), torch.randn(20, 6, 3, 3)
    >>> bcos_conv2d(x, w, padding="same", padding_mode="reflect", max_out=2).shape
    torch.Size([2, 10, 8, 8])
    """
    return _bcos_conv(
        2, input, weight, stride, padding, dilation, groups, padding_mode, b, max_out, scale
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
) -> Tensor:
    """B-cos in place of `torch.nn.functional.conv3d`; see `bcos_conv2d`."""
    return _bcos_conv(
        3, input, weight, stride, padding, dilation, groups, padding_mode, b, max_out, scale
    )


_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


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
) -> Tensor:
    check_transform(b, max_out, scale)
    check_padding_mode(padding_mode)
    _check_weight(weight, dims + 2, max_out)
    _check_float(x)
    check_groups(groups, weight.shape[1] * groups, weight.shape[0] // max_out)
    _check_conv_input(x, weight.shape[1] * groups, dims)
    if x.dim() == dims + 1:
        # fmt: off
        return _bcos_conv(dims, x.unsqueeze(0), weight, stride, padding, dilation, groups,
                          padding_mode, b, max_out, scale).squeeze(0)
        # fmt: on
    kernel = tuple(weight.shape[2:])
    stride = int_tuple("stride", stride, dims, minimum=1)
    dilation = int_tuple("dilation", dilation, dims, minimum=1)
    pairs = padding_pairs(padding, kernel, stride, dilation)
    _check_extent(x, kernel, dilation, pairs, padding_mode)

    pad = tuple(before for before, _ in pairs)
    if any(before != after for before, after in pairs) or (padding_mode != "zeros" and any(pad)):
        mode = "constant" if padding_mode == "zeros" else padding_mode
        x = F.pad(x, [p for pair in reversed(pairs) for p in pair], mode=mode)
        pad = (0,) * dims

    rows = _unit_major(ops.unit_rows(weight), groups, max_out)
    lin = _CONV[dims](x, rows, None, stride, pad, dilation, groups)
    if groups > 1 or max_out > 1:
        lin = lin.unflatten(1, (groups, max_out, -1))
        lin = _max_unit(lin, 2)  # [N, groups, out_channels / groups, *]
        if groups == 1:
            lin = lin.squeeze(1)
    sq_norm = _sq_norm(x, b, 1, groups)
    if b != 1:
        sq_norm = ops.box_sum(sq_norm, kernel, stride, pad, dilation)
        if groups > 1:
            sq_norm = sq_norm.unsqueeze(2)
    out = _scaled(lin, sq_norm, b, scale)
    return out.flatten(1, 2) if groups > 1 else out


def _scaled(lin: Tensor, sq_norm: Tensor, b: float, scale: float) -> Tensor:
    if b == 1 or not in_explanation_mode():
        return ops.bcos_scale(lin, sq_norm, b, scale)
    return ops.multiply(lin, hold(ops.bcos_factor(lin, sq_norm, b, scale)))


def _sq_norm(x: Tensor, b: float, dim: int, groups: int = 1) -> Tensor:
    return x if b == 1 else ops.sum_of_squares(x, dim, groups)  # b = 1 needs no norm


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


def _check_float(x: Tensor) -> None:
    if not x.is_floating_point():
        raise TypeError(
            f"`input` (dtype {x.dtype}) must be a floating-point tensor: convert it with .float(), "
            "and divide 8-bit images by 255."
        )


def _check_weight(weight: Tensor, dim: int, max_out: int) -> None:
    if weight.dim() != dim:
        raise ValueError(f"`weight` (shape {tuple(weight.shape)}) must have {dim} dimensions.")
    if weight.shape[0] % max_out:
        raise ValueError(
            f"`max_out` (={max_out}) must divide the {weight.shape[0]} rows of `weight` (shape "
            f"{tuple(weight.shape)}): each output owns `max_out` adjacent rows."
        )


def _check_conv_input(x: Tensor, channels: int, dims: int) -> None:
    shape = tuple(x.shape)
    if x.dim() not in (dims + 1, dims + 2):
        raise ValueError(
            f"`input` (shape {shape}) must have {dims + 2} dimensions, [N, C, …], or {dims + 1} "
            "without a batch."
        )
    if shape[-dims - 1] != channels:
        hint = ""
        if channels == 2 * shape[-dims - 1]:
            hint = " Did you mean torchbcos.encoding.encode(input), which doubles the channels?"
        raise ValueError(f"`input` (shape {shape}) must have {channels} channels.{hint}")


def _check_extent(
    x: Tensor,
    kernel: tuple[int, ...],
    dilation: tuple[int, ...],
    pairs: tuple[tuple[int, int], ...],
    padding_mode: str,
) -> None:
    for size, k, d, pair in zip(x.shape[2:], kernel, dilation, pairs, strict=True):
        most = {"reflect": size - 1, "circular": size}.get(padding_mode)
        if most is not None and max(pair) > most:
            raise ValueError(
                f"`padding` (={max(pair)}) must be at most {most} with padding_mode="
                f"{padding_mode!r} on an input of extent {size}: use less, or 'zeros' or "
                "'replicate'."
            )
        if size + sum(pair) < d * (k - 1) + 1:
            raise ValueError(
                f"`input` (shape {tuple(x.shape)}) is smaller than the kernel, which spans "
                f"{d * (k - 1) + 1} of {size + sum(pair)} padded pixels: enlarge it or pad more."
            )
