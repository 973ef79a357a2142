"""Running a network so that nobody notices: its buffers and torch's random numbers stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import nn

__all__ = [
    "buffers_as_before",
    "generators_as_before",
    "keeping_buffers",
    "looks_at_batch",
    "undisturbed",
]

F = TypeVar("F", bound=Callable[..., Any])


def looks_at_batch(model: nn.Module) -> bool:
    """Whether any part of it is in training, or a norm has no statistics but a batch's own."""
    return any(
        (module.training and type(module) is not nn.Module)  # torch.fx's folders always are
        or (isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is None)
        for module in model.modules()
    )


def generators_as_before(device: torch.device) -> AbstractContextManager[None]:
    """What is drawn within is drawn again afterwards."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


@contextmanager
def buffers_as_before(model: nn.Module) -> Iterator[None]:
    """Statistics that torch's own norms keep in training are put back."""
    if not looks_at_batch(model):
        yield
        return
    buffers = [(b, b.clone()) for b in model.buffers()]
    try:
        yield
    finally:
        for buffer, before in buffers:
            if not torch.equal(buffer, before):
                buffer.data.copy_(before)  # unseen by what is still to be derived


def keeping_buffers(function: F) -> F:
    """`function(model, …)`, with `buffers_as_before`."""

    @wraps(function)
    def run(model: nn.Module, *arguments: Any, **options: Any) -> Any:
        with buffers_as_before(model):
            return function(model, *arguments, **options)

    return cast(F, run)


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Buffers and random numbers stay as before, where norms or dropout would change them."""
    if not looks_at_batch(model):
        yield
        return
    with buffers_as_before(model), generators_as_before(device):
        yield
