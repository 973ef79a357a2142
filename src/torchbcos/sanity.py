"""Sanity checks (Adebayo et al., NeurIPS 2018): does a map depend on what the model has learnt?

A map that stays the same when the weights become random, or when the labels it learnt were random,
shows the image and not the model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchbcos.targets import Targets
from torchbcos.undisturbed import looks_at_batch, undisturbed

__all__ = ["Randomised", "label_randomisation", "parameter_randomisation", "rank_correlation"]


@dataclass(frozen=True)
class Randomised:
    """How alike the maps are after everything from the output down to `layer` became random."""

    layer: str
    signed: float  # Spearman's correlation of the maps, mean over images and targets
    absolute: float  # … of their absolute values


def parameter_randomisation(
    method: Callable[[nn.Module, Tensor, Targets], Tensor],
    model: nn.Module,
    images: Tensor,
    targets: Targets = None,
    *,
    cascading: bool = True,
    seed: int = 0,
) -> list[Randomised]:
    """Make layer after layer random, from the output to the input, and compare the maps.

    With `cascading=False` each layer alone is random. The model itself is not touched. Name
    `targets`, else each random model explains its own prediction.
    """
    before = method(model, images, targets)
    names = _in_order_of_use(model, images)
    changed = copy.deepcopy(model)
    found = []
    devices = [before.device] if before.is_cuda else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        for name in reversed(names):
            if not cascading:
                changed = copy.deepcopy(model)
            _randomise(changed.get_submodule(name))
            found.append(_compared(name, before, method(changed, images, targets)))
    return found


@torch.no_grad()
def _in_order_of_use(model: nn.Module, images: Tensor) -> list[str]:
    """The modules with parameters of their own; those that are not called lie before all others."""
    names = {
        m: name
        for name, m in model.named_modules()
        if next(m.parameters(recurse=False), None) is not None
    }
    met: dict[str, None] = {}
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model, images.device))
        for m in names:
            hook = m.register_forward_pre_hook(lambda m, _: met.setdefault(names[m]))
            stack.enter_context(hook)
        model(images[:1] if not looks_at_batch(model) else images)
    return [name for name in names.values() if name not in met] + list(met)


def label_randomisation(
    method: Callable[[nn.Module, Tensor, Targets], Tensor],
    model: nn.Module,
    random_model: nn.Module,
    images: Tensor,
    targets: Targets = None,
) -> Randomised:
    """Compare the maps of a model and of one that was trained on shuffled labels."""
    maps = [method(m, images, targets) for m in (model, random_model)]
    return _compared("labels", maps[0], maps[1])


def rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman's, of maps [..., H, W] pixel by pixel; equal values share their mean rank.

    A map of one value only has no order, and its correlation is 0.
    """
    ranks = [_ranks(v.detach().flatten(-2).double()) for v in (a, b)]
    first, second = (r - r.mean(-1, keepdim=True) for r in ranks)
    length = first.norm(dim=-1) * second.norm(dim=-1)
    return torch.where(length > 0, (first * second).sum(-1) / length.clamp(min=1e-300), 0.0)


def _compared(layer: str, before: Tensor, after: Tensor) -> Randomised:
    signed = rank_correlation(before, after).mean().item()
    absolute = rank_correlation(before.abs(), after.abs()).mean().item()
    return Randomised(layer, signed, absolute)


def _ranks(values: Tensor) -> Tensor:
    ordered = values.sort(dim=-1).values.contiguous()
    below = torch.searchsorted(ordered, values.contiguous(), right=False)
    upto = torch.searchsorted(ordered, values.contiguous(), right=True)
    return (below + upto - 1).double() / 2


@torch.no_grad()
def _randomise(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
        return
    for parameter in module.parameters(recurse=False):
        parameter.normal_(std=parameter.float().std(unbiased=False).item() or 1.0)
