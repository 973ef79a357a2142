"""How long Python takes to launch an eager step, beside what the device takes to run it.

    python benchmarks/launches.py

Four images of 64 pixels keep a GPU busy for less time than Python needs for their launches, and
the clock stops when the last is launched. Results go to results/launches_gpu.json.
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

from torchbcos.bench import _step, evidence
from torchbcos.bench_cases import Case
from torchbcos.evidence import command

ROOT = Path(__file__).resolve().parent.parent


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
    for arch, way, task in product(
        ("resnet34", "densenet121"), ("conventional", "floor", "ours"), ("training", "inference")
    ):
        case = Case(way, task, arch, batch=4, size=64)
        milliseconds = round(launched(case, torch.device("cuda")), 2)
        rows.append({"arch": arch, "way": way, "task": task, "milliseconds": milliseconds})
        print(f"{arch} {way} {task}: {milliseconds:.2f} ms")
    about = {"command": command("python"), **evidence("cuda", torch.bfloat16)}
    document = {"evidence": about, "launches": rows}
    path = ROOT / "results" / "launches_gpu.json"
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
