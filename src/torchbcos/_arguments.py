"""Checks of the arguments that layers and functions share; each names value, rule and remedy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral, Real

import torch

PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


def is_int(value: object) -> bool:
    """Python's or NumPy's integers, but no bool; store it as `int(value)`."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def int_tuple(name: str, value: int | Iterable[int], n: int, minimum: int) -> tuple[int, ...]:
    """`value` as `n` integers: one is repeated, as in torch."""
    values = tuple(value) if isinstance(value, Iterable) else (value,) * n
    if len(values) == 1:
        values *= n
    if len(values) != n or not all(is_int(v) and v >= minimum for v in values):
        what = "an integer" if n == 1 else f"one integer or {n} integers"
        raise ValueError(f"`{name}` (={value!r}) must be {what}, each at least {minimum}.")
    return tuple(map(int, values))


def check_transform(b: float, max_out: int, scale: float, eps: float = 0.0) -> None:
    if not (isinstance(b, Real) and 1 <= b < math.inf):
        raise ValueError(
            f"`b` (={b!r}) must be a finite number of at least 1: 1 is a linear map, 2 the usual "
            "choice, larger values press harder for alignment."
        )
    if not is_int(max_out) or max_out < 1:
        raise ValueError(
            f"`max_out` (={max_out!r}) must be an integer of at least 1: 1 for no MaxOut, 2 as in "
            "the paper."
        )
    if not (isinstance(scale, Real) and 0 < scale < math.inf):
        raise ValueError(
            f"`scale` (={scale!r}) must be a positive finite number: 1.0 changes nothing."
        )
    if not (isinstance(eps, Real) and 0 <= eps < math.inf):
        raise ValueError(
            f"`eps` (={eps!r}) must be a finite number of at least 0: 0 for the transform itself, "
            "1e-6 for networks that were trained with it."
        )


def check_groups(groups: int, in_channels: int, out_channels: int) -> None:
    if not is_int(groups) or groups < 1:
        raise ValueError(f"`groups` (={groups!r}) must be an integer of at least 1.")
    for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
        if channels % groups:
            common = math.gcd(in_channels, out_channels)
            *others, last = [str(d) for d in range(1, common + 1) if common % d == 0]
            choice = f"{', '.join(others)} or {last}" if others else last
            raise ValueError(
                f"`groups` (={groups}) must divide `{name}` (={channels}): use {choice}."
            )


def check_device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"`device` (={device!r}) must be cpu, cuda or cuda:N.") from error
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        raise ValueError(
            f"`device` (={str(device)!r}) must be one that torch can use, and it finds {count} "
            "GPUs here: use cpu."
        )
    return found


def check_padding_mode(padding_mode: str) -> None:
    if padding_mode not in PADDING_MODES:
        raise ValueError(
            f"`padding_mode` (={padding_mode!r}) must be one of {', '.join(PADDING_MODES)}."
        )


def padding_pairs(
    padding: str | int | Iterable[int],
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
) -> tuple[tuple[int, int], ...]:
    """Padding before and after each spatial dimension."""
    if not isinstance(padding, str):
        return tuple((p, p) for p in int_tuple("padding", padding, len(kernel), minimum=0))
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding != "same":
        raise ValueError(
            f"`padding` (={padding!r}) must be 'same', 'valid', an integer or one per dimension."
        )
    if any(s != 1 for s in stride):
        raise ValueError(
            f"`padding` (='same') needs `stride` 1, but `stride` is {stride}: give the padding as "
            "integers."
        )
    totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    return tuple((total // 2, total - total // 2) for total in totals)


def missing_package(what: str, package: str | None, extra: str) -> str:
    """The sentence where one of the packages of an extra is not installed."""
    return f"{what} needs the package {package}: install it with pip install 'torchbcos[{extra}]'."


@contextmanager
def naming_size(what: str, model: torch.nn.Module, remedy: str = "") -> Iterator[None]:
    """What the network raises for images of a size it does not take, in one sentence.

    That there is no memory is not the size's fault, and passes.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        of_device = isinstance(error, (torch.OutOfMemoryError, torch.AcceleratorError))
        if of_device or "allocate" in str(error):
            raise
        reason = _why_unsuitable(error, model)
        raise ValueError(f"{what} does not suit the network: {reason}{remedy}.") from error


def _why_unsuitable(error: Exception, model: torch.nn.Module) -> str:
    """What networks of one size assert was written for the original one, before conversion."""
    reason = " ".join(str(error).split()).rstrip(".!")
    size = getattr(model, "input_size", None)
    if size is None:
        return reason or "it takes images of its own size only"
    own = f"{size[0]}×{size[1]} px"
    if isinstance(error, AssertionError):
        return f"it takes {own} only"
    return f"{reason} (its own size is {own})"
