"""How far the classes of some images are from those of the whole set, and if that is chance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Skew", "adjusted", "chance", "divergence", "histogram"]

DRAWS = 99_999  # the smallest p-value is 1 / (DRAWS + 1)


@dataclass(frozen=True)
class Skew:
    """How unevenly the classes share the top images of each unit of a layer."""

    divergence: Tensor  # [C] in bits, from the classes of the whole set: 0 is none
    p: Tensor  # [C] how often as many images drawn blindly are as far from it, or farther
    q: Tensor  # [C] p, adjusted for the number of units (Benjamini and Hochberg)


def histogram(labels: Tensor, classes: int) -> Tensor:
    """[U, n] labels → [U, classes] counts."""
    counts = torch.zeros(len(labels), classes, dtype=torch.int64)
    return counts.scatter_add_(1, labels.long(), torch.ones_like(labels, dtype=torch.int64))


def divergence(counts: Tensor, whole: Tensor) -> Tensor:
    """KL(counts ‖ whole) in bits for each row of `counts` [U, K]; `whole` [K] counts the set.

    >>> divergence(torch.tensor([[2, 2], [4, 0]]), torch.tensor([50, 50]))
    tensor([0., 1.], dtype=torch.float64)
    """
    share = counts.double() / counts.sum(1, keepdim=True)
    times = share * (whole.sum().double() / whole.clamp(min=1))  # as frequent as in the set
    bits: Tensor = torch.xlogy(share, times).sum(1) / math.log(2)
    return bits


def chance(found: Tensor, size: int, whole: Tensor, draws: int = DRAWS, seed: int = 0) -> Tensor:
    """The p-value of each divergence `found` [U] among `size` images of the set `whole` [K].

    Nothing is assumed of the distribution: `size` images are drawn from the set without
    replacement, `draws` times, and those at least as far from it are counted. The same seed gives
    the same values.
    """
    random = np.random.default_rng(seed)
    colours = whole.numpy().astype(np.int64)
    null = []
    for start in range(0, draws, 4096):
        drawn = random.multivariate_hypergeometric(
            colours, size, size=min(4096, draws - start), method="count"
        )
        null.append(divergence(torch.from_numpy(drawn), whole))
    ordered = torch.cat(null).sort().values
    slack = 1e-9  # equal counts in another order differ by rounding
    beyond = draws - torch.searchsorted(ordered, found - slack)
    return (1 + beyond).double() / (1 + draws)


def adjusted(p: Tensor) -> Tensor:
    """P-values [U], for the number of tests: of units with q ≤ 0.05, 5% are there by chance.

    >>> adjusted(torch.tensor([0.01, 0.04, 0.03, 0.5]))
    tensor([0.0400, 0.0533, 0.0533, 0.5000])
    """
    order = p.argsort(descending=True)
    ranks = torch.arange(len(p), 0, -1)
    falling = (p[order] * len(p) / ranks).cummin(0).values
    return torch.empty_like(p).scatter_(0, order, falling)
