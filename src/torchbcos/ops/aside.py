"""Gradients of weights beside the rest of a backward pass, on a stream of their own.

A layer's gradient by its weights is needed by no other layer. In small networks a kernel leaves
much of a GPU idle, so that it can be computed while the pass goes on through the layers before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["Aside", "current", "weight_gradients_aside"]

AHEAD = 4  # layers; so many keep the tensors that their weights' gradients are computed from


class Aside:
    """A second stream, and what the work on it still reads."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._reading: deque[tuple[torch.cuda.Event, tuple[Tensor, ...]]] = deque()
        self._seen: set[int] = set()

    def run(self, weight: Tensor, work: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """`work(*tensors)`, a gradient by `weight`, after what was started so far, and beside what
        is started from now on.

        The tensors are kept until it is done: their memory could be given to others otherwise. A
        second gradient by the same weight is waited for, because autograd adds it to the first.
        """
        if len(self._reading) == AHEAD:
            done, _ = self._reading.popleft()
            done.wait()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            result = work(*tensors)
            self._reading.append((self._stream.record_event(), tensors))
        if weight.data_ptr() in self._seen:
            self.join()
        self._seen.add(weight.data_ptr())
        return result

    def join(self) -> None:
        """Let what is started from now on wait for all of it."""
        if not self._seen:  # a graph that is being captured may not wait for what is not in it
            return
        torch.cuda.current_stream().wait_stream(self._stream)
        self._reading.clear()


_current: Aside | None = None


def current() -> Aside | None:
    """Where the gradients of weights belong; None for no such place."""
    return _current


@contextmanager
def weight_gradients_aside() -> Iterator[None]:
    """For one backward pass to weights without hooks whose `grad` is None: until it has ended,
    nothing else may read the gradients of those that are leaves.
    """
    global _current
    before, _current = _current, Aside()
    try:
        yield
        _current.join()
    finally:
        _current = before
