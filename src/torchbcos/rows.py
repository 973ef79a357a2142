"""Rows of W(x) by backward passes, and what offsets add beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Room", "check_images_first", "rows_and_bias"]


class Room:
    """For the rows of all images: chunk after chunk is put there, as joining them takes room for
    as many again.
    """

    rows: Tensor  # [N, K, C, H, W]

    def __init__(self, count: int) -> None:
        self.count, self.filled = count, 0

    def of_chunk(self, x: Tensor, targets: int) -> Tensor:
        if not self.filled:
            self.rows = x.new_empty(self.count, targets, *x.shape[1:])
        start = self.filled
        self.filled += len(x)
        return self.rows[start : self.filled]


def rows_and_bias(
    values: Tensor,
    x: Tensor,
    offsets: Sequence[Tensor],
    place: Tensor | None = None,
    create_graph: bool = False,
    check: Callable[..., None] = lambda *_: None,
) -> tuple[Tensor, Tensor]:
    """Rows of W(x), [N, K, C, H, W], in `place` if given, and the offsets' share of each value,
    [N, K]; `check_images_first` is a `check` of the offsets.

    Images do not mix, so one backward pass gives a row for each image of the batch.
    """
    rows, biases = [], []
    wide = torch.promote_types(x.dtype, torch.float32)
    for k, column in enumerate(values.unbind(1)):
        # fmt: off
        grads = torch.autograd.grad(column.sum(), [x, *offsets], retain_graph=True,
                                    create_graph=create_graph, allow_unused=True)
        # fmt: on
        if k == 0:
            check(column, offsets, grads[1:])
        row = torch.zeros_like(x) if grads[0] is None else grads[0]
        rows.append(row if place is None else place[:, k].copy_(row))
        bias = torch.zeros(x.shape[0], dtype=wide, device=x.device)
        for grad, offset in zip(grads[1:], offsets, strict=True):
            if grad is not None:
                own = offset if create_graph else offset.detach()
                bias = bias + (grad.to(wide) * own.to(wide)).reshape(x.shape[0], -1).sum(1)
        biases.append(bias)
    return torch.stack(rows, 1) if place is None else place, torch.stack(biases, 1)


def check_images_first(
    values: Tensor, offsets: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> None:
    """Refuse offsets in which images are not the first dimension, or blocks of it as windows are.

    `values` are [N], and `grads` the derivatives of their sum by the offsets. In the last image's
    block those of its own value must be the same, and 0 elsewhere.
    """
    n = max(1, len(values))
    if all(len(offset) % n == 0 for offset in offsets):
        doubtful = [i for i, o in enumerate(offsets) if n > 1 and (len(o) != n or o.dim() == 3)]
        if not doubtful:
            return
        chosen = [offsets[i] for i in doubtful]
        alone = torch.autograd.grad(values[-1], chosen, retain_graph=True, allow_unused=True)
        pairs = zip(alone, (grads[i] for i in doubtful), strict=True)
        if all(a is None or b is None or _only_in_the_last(a, b, n) for a, b in pairs):
            return
    raise ValueError(
        "`model` adds an offset, as the bias of a norm is, where images are not the first "
        "dimension, so that they cannot be told apart: let images come first there."
    )


def _only_in_the_last(alone: Tensor, together: Tensor, n: int) -> bool:
    expected = together.detach().clone()
    expected[: len(expected) // n * (n - 1)] = 0
    slack = 1e-2 * float(expected.abs().amax())  # half precision rounds
    return torch.allclose(alone, expected, rtol=0, atol=slack)
