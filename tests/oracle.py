"""The B-cos transform as the paper writes it, in slow float64 loops that share no code with `src`.

One `Layer` is a linear layer (no spatial dimensions) or a convolution of any number of them: at
each position of the output a Python loop collects the patch pixel by pixel, and the formula is
applied to that vector. `Layer.matrix` is W̃(x) of eq. 12-14, so that products W̃_L…W̃_1 can be
formed with `@`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

# The claim: no entry is off by more than this part of the largest entry of the expected tensor.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 8e-3,
    torch.bfloat16: 6e-2,
}

# The claim for the peer: its own epsilons (1e-6 in a norm and in |c|) move no entry by more.
PEER_TOLERANCE = 1e-4


def array(x) -> np.ndarray:
    """Any tensor or array as float64."""
    if isinstance(x, torch.Tensor):
        return x.detach().double().cpu().numpy()
    return np.asarray(x, dtype=np.float64)


def assert_agrees(actual, expected, dtype=None, tolerance=None) -> None:
    """`actual` has the shape of `expected` and its values within the table."""
    tolerance = tolerance or TOLERANCE[dtype or actual.dtype]
    actual, expected = array(actual), array(expected)
    assert actual.shape == expected.shape, f"shape {actual.shape}, not {expected.shape}"
    off = np.abs(actual - expected).max(initial=0)
    largest = np.abs(expected).max(initial=0)
    assert off <= tolerance * largest, f"off by {off:.3g} where the largest entry is {largest:.3g}"


class Unit(NamedTuple):
    """What one number of the output is made of."""

    at: tuple[int, ...]  # its index in the output
    row: int  # of `weight`: the winner among the rows that compete for this output
    pixels: list[tuple[int, tuple[int, ...]]]  # where in the patch, where in the input
    patch: np.ndarray  # [in_channels / groups · taps], 0 in zero padding
    direction: np.ndarray  # ŵ; zeros for a row of zeros
    lin: float  # ŵᵀx
    norm: float  # ‖x‖, or √(‖x‖² + eps)

    @property
    def cos(self) -> float:
        return self.lin / self.norm if self.norm > 0 else 0.0


def source(i: int, size: int, padding_mode: str) -> int | None:
    """The pixel that stands at coordinate `i` of the padded line; None for a zero."""
    if 0 <= i < size:
        return i
    if padding_mode == "zeros":
        return None
    if padding_mode == "circular":
        return i % size
    if padding_mode == "replicate":
        return 0 if i < 0 else size - 1
    assert padding_mode == "reflect"
    return -i if i < 0 else 2 * (size - 1) - i


def per_dimension(value, dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value)


@dataclass(frozen=True)
class Layer:
    weight: object  # [out · max_out, in / groups, *kernel]
    stride: int | tuple[int, ...] = 1
    padding: str | int | tuple[int, ...] = 0
    dilation: int | tuple[int, ...] = 1
    groups: int = 1
    padding_mode: str = "zeros"
    b: float = 2.0
    max_out: int = 1
    scale: float = 1.0
    eps: float = 0.0  # added to the squared norm of a patch

    def __post_init__(self):
        weight = array(self.weight)
        kernel, dims = weight.shape[2:], weight.ndim - 2
        span = [
            d * (k - 1) for k, d in zip(kernel, per_dimension(self.dilation, dims), strict=True)
        ]
        if self.padding == "same":
            before = tuple(s // 2 for s in span)
            after = tuple(s - s // 2 for s in span)
        else:
            before = after = per_dimension(0 if self.padding == "valid" else self.padding, dims)
        derived = {"weight": weight, "kernel": kernel, "before": before, "after": after}
        derived |= {
            name: per_dimension(getattr(self, name), dims) for name in ("stride", "dilation")
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def positions(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """The spatial shape of the output."""
        return tuple(
            (n + before + after - d * (k - 1) - 1) // s + 1
            for n, before, after, k, s, d in zip(
                size, self.before, self.after, self.kernel, self.stride, self.dilation, strict=True
            )
        )

    def output_shape(self, x: np.ndarray) -> tuple[int, ...]:
        return (len(x), len(self.weight) // self.max_out, *self.positions(x.shape[2:]))

    def pixels(self, position: tuple[int, ...], size: tuple[int, ...], group: int):
        """(where in the patch, where in the image) for all taps but those in zero padding."""
        found, at = [], 0
        per_group = self.weight.shape[1]
        for channel in range(group * per_group, (group + 1) * per_group):
            for tap in itertools.product(*map(range, self.kernel)):
                coordinate = tuple(
                    source(o * s - before + t * d, n, self.padding_mode)
                    for o, s, before, t, d, n in zip(
                        position, self.stride, self.before, tap, self.dilation, size, strict=True
                    )
                )
                if None not in coordinate:
                    found.append((at, (channel, *coordinate)))
                at += 1
        return found

    def units(self, x: np.ndarray) -> Iterator[Unit]:
        """Every number of the output for `x` [N, in, *size], one after the other."""
        size = x.shape[2:]
        rows = self.weight.reshape(len(self.weight), -1)
        lengths = [math.sqrt(sum(v * v for v in row)) for row in rows]
        outputs = len(rows) // self.max_out
        for position in itertools.product(*map(range, self.positions(size))):
            for group in range(self.groups):
                pixels = self.pixels(position, size, group)
                for n in range(len(x)):
                    patch = np.zeros(rows.shape[1])
                    for at, coordinate in pixels:
                        patch[at] = x[(n, *coordinate)]
                    norm = math.sqrt(sum(patch * patch) + self.eps)
                    per_group = outputs // self.groups
                    for out in range(group * per_group, (group + 1) * per_group):
                        competing = range(out * self.max_out, (out + 1) * self.max_out)
                        directions = {r: rows[r] / (lengths[r] or 1.0) for r in competing}
                        lin = {r: float(sum(directions[r] * patch)) for r in competing}
                        row = max(competing, key=lin.get)
                        at = (n, out, *position)
                        yield Unit(at, row, pixels, patch, directions[row], lin[row], norm)

    def factor(self, unit: Unit) -> float:
        """scale · |cos|^(b-1): what multiplies ŵ in a row of W̃(x)."""
        return self.scale * (1.0 if self.b == 1 else abs(unit.cos) ** (self.b - 1))

    def forward(self, x) -> np.ndarray:
        x = array(x)
        out = np.zeros(self.output_shape(x))
        for unit in self.units(x):
            out[unit.at] = self.factor(unit) * unit.lin
        return out

    def gradients(self, x, grad_out, explain: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Of Σ grad_out · out, by the input and by the weight, from the derivatives of

        out = scale · |lin/norm|^(b-1) · lin; with `explain` |lin/norm|^(b-1) is a constant.
        """
        x, grad_out = array(x), array(grad_out)
        grad_x, grad_weight = np.zeros_like(x), np.zeros_like(self.weight)
        for unit in self.units(x):
            factor = self.factor(unit) * grad_out[unit.at]
            by_lin, by_norm = factor, 0.0
            if not explain:
                by_lin = self.b * factor
                by_norm = -(self.b - 1) * factor * unit.cos
            by_patch = by_lin * unit.direction
            if unit.norm > 0:
                by_patch = by_patch + by_norm * unit.patch / unit.norm
            for at, coordinate in unit.pixels:
                grad_x[(unit.at[0], *coordinate)] += by_patch[at]
            row = self.weight[unit.row]
            length = math.sqrt((row * row).sum()) or 1.0
            by_row = by_lin * (unit.patch - unit.lin * unit.direction) / length
            grad_weight[unit.row] += by_row.reshape(row.shape)
        return grad_x, grad_weight

    def matrix(self, x) -> np.ndarray:
        """W̃(x) for one input [in, *size]: [out.size, x.size]."""
        x = array(x)[None]
        shape = self.output_shape(x)
        matrix = np.zeros((*shape, *x.shape[1:]))
        for unit in self.units(x):
            for at, coordinate in unit.pixels:
                matrix[(*unit.at, *coordinate)] += self.factor(unit) * unit.direction[at]
        return matrix.reshape(math.prod(shape), x.size)


def average_pool_matrix(shape: tuple[int, ...], kernel: int, stride: int) -> np.ndarray:
    """The matrix of a 2-d average pool without padding on [C, H, W]."""
    channels, *size = shape
    out = [(n - kernel) // stride + 1 for n in size]
    matrix = np.zeros((channels, *out, *shape))
    for c, y, x in itertools.product(range(channels), *map(range, out)):
        for dy, dx in itertools.product(range(kernel), repeat=2):
            matrix[c, y, x, c, y * stride + dy, x * stride + dx] = 1 / kernel**2
    return matrix.reshape(-1, math.prod(shape))


def variances(x, set_of) -> np.ndarray:
    """For each entry of `x`, the variance (about the mean) of the set it is normalised with.

    `set_of(index)` names the set that the entry at `index` belongs to.
    """
    x = array(x)
    sets: dict[object, list[float]] = {}
    for index in np.ndindex(x.shape):
        sets.setdefault(set_of(index), []).append(float(x[index]))
    variance = {}
    for name, values in sets.items():
        mean = math.fsum(values) / len(values)
        variance[name] = math.fsum((v - mean) ** 2 for v in values) / len(values)
    out = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        out[index] = variance[set_of(index)]
    return out
