"""How long Python takes to launch an eager step, beside what the device takes to run it.

    python benchmarks/launches.py

The device is idle at the start, and the clock stops when the last kernel is launched. Four images
of 64 pixels keep a GPU busy for less time than Python needs for their launches; with as many images
as `torchbcos bench` takes it is seen whether launches take longer beside a busy one. Results go to
results/launches_gpu.json.
"""
# ruff: noqa: T201

from __future__ import annotations

import json
import statistics
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch

from torchbcos._cuda import cuda_settings
from torchbcos.bench import _step, evidence
from torchbcos.bench_cases import Case
from torchbcos.evidence import command

ROOT = Path(__file__).resolve().parent.parent
SIZES = ((4, 64), (64, 224))


def launched(case: Case, device: torch.device, steps: int = 15) -> float:
    """Milliseconds until the last launch, a median."""
    step = _step(case, device, torch.bfloat16)
    times = []
    for i in range(5 + steps):
        started = time.perf_counter()
        step()
        if i >= 5:
            times.append(time.perf_counter() - started)
        if i >= 4 and device.type == "cuda":
            torch.cuda.synchronize()
    return 1000 * statistics.median(times)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("There is no CUDA device here, and only to one is anything launched.")
    rows: list[dict[str, Any]] = []
    for (batch, size), arch, way, task in product(
        SIZES, ("resnet34", "densenet121"), ("conventional", "floor", "ours"),
        ("training", "inference"),
    ):  # fmt: skip
        case = Case(way, task, arch, batch=batch, size=size)
        with cuda_settings(benchmark=True):
            milliseconds = round(launched(case, torch.device("cuda")), 2)
        what = {"arch": arch, "way": way, "task": task, "batch": batch, "size": size}
        rows.append({**what, "milliseconds": milliseconds})
        print(f"{arch} {way} {task}, {batch} images of {size} px: {milliseconds:.2f} ms")
    about = {
        "command": command("python", "benchmarks/launches.py"),
        **evidence("cuda", torch.bfloat16),
    }
    document = {"evidence": about, "launches": rows}
    path = ROOT / "results" / "launches_gpu.json"
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
