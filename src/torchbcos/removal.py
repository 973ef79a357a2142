"""Deletion and insertion: how the output falls, or rises, as pixels go in the order of a map."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchbcos.posthoc.subject import Subject, probabilities
from torchbcos.targets import Targets
from torchbcos.undisturbed import keeping_buffers

__all__ = ["RemovalCurve", "removal_curve"]


@dataclass(frozen=True)
class RemovalCurve:
    """The target's probability with more and more pixels gone (deletion) or there (insertion)."""

    fractions: Tensor  # [S] of all pixels, from 0 to 1
    probabilities: Tensor  # [N, K, S]

    @property
    def area(self) -> Tensor:
        """[N, K], trapezoids: small is good for deletion, large for insertion."""
        return torch.trapezoid(self.probabilities, self.fractions, dim=-1)


@keeping_buffers
@torch.no_grad()
def removal_curve(
    model: nn.Module,
    images: Tensor,
    attributions: Tensor,  # [N, K, H, W]
    targets: Targets = None,
    *,
    mode: str = "deletion",
    least_first: bool = False,
    steps: int = 50,
    fill: float | Tensor = 0.0,
    chunk: int = 16,
) -> RemovalCurve:
    """The curve of each image and target, over `steps` equal shares of the pixels.

    Pixels go (or come) in the order of their attribution, largest first, or smallest first with
    `least_first`; among equals the upper left goes first. What is gone has the value `fill`, a
    number or images: in the network's own input, where for a B-cos model 0 is no signal at all.
    """
    if mode not in ("deletion", "insertion"):
        raise ValueError(f"`mode` (={mode!r}) must be 'deletion' or 'insertion'.")
    pixels = images.shape[-2] * images.shape[-1]
    if not 1 <= steps <= pixels:
        raise ValueError(f"`steps` (={steps}) must be from 1 to the {pixels} pixels of an image.")
    subject = Subject.of(model, images, targets)
    if attributions.shape != (*subject.targets.shape, *images.shape[-2:]):
        raise ValueError(
            f"`attributions` (shape {tuple(attributions.shape)}) must be "
            f"{(*subject.targets.shape, *images.shape[-2:])}: a map for each image and target."
        )
    if not bool(torch.isfinite(attributions).all()):
        raise ValueError("`attributions` hold values that are not finite: leave such maps out.")
    blank = torch.as_tensor(fill, dtype=subject.x.dtype, device=subject.x.device)
    blank = blank.expand_as(subject.x)
    counts = torch.linspace(0, pixels, steps + 1, device=images.device).round()  # [S]
    flat = attributions.detach().flatten(2)
    order = flat.argsort(dim=2, descending=not least_first, stable=True)
    rank = torch.empty_like(order).scatter_(
        2, order, torch.arange(pixels, device=order.device).expand_as(order)
    )
    found = torch.empty(*subject.targets.shape, len(counts), device=images.device)
    for i, k in torch.cartesian_prod(*map(torch.arange, subject.targets.shape)).tolist():
        place = rank[i, k].view(images.shape[-2:])
        values = []
        for part in counts.split(chunk):
            taken = place < part[:, None, None]  # [chunk, H, W]
            there = ~taken if mode == "deletion" else taken
            x = torch.where(there[:, None], subject.x[i], blank[i])
            p = probabilities(model, subject.logits(x))
            values.append(p[:, subject.targets[i, k]])
        found[i, k] = torch.cat(values)
    return RemovalCurve(counts / pixels, found)
