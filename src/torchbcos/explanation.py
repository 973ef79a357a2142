"""The object that explaining hands over to everything that shows, stores or scores it."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

__all__ = ["Explanation"]


@dataclass(frozen=True, eq=False)  # tensors know no one answer
class Explanation:
    """What `explain` found, for N images and K targets each: outputs = W(x)·x + bias + residual.

    >>> import torchbcos as tb
    >>> e = tb.explain(tb.load("cifar10"), torch.rand(2, 3, 32, 32), ["cat", "dog"])
    >>> e.targets.tolist(), e.delta(0, 1).shape
    ([[3, 5], [3, 5]], torch.Size([2, 32, 32]))
    >>> len(e[1]), e.top(1).outputs.shape
    (1, torch.Size([2, 1]))
    """

    outputs: Tensor  # [N, K] the explained values: logits, or activations of inner units
    targets: Tensor  # [N, K] class indices; for inner units, the channel
    weights: Tensor  # [N, K, C, H, W] rows of W(x); C = 6 for colour images
    contributions: Tensor  # [N, K, H, W] W(x)·x at each pixel
    bias: Tensor  # [N, K] what no pixel owns: the logit bias, a norm's bias
    residual: Tensor  # [N, K] outputs − (Σ contributions + bias): rounding, if all is well
    positions: Tensor | None = None  # [N, K, 2] (y, x) of inner units on their map
    classes: tuple[str, ...] | None = None
    layer: str | None = None
    statistics: str = "running"  # what norms divided by: "running" or this "batch"'s own

    def __len__(self) -> int:
        return self.outputs.shape[0]

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> Explanation:
        """The explanations of some of the images; the batch dimension stays."""
        if not isinstance(index, slice | Sequence | Tensor | np.ndarray):
            index = operator.index(index)  # a TypeError for what is none
            if not -len(self) <= index < len(self):
                raise IndexError(f"`index` (={index}) is beyond {len(self)} images.")
            index = [index]
        if isinstance(index, tuple) or (isinstance(index, Tensor) and index.dim() != 1):
            raise TypeError(f"`index` (={index!r}) must pick images: a number, slice or list.")
        return self._each(lambda value: value[index])

    def delta(self, i: int, j: int) -> Tensor:
        """[N, H, W]: contributions to target i minus those to target j, pixel by pixel."""
        count = self.outputs.shape[1]
        for name, value in (("i", i), ("j", j)):
            if not -count <= value < count:
                raise IndexError(f"`{name}` (={value}) is beyond {count} targets.")
        return self.contributions[:, i] - self.contributions[:, j]

    def top(self, k: int) -> Explanation:
        """The k targets with the largest outputs of each image, largest first."""
        if not 1 <= k <= self.outputs.shape[1]:
            raise ValueError(f"`k` (={k}) must be from 1 to {self.outputs.shape[1]}, the targets.")
        order = self.outputs.topk(k, dim=1).indices  # [N, k]

        def pick(value: Tensor) -> Tensor:
            shape = (*order.shape, *(1,) * (value.dim() - 2))
            return value.gather(1, order.view(shape).expand(*order.shape, *value.shape[2:]))

        return self._each(pick)

    def to(self, *args: Any, **kwargs: Any) -> Explanation:
        """Every tensor moved as by `Tensor.to`; indices keep their integer type."""

        def move(value: Tensor) -> Tensor:
            moved = value.to(*args, **kwargs)
            return moved if value.is_floating_point() else moved.to(value.dtype)

        return self._each(move)

    def window(self, image: int = 0, target: int = 0) -> tuple[int, int, int, int]:
        """(top, left, bottom, right) of the smallest box outside of which W(x) is zero.

        As in slices, `bottom` and `right` are the first row and column beyond it. For an inner unit
        the box is its receptive field, cut at the image's border.
        """
        seen = (self.weights[image, target] != 0).any(0)
        if not seen.any():
            return 0, 0, seen.shape[0], seen.shape[1]
        ys, xs = (seen.any(d).nonzero().flatten() for d in (1, 0))
        return int(ys[0]), int(xs[0]), int(ys[-1]) + 1, int(xs[-1]) + 1

    def crop(self, image: int = 0, target: int = 0, size: int | None = None) -> Explanation:
        """The explanation of one unit, cut to its window, or to `size` pixels around its centre."""
        top, left, bottom, right = self.window(image, target)
        if size is not None:
            height, width = self.contributions.shape[-2:]
            if not 1 <= size <= min(height, width):
                raise ValueError(f"`size` (={size}) must be from 1 to {min(height, width)} pixels.")
            top = min(max((top + bottom - size) // 2, 0), height - size)
            left = min(max((left + right - size) // 2, 0), width - size)
            bottom, right = top + size, left + size
        one = self[image]._each(lambda value: value[:, target : target + 1 or None])
        return replace(
            one,
            weights=one.weights[..., top:bottom, left:right],
            contributions=one.contributions[..., top:bottom, left:right],
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to an .npz file, which `Explanation.load` and numpy read."""
        arrays = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                value = value.detach().cpu()
                arrays[field.name] = (
                    value.float() if value.dtype == torch.bfloat16 else value
                ).numpy()
            elif value is not None:
                arrays[field.name] = np.array(value)
        with Path(path).open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """What `save` wrote, on the CPU; other files are a ValueError."""
        try:
            # Opened here, because np.load leaves a damaged file open.
            with Path(path).open("rb") as file, np.load(file, allow_pickle=False) as stored:
                values = {name: _from_array(stored[name]) for name in stored.files}
            return cls(**values)
        except FileNotFoundError:
            raise
        except Exception as error:  # damaged archives raise nearly anything
            raise ValueError(f"{path} is no explanation that .save wrote: {error}") from error

    def _each(self, change: Callable[[Tensor], Tensor]) -> Explanation:
        tensors = {
            field.name: change(getattr(self, field.name))
            for field in fields(self)
            if isinstance(getattr(self, field.name), Tensor)
        }
        return replace(self, **tensors)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        n, k, channels, height, width = self.weights.shape
        what = f"layer {self.layer!r}" if self.layer is not None else "logits"
        text = (
            f"Explanation of {what}: {n} image{'s'[: n != 1]} × {k} target{'s'[: k != 1]}, W(x) of "
            f"{channels}×{height}×{width}"
        )
        if self.outputs.numel():
            scale = self.outputs.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny)
            miss = (self.residual.abs().amax() / scale).item()
            text += f", residual at most {miss:.1e} of the largest output"
        return text + ", norms as in training" * (self.statistics == "batch")


def _from_array(value: np.ndarray) -> Any:
    """A tensor, or text as Python has it."""
    if value.dtype.kind != "U":
        return torch.from_numpy(value)
    return tuple(value.tolist()) if value.ndim else str(value)
