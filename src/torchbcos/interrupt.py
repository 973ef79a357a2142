"""Let a process that is told to end finish what it is doing first."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["told_to_end"]


@contextmanager
def told_to_end() -> Iterator[Callable[[], bool]]:
    """Ask the yielded function whether SIGTERM or Ctrl-C came; the step in progress is finished."""
    asked: list[int] = []
    before = {}
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            before[number] = signal.signal(number, lambda n, _: asked.append(n))
    except ValueError:  # not in the main thread, where no handler can be set
        pass
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
