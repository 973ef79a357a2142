"""Where the head of a network begins: the last features that still have a place in the image."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchbcos.explain import logits_of
from torchbcos.layers import BcosLayer

__all__ = ["Head", "find_head"]

_PASSING = (
    nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Dropout, nn.Dropout2d, nn.Identity, nn.Flatten,
)  # fmt: skip


@dataclass(frozen=True)
class Head:
    """The head's input is the input or output of one call of one submodule."""

    layer: str
    side: str  # "input" or "output"
    call: int  # the module's how-manieth call in a forward pass, from 0

    @contextmanager
    def watched(
        self, model: nn.Module, replace: Callable[[Tensor], Tensor] | None = None
    ) -> Iterator[list[Tensor]]:
        """Collect the features of each forward pass, or put `replace(features)` in their place."""
        seen: list[Tensor] = []
        calls = 0

        def take(value: Tensor) -> Tensor | None:
            nonlocal calls
            calls += 1
            if calls - 1 != self.call:
                return None
            seen.append(value)
            return None if replace is None else replace(value)

        module = model.get_submodule(self.layer)
        if self.side == "input":
            hook = module.register_forward_pre_hook(lambda _, given: take(given[0]))
        else:
            hook = module.register_forward_hook(lambda _, __, out: take(out))
        try:
            yield seen
        finally:
            hook.remove()


@torch.no_grad()
def find_head(model: nn.Module, x: Tensor, layer: str | None = None) -> Head:
    """Look at one forward pass of `x`, the network's input; `layer` is taken as it is."""
    calls: list[tuple[str, nn.Module, Tensor, Tensor]] = []
    hooks = []
    for name, module in model.named_modules():
        leaf = isinstance(module, BcosLayer) or next(module.children(), None) is None
        if leaf or (name and name == layer):
            hooks.append(module.register_forward_hook(_noting(calls, name)))
    try:
        logits_of(model, x)
    finally:
        for hook in hooks:
            hook.remove()

    def head(index: int, side: str) -> Head:
        name = calls[index][0]
        return Head(name, side, sum(c[0] == name for c in calls[:index]))

    if layer is not None:
        found = [i for i, c in enumerate(calls) if c[0] == layer]
        if not found or not _has_places(calls[found[-1]][3]):
            raise ValueError(
                f"`layer` (={layer!r}) must be a submodule of the network with an output "
                f"[N, C, H, W], such as {_last_places(calls)}."
            )
        return head(found[-1], "output")
    learned = [i for i, c in enumerate(calls) if next(c[1].parameters(), None) is not None]
    if learned and _has_places(calls[learned[-1]][2]):
        return head(learned[-1], "input")  # a classifier before the global pool
    for i in reversed(range(len(calls))):
        if _has_places(calls[i][3]) and not isinstance(calls[i][1], _PASSING):
            return head(i, "output")
    raise ValueError(
        "`model` has no layer with an output [N, C, H, W] of more than one position: GradCAM and "
        "DiPart need one; give a larger image."
    )


def _noting(calls: list[tuple[str, nn.Module, Tensor, Tensor]], name: str) -> Any:
    def note(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        if given and isinstance(given[0], Tensor) and isinstance(out, Tensor):
            calls.append((name, module, given[0], out))

    return note


def _has_places(value: Tensor) -> bool:
    return value.dim() == 4 and value.shape[-2] * value.shape[-1] > 1


def _last_places(calls: list[tuple[str, nn.Module, Tensor, Tensor]]) -> str:
    return next((c[0] for c in reversed(calls) if _has_places(c[3])), "none here")
