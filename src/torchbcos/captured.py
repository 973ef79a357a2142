"""Many launches as one CUDA graph: small networks spend their time on launches otherwise."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import zip_longest
from typing import TypeVar

import torch
from torch import Tensor

__all__ = ["as_graph", "capture"]

T = TypeVar("T")


def capture(
    update: Callable[[Tensor, Tensor], T],
    images: Tensor,
    labels: Tensor,
    tensors: Sequence[Tensor],
    optimiser: torch.optim.Optimizer,
) -> Callable[[Tensor, Tensor], T]:
    """`update` for batches of the shape of these; all that it changed meanwhile is put back.

    `tensors` are those it changes, besides the state of the optimiser, which may still be empty and
    must be `capturable`. What it returns is overwritten by the next call.
    """

    def changed() -> list[Tensor]:
        state = [v for own in optimiser.state.values() for v in own.values()]
        return [*tensors, *(v for v in state if isinstance(v, Tensor))]

    images, labels = images.clone(memory_format=torch.preserve_format), labels.clone()
    kept = [t.detach().clone() for t in changed()]
    replay = as_graph(update, images, labels)
    for tensor, value in zip_longest(changed(), kept):  # what the optimiser made meanwhile is 0
        tensor.detach().copy_(value if value is not None else torch.zeros_like(tensor))
    return replay


def as_graph(function: Callable[..., T], *inputs: Tensor) -> Callable[..., T]:
    """`function` for tensors of the shapes of `inputs`; each call overwrites these and its result.

    What runs must not depend on values. It is called four times here, with `inputs`.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with _without_collection(), torch.cuda.graph(graph):
        result = function(*inputs)

    @wraps(function)  # and keep it: the graph reads what belongs to it
    def replay(*new: Tensor) -> T:
        for tensor, value in zip(inputs, new, strict=True):
            tensor.copy_(value, non_blocking=True)
        graph.replay()
        return result

    return replay


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage is collected meanwhile: another graph may be among it, as that of a training that
    has ended, and a capture fails when one is destroyed.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
