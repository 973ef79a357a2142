"""What `torchbcos bench` measures: the cases, their order, and a selection of them by words."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import product
from typing import Any

__all__ = ["Case", "Measurement", "select", "suite"]


@dataclass(frozen=True)
class Case:
    """What is measured."""

    way: str  # conventional, floor, pooled-floor, peer or ours; see `bench_networks`
    task: str  # training, inference or explanation
    arch: str = "resnet34"
    units: int = 1
    b: float = 2.0
    batch: int = 128
    size: int = 224
    targets: int = 1  # of an explanation
    mode: str = "eager"  # or compiled, or captured: a CUDA graph, as `torchbcos train` runs


@dataclass(frozen=True)
class Measurement:
    case: Case
    milliseconds: float  # median over groups of steps
    spread: float  # (largest - smallest) / median
    busy_milliseconds: float | None  # sum of the device's kernels; else it waits for the host
    peak_mib: float | None  # captured: all that stays reserved while the graph exists

    def words(self) -> str:
        c = self.case
        what = (
            f"{c.arch} {c.way:12} {c.task:11} {c.units} unit{'s' if c.units > 1 else ' '} B={c.b:g}"
        )
        setting = f"batch {c.batch:3} {c.size} px" + (
            f" {c.targets} targets" if c.targets > 1 else ""
        )
        memory = "" if self.peak_mib is None else f"  {self.peak_mib:8.0f} MiB"
        busy = "" if self.busy_milliseconds is None else f" (device {self.busy_milliseconds:.2f})"
        return f"{what} {setting} {c.mode}: {self.milliseconds:9.2f} ms{busy}{memory}"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self.case), **{k: v for k, v in asdict(self).items() if k != "case"}}


def suite(device: str) -> list[Case]:
    """What is compared, the most telling first; on a CPU only what takes minutes there."""
    ways = ("conventional", "floor", "pooled-floor", "ours")
    if device == "cpu":
        tasks = ("inference", "training")
        ways = ("conventional", "floor", "peer", "ours")
        cases = [Case(way, task, batch=8) for task in tasks for way in ways]
        return cases + [Case("ours", task, b=b, batch=8) for task in tasks for b in (1.5, 2.5)]
    dense = partial(Case, arch="densenet121", batch=64)
    vgg = partial(Case, arch="vgg11", batch=64)
    small = partial(Case, arch="cifar9", batch=64, size=32)
    networks: list[Callable[..., Case]] = [Case, dense, small, vgg]
    both = ("training", "inference")
    cases = [Case(w, "training", mode=mode) for mode in ("eager", "captured") for w in ways]
    cases += [Case(w, "training", units=2) for w in ("floor", "ours")]
    cases += [Case(w, "inference", mode=mode) for mode in ("eager", "captured") for w in ways]
    cases += [dense(w, "training") for w in ways]
    cases += [Case("ours", "inference", b=1.5), Case("ours", "training", b=1.5)]
    cases += [Case("ours", "inference", batch=256), Case("ours", "explanation", batch=256)]
    cases += [Case(w, "explanation", batch=1) for w in ("peer", "ours")]
    cases += [Case(w, "training", mode="compiled") for w in ("ours", "peer")]
    # All of these networks, captured and eager; what is listed above is not listed again.
    for network, task, mode in product(networks, both, ("captured", "eager")):
        cases += [network(w, task, mode=mode) for w in ways]
        cases += [network(w, task, mode=mode, units=2) for w in ("floor", "ours")]
    cases += [
        network("peer", task, units=u) for network, task, u in product(networks, both, (1, 2))
    ]
    cases += [Case("ours", task, b=b) for task, b in product(both, (1, 2.5))]
    for arch, task in product(("mobilenet_v2", "resnext50_32x4d"), both):
        cases += [Case(w, task, arch=arch, batch=64) for w in ways]  # groups of channels
    cases += [Case("ours", "training", batch=n) for n in (16, 32, 64, 256)]
    cases += [Case("ours", "training", batch=64, size=size) for size in (96, 160, 320)]
    cases += [Case("ours", "explanation", batch=64, targets=k) for k in (1, 2, 5, 10)]
    for network, task in product(networks, both):
        compiled = ("ours", "peer", "floor", "conventional")
        cases += [network(w, task, mode="compiled") for w in compiled]
    return [c for c in dict.fromkeys(cases) if (c.way, c.arch) != ("pooled-floor", "cifar9")]


def select(cases: Iterable[Case], words: str) -> list[Case]:
    """The cases that `words` name, separated by commas: values, or name=value for numbers.

    Words for the same property are alternatives, those for different ones must all hold.

    >>> [c.way for c in select(suite("cuda"), "resnet34,training,compiled")]
    ['ours', 'peer', 'floor', 'conventional']
    >>> {(c.way, c.units) for c in select(suite("cuda"), "ours,units=2")}
    {('ours', 2)}
    """
    cases = list(cases)
    values = {f.name: {_word(c, f.name) for c in cases} for f in fields(Case)}
    wanted: dict[str, set[str]] = {}
    for word in filter(None, (w.strip() for w in words.split(","))):
        name = next((n for n, known in values.items() if word in known), None)
        if name is None:
            every = sorted({w for known in values.values() for w in known})
            raise ValueError(f"`only` (={word!r}) must be made of these words: {', '.join(every)}.")
        wanted.setdefault(name, set()).add(word)
    chosen = [c for c in cases if all(_word(c, n) in these for n, these in wanted.items())]
    if not chosen:
        raise ValueError(f"`only` (={words!r}) must leave a case: no case is all of that.")
    return chosen


def _word(case: Case, name: str) -> str:
    value = getattr(case, name)
    return value if isinstance(value, str) else f"{name}={value:g}"
