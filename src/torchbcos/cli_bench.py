"""The command `bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from torchbcos.cli_common import Device, check_file, complain, output


def bench(
    device: Device = "cpu",
    only: Annotated[
        str,
        typer.Option(
            help="Cases to measure, by words of theirs, as in ours,training,resnet34,eager; "
            "units=2, b=1.5, batch=64, …"
        ),
    ] = "",
    seconds: Annotated[float, typer.Option(help="For each measurement.", min=0.01)] = 0.5,
    out: Annotated[
        Path, typer.Option(help="JSON file, written after each one; results are added to it.")
    ] = Path("speed.json"),
) -> None:
    """Measure time and memory of B-cos networks, conventional ones, and the authors' `bcos`.

    Beside them stands the floor: the same network with plain convolutions and nothing else.
    """
    import torch

    from torchbcos import bench as benchmark
    from torchbcos import bench_cases
    from torchbcos.evidence import command

    check_file(out)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    made_by = {"command": command("torchbcos"), **benchmark.evidence(device, dtype)}
    results = benchmark.Results(out, made_by)
    cases = bench_cases.select(bench_cases.suite(device.split(":")[0]), only)
    missing: set[str] = set()
    measured = 0
    if not device.startswith("cuda"):
        output.print(f"Cases: {len(cases)}, which take turns; their times come at the end.")
    try:
        for found in benchmark.bench(cases, device, dtype, seconds, missing.add):
            measured += 1
            results.add(found)
            output.print(found.words(), soft_wrap=True)
    except benchmark.BenchError as error:
        complain(str(error))
        sys.exit(1)
    needed = f"not installed and needed: the package {', '.join(sorted(missing))}."
    if not measured:
        complain(f"nothing was measured; {needed}")
        sys.exit(2)
    if missing:
        complain(f"cases were left out; {needed}")
    output.print(f"Wrote {out}", soft_wrap=True)
