"""Time and memory of B-cos networks beside the networks they replace, measured in one run.

`bench_networks` says which networks, `bench_cases` what of them is measured.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchbcos import functional
from torchbcos._arguments import check_device
from torchbcos._cuda import cuda_settings
from torchbcos._version import __version__
from torchbcos.bench_cases import Case, Measurement
from torchbcos.bench_networks import CLASSES, build
from torchbcos.captured import as_graph
from torchbcos.checkpoint import write_atomically
from torchbcos.evidence import commit, device_name
from torchbcos.explain import explain

__all__ = ["BenchError", "Results", "bench", "check_kernels", "evidence"]

PROFILED = 3  # steps whose kernels are timed
GROUPS = 5  # of steps, of whose mean times the median counts


class BenchError(RuntimeError):
    """The kernels are wrong here, so their speed says nothing."""


def bench(
    cases: list[Case],
    device: torch.device | str,
    dtype: torch.dtype,
    seconds: float = 0.5,
    missing: Callable[[str], None] = lambda _: None,
) -> Iterator[Measurement]:
    """Time and memory of each case; the kernels are checked before.

    A case whose package is not installed is left out, and `missing` is told that package.
    On a CPU, whose speed drifts, cases take turns, so that all come at the end. On a GPU they are
    measured one after the other, which tells their memory, and each comes a second time, with the
    device's own time. That needs torch's profiler, which slows down all later launches of the
    process it ran in: after it, no clock runs.
    """
    device = torch.device(device)
    check_kernels(device, compiled=any(case.mode == "compiled" for case in cases))
    if device.type != "cuda":
        yield from _in_turns(dict(_steps(cases, device, dtype, missing)), seconds)
        return
    timed: dict[Case, Measurement] = {}
    with cuda_settings(benchmark=True):
        for case, step in _steps(cases, device, dtype, missing):
            timed[case] = _measure(case, step, seconds)
            del step  # before the next one is made
            yield timed[case]
        for case, step in _steps(timed, device, dtype, missing):
            found = replace(timed[case], busy_milliseconds=round(_busy(step), 3))
            del step
            yield found


def _steps(
    cases: Iterable[Case],
    device: torch.device,
    dtype: torch.dtype,
    missing: Callable[[str], None],
) -> Iterator[tuple[Case, Callable[[], Any]]]:
    """One step of each case, warmed up."""
    for case in cases:
        try:
            step = _step(case, device, dtype)
        except ImportError as error:  # the peer is not installed
            missing(error.name or str(error))
            continue
        for _ in range(3):
            step()
        yield case, step
        del step
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def check_kernels(device: torch.device, *, compiled: bool = False) -> None:
    """Layers here against the reference in float64, in both passes; raises where they differ.

    With `compiled`, what torch.compile makes of them as well.
    """
    ways = [functional.bcos_conv2d]
    if compiled:
        ways.append(torch.compile(functional.bcos_conv2d, fullgraph=True))
    for conv, (b, units, groups) in product(
        ways, ((1.5, 2, 1), (2.0, 1, 1), (2.0, 2, 1), (2.5, 1, 1), (1.5, 2, 4), (2.0, 1, 16))
    ):
        torch.manual_seed(0)
        x, w = torch.randn(4, 16, 17, 15), torch.randn(32 * units, 16 // groups, 3, 3)
        grad = torch.randn(4, 32, 9, 8)
        found = []
        for way, place, kind in (
            (conv, device, torch.float32),
            (functional.bcos_conv2d, torch.device("cpu"), torch.float64),
        ):
            images, weight = (t.to(place, kind).requires_grad_() for t in (x, w))
            with cuda_settings(tf32=False):
                out = way(images, weight, 2, 1, groups=groups, b=b, max_out=units)
                grads = torch.autograd.grad(out, (images, weight), grad.to(place, kind))
            found.append([t.detach().cpu().double() for t in (out, *grads)])
        for here, right in zip(*found, strict=True):
            off = float((here - right).abs().max() / right.abs().max())
            if not off < 1e-5:
                what = "layer" if conv is functional.bcos_conv2d else "compiled layer"
                raise BenchError(
                    f"with b = {b}, {units} units and {groups} groups the {what} on {device} is "
                    f"off by {off:.1e}, so its speed is not measured: run the tests of the kernels "
                    "there."
                )


def evidence(device: torch.device | str, dtype: torch.dtype) -> dict[str, Any]:
    device = check_device(device)
    found = {
        "commit": commit(),
        "seed": 0,
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "memory_format": "channels_last",
        "threads": torch.get_num_threads(),
        "backward": "in the calling thread",  # for all ways; see `_step`
        "torch": torch.__version__,
        "torchbcos": __version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        import triton

        found |= {"triton": triton.__version__, "cudnn": torch.backends.cudnn.version()}
        found["profiler"] = "after all times"  # see `bench`
    return found


# One step of each task.


def _step(case: Case, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    torch.manual_seed(0)
    model = build(case).to(device, dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train(case.task == "training")
    images = torch.rand(case.batch, 3, case.size, case.size, device=device, dtype=dtype)
    images = images.contiguous(memory_format=torch.channels_last)
    step = _plain_step(case, model, images)
    return as_graph(step) if case.mode == "captured" else step


def _plain_step(case: Case, model: nn.Module, images: Tensor) -> Callable[[], Any]:
    forward = torch.compile(model) if case.mode == "compiled" else model
    if case.task == "inference":

        def infer() -> None:
            with torch.no_grad():
                forward(images)

        return infer
    if case.task == "explanation":
        if case.way == "peer":
            return _peer_explanation(model, images)
        targets = list(range(case.targets)) if case.targets > 1 else None
        return lambda: explain(model, images, targets)
    labels = F.one_hot(torch.zeros(case.batch, dtype=torch.long, device=images.device), CLASSES)

    def train() -> None:
        # In this thread, as `torchbcos train` does it: a second one would pass the interpreter's
        # lock to and fro.
        with torch.autograd.set_multithreading_enabled(False):
            loss = F.binary_cross_entropy_with_logits(forward(images).float(), labels.float())
            loss.backward()
        for p in model.parameters():
            p.grad = None

    return train


def _peer_explanation(model: nn.Module, images: Tensor) -> Callable[[], Any]:
    """Its own way: one image at a time, the top class, in its explanation mode."""
    from bcos.modules.common import DetachableModule

    for module in model.modules():
        if isinstance(module, DetachableModule):
            module.set_explanation_mode(True)
    x = images[:1].detach().requires_grad_()

    def step() -> None:
        logits = model(x)
        torch.autograd.grad(logits.amax(1).sum(), x)

    return step


# The clock.


def _in_turns(steps: dict[Case, Callable[[], Any]], seconds: float) -> Iterator[Measurement]:
    counts = {case: max(1, _count(step, seconds)) for case, step in steps.items()}
    times: dict[Case, list[float]] = {case: [] for case in steps}
    for _ in range(GROUPS):
        for case, step in steps.items():
            times[case].append(_timed(step, counts[case]))
    for case in steps:
        yield _measurement(case, times[case], None)


def _measure(case: Case, step: Callable[[], Any], seconds: float) -> Measurement:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    count = max(20, _count(step, seconds))  # a group waits for the device, which its steps share
    times = [_timed(step, count) for _ in range(GROUPS)]
    return _measurement(case, times, round(_peak_bytes(case) / 2**20, 1))


def _timed(step: Callable[[], Any], count: int) -> float:
    """Milliseconds of one step, of so many."""
    started = time.perf_counter()
    for _ in range(count):
        step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / count * 1000


def _count(step: Callable[[], Any], seconds: float) -> int:
    """How many steps a group has, for groups of so many seconds together."""
    return round(seconds * 1000 / GROUPS / max(_timed(step, 2), 1e-3))


def _measurement(case: Case, times: list[float], peak_mib: float | None) -> Measurement:
    median = statistics.median(times)
    spread = (max(times) - min(times)) / median
    return Measurement(case, round(median, 3), round(spread, 3), None, peak_mib)


def _peak_bytes(case: Case) -> int:
    """A graph allocates nothing when it runs: what it needs is reserved as long as it exists."""
    if case.mode == "captured":
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()
    return torch.cuda.max_memory_allocated()


def _busy(step: Callable[[], Any]) -> float:
    """Milliseconds of kernels in one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as recorded:
        for _ in range(PROFILED):
            step()
        torch.cuda.synchronize()
    events = [e for e in recorded.events() if e.device_type.name == "CUDA"]
    return float(sum(e.device_time for e in events)) / PROFILED / 1000


# What is written.


class Results:
    """A file of measurements, each with the number of the run, in `runs`, that it is of.

    What is in the file already stays, but for cases that are measured again.
    """

    def __init__(self, path: Path, evidence: dict[str, Any]) -> None:
        self.path, self.evidence = path, evidence
        self.rows: list[tuple[dict[str, Any], dict[str, Any]]] = []  # measurement, its evidence
        if path.exists():
            self._read()

    def _read(self) -> None:
        try:
            document = json.loads(self.path.read_bytes())
            runs = document["runs"]
            self.rows = [(m, runs[m.pop("run")]) for m in document["measurements"]]
        except (ValueError, KeyError, TypeError, IndexError):
            raise ValueError(
                f"`out` (={self.path}) must be a file of this command, to which results are added, "
                "or a new one."
            ) from None
        for name in ("device", "dtype"):
            for _, run in self.rows:
                if run[name] != self.evidence[name]:
                    raise ValueError(
                        f"`out` (={self.path}) must hold measurements with the {name} "
                        f"{self.evidence[name]}, and has {run[name]}: use another file."
                    )

    def add(self, found: Measurement) -> None:
        """Put it in the place of an older one of the same case, or at the end; and write."""
        new = (found.as_json(), self.evidence)
        names = [f.name for f in fields(Case)]
        for i, (row, _) in enumerate(self.rows):
            if all(row[name] == new[0][name] for name in names):
                self.rows[i] = new
                break
        else:
            self.rows.append(new)
        runs: list[dict[str, Any]] = []
        for _, run in self.rows:
            if run not in runs:
                runs.append(run)
        measurements = [{**row, "run": runs.index(run)} for row, run in self.rows]
        document = {"runs": runs, "measurements": measurements}
        write_atomically(self.path, (json.dumps(document, indent=1) + "\n").encode())
