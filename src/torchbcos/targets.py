"""Which classes an explanation is of, in every form that users give them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Targets", "check_indices", "class_index", "resolve_targets", "targets_of_chunk"]

#: One class for all images, several, one or several for each, or "all".
Targets = int | str | Sequence[int | str] | Sequence[Sequence[int]] | Tensor | np.ndarray | None


def targets_of_chunk(targets: Targets, i: int, chunk: int, count: int) -> Targets:
    """The part of per-image targets that belongs to the i-th chunk."""
    nested = isinstance(targets, list | tuple) and targets and isinstance(targets[0], list | tuple)
    if nested or isinstance(targets, np.ndarray):
        try:
            targets = torch.tensor(
                np.array(targets) if isinstance(targets, np.ndarray) else targets
            )
        except (ValueError, TypeError) as error:
            raise ValueError(f"`targets` (={targets!r}) must be N lists of K classes.") from error
    if isinstance(targets, Tensor) and targets.dim() > 0:
        if targets.dim() > 2 or len(targets) != count or targets.numel() == 0:
            raise ValueError(
                f"`targets` (shape {tuple(targets.shape)}) must be [N] or [N, K] for N = {count} "
                "images; give a list for the same classes on every image."
            )
        return targets[i * chunk : (i + 1) * chunk]
    return targets


def resolve_targets(targets: Targets, logits: Tensor, names: Sequence[str] | None) -> Tensor:
    """[N, K] class indices."""
    n, k = logits.shape
    if targets is None:
        return logits.argmax(1, keepdim=True)
    if isinstance(targets, str) and targets == "all":
        return torch.arange(k, device=logits.device).expand(n, k)
    if isinstance(targets, Tensor):
        if targets.is_floating_point() or targets.dtype == torch.bool:
            raise TypeError(f"`targets` (dtype {targets.dtype}) must be integers, class indices.")
        targets = targets.long()  # unsigned ones have no least
        check_indices(int(targets.min()), int(targets.max()), tuple(targets.shape), k)
        given = targets.to(logits.device, non_blocking=True)
        if given.dim() == 0:
            given = given.expand(n)
        return given.view(n, -1)
    listed: list[Any] = [targets]
    if isinstance(targets, Iterable) and not isinstance(targets, str):
        listed = list(targets)
    if not listed:
        raise ValueError("`targets` (=[]) must hold at least one class; leave it out for the top.")
    found = [class_index(t, k, names) for t in listed]
    return torch.tensor(found, device=logits.device).expand(n, -1)


def class_index(
    target: Any, count: int, names: Sequence[str] | None, called: str = "`targets`"
) -> int:
    """The index of a class that is given by its name or index."""
    if isinstance(target, str):
        if names is None or target not in names:
            known = "this model has no class names"
            if names is not None:
                known = ", ".join(names[:20]) + ", …" * (len(names) > 20)
            raise ValueError(f"{called} (={target!r}) must be a class of the model: {known}.")
        return list(names).index(target)
    try:
        if isinstance(target, bool):
            raise TypeError("no class")
        value = operator.index(target)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{called} (={target!r}) must be a class index or name.") from error
    _check_class(value, count, called)
    return value


def check_indices(least: int, most: int, shape: tuple[int, ...], count: int) -> None:
    """Of a tensor of this shape, whose values lie between `least` and `most`."""
    for value in (least, most):
        _check_class(value, count, "`targets`")
    if len(shape) == 2 and shape[1] == count > 2 and most <= 1:
        raise ValueError(
            f"`targets` (shape {shape}, of 0 and 1) must be class indices, and look one-hot: use "
            "targets.argmax(1)."
        )


def _check_class(value: int, count: int, called: str) -> None:
    if not 0 <= value < count:
        raise ValueError(f"{called} (={value}) must be from 0 to {count - 1}: {count} classes.")
