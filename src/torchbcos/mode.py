"""Explanation mode: what is held constant in it, what is set apart, and what is kept for later."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ContextDecorator, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

__all__ = [
    "FactorTape",
    "add_offset",
    "collect_offsets",
    "explanation_mode",
    "gate",
    "hold",
    "holder",
    "in_explanation_mode",
    "offset",
    "record_factors",
    "replay_factors",
]

_depth: ContextVar[int] = ContextVar("torchbcos_depth", default=0)  # of explanation modes
_offsets: ContextVar[list[Tensor] | None] = ContextVar("torchbcos_offsets", default=None)
_tape: ContextVar[FactorTape | None] = ContextVar("torchbcos_tape", default=None)
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])


# Compiled code recompiles when a context variable changes, in versions of torch that know how to
# look at one (2.10 and 2.11 do not). In others it looks at `_entered`, which is the same for all
# threads: there, do not run compiled models in one thread while another explains.
def _dynamo_reads_contexts() -> bool:
    source = Path(torch.__file__).parent / "_dynamo" / "source.py"
    try:
        return "ContextVarGetSource" in source.read_text(encoding="utf-8")
    except OSError:  # torch came without its sources, as in a frozen application
        return False


_DYNAMO_READS_CONTEXTS = _dynamo_reads_contexts()


class _Entered:
    """How many explanation modes are entered now, in any thread."""

    def __init__(self) -> None:
        self.times = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.times += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.times -= 1


class _Uncompiled:
    """Nothing runs compiled in here, nor meanwhile in other threads, where compiled code could not
    look at the context's variables.
    """

    def __init__(self) -> None:
        self._times, self._lock = 0, threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._times += 1
            if self._times == 1 and not _DYNAMO_READS_CONTEXTS:
                self._stance = torch.compiler.set_stance("force_eager")

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._times -= 1
            if self._times == 0 and not _DYNAMO_READS_CONTEXTS:
                self._stance.__exit__(None, None, None)


_entered, _uncompiled = _Entered(), _Uncompiled()


class explanation_mode(ContextDecorator):  # noqa: N801 (a function to those who call it)
    """Inside this context the gradient of an output by the input is its row of W(x).

    Every factor that depends on the input and multiplies a signal (|cos|^(b-1), the deviation a
    norm divides by) is held constant in the backward pass of whatever is computed here. Values do
    not change, no module is touched, and the mode is local to the thread or task that entered it.
    Enter it outside of a compiled function, not within. Where a part is checkpointed, it is run
    again for its gradients, which must then be taken inside the context too.

    >>> import torchbcos
    >>> x = torch.tensor([[3.0, 4.0]], requires_grad=True)
    >>> with explanation_mode():
    ...     y = torchbcos.functional.bcos_linear(x, torch.tensor([[1.0, 0.0]]))
    >>> torch.autograd.grad(y, x)     # |cos| · ŵ
    (tensor([[0.6000, 0.0000]]),)
    """

    # Modes are counted, because generators that hold one may end in any order and anywhere.

    def __enter__(self) -> None:
        _entered.__enter__()
        _depth.set(_depth.get() + 1)

    def __exit__(self, *_: object) -> None:
        _depth.set(max(_depth.get() - 1, 0))
        _entered.__exit__()

    def __call__(self, func: F) -> F:
        kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction)
        if any(is_kind(func) for is_kind in (*kinds, inspect.isasyncgenfunction)):
            raise TypeError(
                f"`func` (={func.__qualname__}) must be an ordinary function: what it returns runs "
                "later, so write `with explanation_mode():` inside of it."
            )
        return super().__call__(func)


def in_explanation_mode() -> bool:
    """Whether this runs within `explanation_mode`."""
    if _DYNAMO_READS_CONTEXTS or not torch.compiler.is_compiling():
        return _depth.get() > 0
    return _entered.times > 0


def hold(factor: Tensor) -> Tensor:
    """`factor`, constant for derivatives in `explanation_mode`, unchanged outside of it."""
    if not in_explanation_mode():
        return factor
    tape = _tape_here()
    if tape is None:
        return factor.detach()
    if tape.replayed is not None:
        recorded = next(tape.replayed, None)
        if recorded is None:
            raise RuntimeError(
                "a part of the network ran again in the backward pass, as with checkpointing, and "
                "its factors are held no more: explain it without."
            )
        return recorded
    tape.factors.append(factor)
    return factor


def holder() -> Callable[[Tensor], Tensor] | None:
    """What `hold` does here: nothing, a detach, or the tape's part."""
    if not in_explanation_mode():
        return None
    return hold if _tape_here() is not None else Tensor.detach


@dataclass
class FactorTape:
    """The factors of one forward pass, in order; see `record_factors`."""

    depth: int  # a mode that is entered within is not of this pass
    factors: list[Tensor] = field(default_factory=list)
    replayed: Iterator[Tensor] | None = None


@contextmanager
def record_factors() -> Iterator[FactorTape]:
    """Keep every factor that a forward pass meets, as a differentiable function of its inputs.

    With `replay_factors` this makes W(x) itself differentiable: held constant for the derivative
    that gives W(x), and yet exact in the next one, by the weights.
    """
    tape = FactorTape(_depth.get() + 1)
    with explanation_mode(), _set(_tape, tape):
        yield tape


@contextmanager
def replay_factors(tape: FactorTape) -> Iterator[list[Tensor]]:
    """`collect_offsets`, with the recorded factors in place of those of this forward pass."""
    replay = FactorTape(_depth.get() + 1, tape.factors, iter(tape.factors))
    with collect_offsets() as offsets, _set(_tape, replay):
        yield offsets


def _tape_here() -> FactorTape | None:
    tape = _local(_tape)
    return tape if tape is not None and tape.depth == _depth.get() else None


def _local(variable: ContextVar[T | None]) -> T | None:
    """The value here, or None in code that is compiled without being able to look."""
    if _DYNAMO_READS_CONTEXTS or not torch.compiler.is_compiling():
        return variable.get()
    return None


@contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    before = variable.get()
    variable.set(value)
    try:
        yield
    finally:
        variable.set(before)  # a token would not do: what ends may run in another context


@contextmanager
def collect_offsets() -> Iterator[list[Tensor]]:
    """Explanation mode that also lists every offset added on the way (see `add_offset`)."""
    offsets: list[Tensor] = []
    with explanation_mode(), _uncompiled, _set(_offsets, offsets):
        yield offsets


def offset(value: Tensor) -> Tensor:  # [N, …]
    """`value`, marked as a term that no input pixel owns: a norm's bias, a position embedding.

    An explanation needs these terms apart from W(x)·x; all of them pass through here.
    """
    collected = _local(_offsets)
    if collected is not None:
        # A tensor of its own, so that its derivative counts this use alone.
        value = value.view_as(value) if value.requires_grad else value.detach()
        if torch.is_grad_enabled():
            value.requires_grad_()
        collected.append(value)
    return value


def add_offset(x: Tensor, value: Tensor | float) -> Tensor:
    """x + value, for an `offset`; `value` broadcasts."""
    if _local(_offsets) is None:
        return x + value
    # One copy for each image, so that the derivatives tell the images apart.
    value = torch.as_tensor(value, dtype=torch.result_type(x, value), device=x.device)
    value = value.reshape((1,) * (x.dim() - value.dim()) + value.shape)
    return x + offset(value.expand(x.shape[0], *value.shape[1:]))


def gate(x: Tensor, factor: Tensor) -> Tensor:
    """x · factor, for a factor that depends on the input too: `hold` keeps it constant."""
    return x * hold(factor)
