"""Where the head of a network begins: the last features that still have a place in the image."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchbcos.explain import logits_of
from torchbcos.layers import BcosLayer
from torchbcos.undisturbed import buffers_as_before

__all__ = ["Head", "find_head"]

_PASSING = (
    nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Dropout, nn.Dropout2d, nn.Identity, nn.Flatten,
)  # fmt: skip
_PASSING_FUNCTIONS = (F.adaptive_avg_pool2d, F.adaptive_max_pool2d, F.dropout, F.dropout2d)


@dataclass(frozen=True)
class Head:
    """The head's input is the input or output of one call of a submodule, or a function's input."""

    layer: str | None  # None: functions that pool, outside of any layer
    side: str  # "input" or "output"
    call: int  # which call in a forward pass, counted from 0

    @contextmanager
    def watched(
        self, model: nn.Module, change: Callable[[Tensor], Tensor] | None = None
    ) -> Iterator[list[Tensor]]:
        """Collect the features of each forward pass, or put `change(features)` in their place."""
        seen: list[Tensor] = []
        calls = 0

        def take(value: Tensor, _: Tensor | None = None) -> Tensor | None:
            nonlocal calls
            calls += 1
            if calls - 1 != self.call:
                return None
            seen.append(value)
            return None if change is None else change(value)

        if self.layer is None:
            with _pooling_functions(model, take):
                yield seen
            return
        module = model.get_submodule(self.layer)
        if self.side == "input":
            hook = module.register_forward_pre_hook(lambda _, given: take(given[0]))
        else:
            hook = module.register_forward_hook(lambda _, __, out: take(out))
        with hook:
            yield seen


class _Call(NamedTuple):
    layer: str | None  # None: a function that pools
    module: nn.Module | None
    given: Tensor
    out: Tensor

    @property
    def pools(self) -> bool:
        """Whether its input still has places and is all that the head sees of them."""
        passes = self.module is None or isinstance(self.module, _PASSING)
        return _has_places(self.given) and (passes or not _has_places(self.out))


@torch.no_grad()
def find_head(model: nn.Module, x: Tensor, layer: str | None = None) -> Head:
    """Look at one forward pass of `x`, the network's input; `layer` is taken as it is.

    A network that was cut at its head has it as `head`, of the network `inner`.
    """
    known = getattr(model, "head", None)
    if layer is None and isinstance(known, Head):
        return known if known.layer is None else replace(known, layer=f"inner.{known.layer}")
    calls: list[_Call] = []

    def note(given: Tensor, out: Tensor) -> None:
        calls.append(_Call(None, None, given, out))

    with ExitStack() as stack:
        for name, module in model.named_modules():
            if _is_leaf(module) or (name and name == layer):
                stack.enter_context(module.register_forward_hook(_noting(calls, name)))
        stack.enter_context(_pooling_functions(model, note))
        stack.enter_context(buffers_as_before(model))
        logits_of(model, x)

    def head(index: int, side: str) -> Head:
        name = calls[index].layer
        return Head(name, side, sum(c.layer == name for c in calls[:index]))

    if layer is not None:
        found = [i for i, c in enumerate(calls) if c.layer == layer]
        if not found or not _has_places(calls[found[-1]].out):
            raise ValueError(
                f"`layer` (={layer!r}) must be a submodule of the network with an output "
                f"[N, C, H, W], such as {_last_places(calls)}."
            )
        return head(found[-1], "output")
    learned = [
        i for i, c in enumerate(calls) if c.module and next(c.module.parameters(), None) is not None
    ]
    if learned and _has_places(calls[learned[-1]].given):
        return head(learned[-1], "input")  # a classifier before the global pool
    pools = [i for i, c in enumerate(calls) if c.pools]
    if pools:
        first = pools.pop()
        for i in reversed(pools):  # such as a pool to 7×7 before the one that flattens
            first = i if calls[i].out is calls[first].given else first
        if calls[first].given is not x:
            return head(first, "input")
    raise ValueError(
        "`model` has no layer with an output [N, C, H, W] of more than one position: GradCAM and "
        "DiPart need one; give a larger image."
    )


@contextmanager
def _pooling_functions(
    model: nn.Module, take: Callable[[Tensor, Tensor], Tensor | None]
) -> Iterator[None]:
    """Tell `take` what goes into and comes out of functions that pool, outside of all layers.

    Where it answers with a tensor, that goes into the function instead.
    """
    watch = _Watch(take)
    with ExitStack() as stack:
        for module in filter(_is_leaf, model.modules()):
            stack.enter_context(module.register_forward_pre_hook(lambda *_: watch.go(1)))
            stack.enter_context(module.register_forward_hook(lambda *_: watch.go(-1)))
        stack.enter_context(watch)
        yield


class _Watch(TorchFunctionMode):
    def __init__(self, take: Callable[[Tensor, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.take = take
        self.depth = 0  # how many layers the forward pass is inside of

    def go(self, deeper: int) -> None:
        self.depth += deeper

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given = args[0] if args else None
        if self.depth > 0 or not isinstance(given, Tensor) or not isinstance(out, Tensor):
            return out
        if not _has_places(given) or (_has_places(out) and function not in _PASSING_FUNCTIONS):
            return out
        changed = self.take(given, out)
        if changed is None:
            return out
        with torch._C.DisableTorchFunction():  # for others that watch it is one call
            return function(changed, *args[1:], **(kwargs or {}))


def _is_leaf(module: nn.Module) -> bool:
    return isinstance(module, BcosLayer) or next(module.children(), None) is None


def _noting(calls: list[_Call], name: str) -> Any:
    def note(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        if given and isinstance(given[0], Tensor) and isinstance(out, Tensor):
            calls.append(_Call(name, module, given[0], out))

    return note


def _has_places(value: Tensor) -> bool:
    return value.dim() == 4 and value.shape[-2] * value.shape[-1] > 1


def _last_places(calls: list[_Call]) -> str:
    names = [c.layer for c in calls if c.layer and _has_places(c.out)]
    return names[-1] if names else "none here"
