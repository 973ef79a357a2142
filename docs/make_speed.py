"""Write docs/speed.md and its plot from results/speed_*.json; see `torchbcos bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).parent.parent
NAMES = {"resnet34": "ResNet-34", "densenet121": "DenseNet-121", "vgg11": "VGG-11"}
COLOURS = {
    "conventional": "#8c8c8c",
    "floor": "#c9c9c9",
    "pooled-floor": "#b5c4d6",
    "peer": "#d98c5f",
    "ours": "#1f77d0",
}
MODES = ["eager", "captured", "compiled"]

INTRO = """\
# How fast

What the kernels of one step take on one NVIDIA H200, in ms (bfloat16, channels last, B = 2):

{summary}

*Floor* is the same network with plain convolutions, torch's own pools and sums, and neither norm
nor activation (two units: doubled channels and a plain maximum). *Peer* is the same network with
the layers of the authors' package, `bcos` 0.1.3. A *training step* here is forward, loss and
backward pass, without optimiser.

{overhead}

Where Python launches these kernels more slowly than a GPU runs them, a step takes longer, and ours
has more of them to launch than the floor: see [eager steps](#eager-steps). A captured step, as
`torchbcos train` runs it, or [a loop of your own](training.md#speed), does not wait for Python.

![Time of a training step](pictures/speed.png)
"""
METHOD = """\
## How it was measured

Each time is a median over five groups of steps. *Device* is the sum of the kernels' times in one
step; what a step takes beyond it is waiting for Python to launch them. *Captured* is a step
replayed as a CUDA graph. Its memory is all that stays reserved while the graph exists, in the
allocator's blocks; that of other steps is the peak of what they allocate.

Torch's average pool is slow in channels last, and ours is not: part of what we gain on the floor is
the pool. *Floor, our pool* is the floor without that part. Ratios are of times within one run. A
row without one has no floor of its units and mode in its own run; where that is another run than
the floor's, its time, other than its device time, may be from a host of another speed. The tables
over B and over batches and sizes, the first table, and the plot (its marks and what has a star are
of earlier runs), are put together from several runs. Before anything is measured, the layers are
compared with the reference in float64.

This page is made by `python docs/make_speed.py` from `results/speed_gpu.json`, which was written by

{runs}
"""
PROFILED = """\
In runs that do not say *profiler after all times* a case was profiled before the next was timed.
Torch's profiler stays attached and slows down later launches of its process (pytorch issue 144455).
Ours came last, so their eager times may be too long. Captured steps do not depend on it.
"""
HOST = """\
## Eager steps

An eager step depends on the host. ResNet-34's, with one unit, was measured four times by runs that
profile after all times, on hosts of unlike speed. The tables have the last (commit 126f4ee), whose
groups have at least twenty steps: 10.9 ms, 1.02 of the floor's 10.7, and the conventional network
15.4. The others are only in the file's history in git: 10.8 ms (bc1579c, 1.01 of the floor's),
14.2 ms (ee9dc3c, 1.34) and 16.7 ms (392f917, 1.56). All had 10.3 to 10.4 ms of kernels, less than
the floor, so what is beyond is the host's. A part may be the measurement's: the last of these three
waited for the device after every two steps, which a training does not.

On the host of 392f917 launching a step, with images too small to keep the device busy, took Python
(`python benchmarks/launches.py`, `results/launches_gpu.json`):
"""
AFTER_HOST = """\
There the launches alone, 11.0 ms, are more than the kernels' 10.4.
"""
RUN = (
    "- `{command}` on one {device}: {dtype}, {format}, torch {torch}, Triton {triton}, "
    "commit {commit}{more}."
)
LABELS = {"pooled-floor": "floor, our pool"}

Row = dict[str, Any]


def page(document: Row, launched: list[Row], cpu: Row, explained: Row) -> str:
    rows = document["measurements"]
    parts = [INTRO.format(summary=summary(rows), overhead=overhead(rows))]
    for arch in dict.fromkeys(r["arch"] for r in rows):
        for task in ("training", "inference"):
            chosen = [r for r in rows if r["arch"] == arch and r["task"] == task and usual(r, rows)]
            if len(chosen) > 1:
                parts += table(arch, task, chosen)
    parts += exponents(rows) + growth(rows) + explanations(rows)
    parts += [HOST, *launches(launched), AFTER_HOST]
    parts += processor(cpu) + explained_on_processor(explained)
    parts.append(METHOD.format(runs="\n".join(map(origin, document["runs"]))))
    if not all("profiler" in run for run in document["runs"]):
        parts.append(PROFILED)
    return "\n".join(parts)


def summary(rows: list[Row]) -> str:
    """The device's time of the usual steps, which no host slows down."""
    ways = ("ours", "conventional", "floor", "peer")
    lines = [f"| | {' | '.join(ways)} |", "|---|" + "---:|" * len(ways)]
    found: dict[tuple[str, str, int], dict[str, float]] = {}
    for r in rows:
        if usual(r, rows) and r["busy_milliseconds"] and r["mode"] == "eager" and r["way"] in ways:
            own = found.setdefault((r["arch"], r["task"], r["units"]), {})
            own[r["way"]] = r["busy_milliseconds"]
    for (arch, task, units), times in found.items():
        if "ours" in times and len(times) > 1 and task != "explanation":
            step = "a training step" if task == "training" else "inference"
            name = f"{NAMES.get(arch, arch)}, {step}" + f", {units} units" * (units > 1)
            cells = [time(times[w]) if w in times else "–" for w in ways]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def overhead(rows: list[Row]) -> str:
    """What the paper says of its own implementation, and what is measured here."""
    step = {"arch": "resnet34", "task": "training", "units": 1, "b": 2, "batch": 128, "size": 224}
    ours, conventional = (
        next(r for r in rows if {**r, **step, "mode": "captured", "way": way} == r)["milliseconds"]
        for way in ("ours", "conventional")
    )
    return (
        "By the paper, its implementation takes up to 60 % more time than conventional networks of "
        "the same\nsize. Here a captured training step of ResNet-34 with one unit takes "
        f"{time(ours)} ms and the conventional\nnetwork's, which has norms and activations beside, "
        f"{time(conventional)} ms: {100 * (1 - ours / conventional):.0f} % less."
    )


def launches(rows: list[Row]) -> list[str]:
    tasks = {"training": "a training step", "inference": "inference"}
    columns = [(a, t) for a in ("resnet34", "densenet121") for t in tasks]
    names = [f"{NAMES[a]}, {tasks[t]}, ms" for a, t in columns]
    lines = [f"| | images | {' | '.join(names)} |", "|---" * (len(columns) + 2) + "|"]
    for batch, size, way in dict.fromkeys((r["batch"], r["size"], r["way"]) for r in rows):
        same = [r for r in rows if (r["batch"], r["size"], r["way"]) == (batch, size, way)]
        found = {(r["arch"], r["task"]): f"{r['milliseconds']:.1f}" for r in same}
        cells = [way, f"{batch} of {size} px", *(found[c] for c in columns)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def origin(run: Row) -> str:
    more = f", backward passes {run['backward']}" if "backward" in run else ""
    if "profiler" in run:
        more += f", profiler {run['profiler']}"
    if "cut_off" in run:
        more += f"; cut off {run['cut_off']}"
    return RUN.format(**run, format=run["memory_format"].replace("_", " "), more=more)


def usual(row: Row, rows: list[Row]) -> bool:
    """B = 2 at the batch that all ways of this network were measured at."""
    first = next(r for r in rows if r["arch"] == row["arch"])
    return bool(row["b"] == 2 and (row["batch"], row["size"]) == (first["batch"], first["size"]))


def table(arch: str, task: str, rows: list[Row]) -> list[str]:
    step = "training step" if task == "training" else "inference"
    lines = [
        f"## {NAMES.get(arch, arch)}, {step}, batch {rows[0]['batch']}, {rows[0]['size']} pixels\n",
        "| | units | | ms | of the floor's | device ms | of the floor's | MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    floors = {peers(r): r for r in rows if r["way"] == "floor"}
    ways = list(COLOURS)
    for r in sorted(rows, key=lambda r: (MODES.index(r["mode"]), r["units"], ways.index(r["way"]))):
        floor = floors.get(peers(r))
        cells = [LABELS.get(r["way"], r["way"]), str(r["units"]), r["mode"]]
        for key in ("milliseconds", "busy_milliseconds"):
            known = r[key] is not None
            cells.append(time(r[key]) if known else "–")
            cells.append(f"{r[key] / floor[key]:.2f}" if known and floor else "–")
        lines.append(f"| {' | '.join(cells)} | {r['peak_mib']:.0f} |")
    return [*lines, ""]


def time(milliseconds: float) -> str:
    return f"{milliseconds:.1f}" if milliseconds >= 2 else f"{milliseconds:.2f}"


def peers(row: Row) -> tuple[Any, ...]:
    """What rows must share to be compared."""
    return row["units"], row["mode"], row["run"]


def exponents(rows: list[Row]) -> list[str]:
    ours = [
        r for r in rows
        if r["way"] == "ours" and r["arch"] == "resnet34" and r["units"] == 1
        and (r["batch"], r["size"], r["mode"]) == (128, 224, "eager")
    ]  # fmt: skip
    lines = [
        "## Exponents, ResNet-34, one unit, device ms\n",
        "| B | training | inference |",
        "|---|---|---|",
    ]
    for b in sorted({r["b"] for r in ours}):
        times = {r["task"]: f"{r['busy_milliseconds']:.1f}" for r in ours if r["b"] == b}
        lines.append(f"| {b:g} | {times.get('training', '–')} | {times.get('inference', '–')} |")
    return [*lines, ""]


def growth(rows: list[Row]) -> list[str]:
    """How the cost grows with the batch and with the images."""
    ours = [
        r for r in rows
        if r["way"] == "ours" and r["arch"] == "resnet34" and r["task"] == "training"
        and (r["units"], r["b"], r["mode"]) == (1, 2, "eager")
    ]  # fmt: skip
    if len(ours) < 2:
        return []
    lines = [
        "## Batches and sizes, ResNet-34, one unit, training step, eager\n",
        "| images | pixels | ms | device ms | device µs for 1000 pixels | MiB |",
        "|---|---|---|---|---|---|",
    ]
    for r in sorted(ours, key=lambda r: (r["size"], r["batch"])):
        busy = r["busy_milliseconds"]
        share = busy * 1e6 / (r["batch"] * r["size"] ** 2)
        cells = [r["batch"], r["size"], f"{r['milliseconds']:.1f}", f"{busy:.1f}", f"{share:.2f}"]
        lines.append(f"| {' | '.join(map(str, cells))} | {r['peak_mib']:.0f} |")
    return [*lines, ""]


def processor(document: Row) -> list[str]:
    (run,), rows = document["runs"], document["measurements"]
    first = {r["task"]: r["milliseconds"] for r in rows if r["way"] == "conventional"}
    lines = [
        f"## On {run['threads']} CPU cores, ResNet-34, one unit, batch {rows[0]['batch']}\n",
        "From `results/speed_cpu.json`: "
        f"`{run['command']}` on one {run['device']}, {run['dtype']}, "
        f"{run['memory_format'].replace('_', ' ')}, torch {run['torch']}, "
        f"commit {run['commit']}. The networks take turns, since such machines drift. In other "
        "runs, not kept and most of them one network after the other, ours took 1.01 to 1.17 of "
        "the conventional network's time for inference and 1.08 to 1.21 for a training step.\n",
        "| | inference, ms | of the conventional's | training step, ms | of the conventional's |",
        "|---|---|---|---|---|",
    ]
    for way, b in dict.fromkeys((r["way"], r["b"]) for r in rows):
        times = {r["task"]: r["milliseconds"] for r in rows if (r["way"], r["b"]) == (way, b)}
        cells = [f"{times[t]:.0f} | {times[t] / first[t]:.2f}" for t in ("inference", "training")]
        lines.append(f"| {way}{'' if b == 2 else f', B = {b:g}'} | {' | '.join(cells)} |")
    return [*lines, ""]


def explained_on_processor(document: Row) -> list[str]:
    made, seconds = document["evidence"], document["median_seconds"]
    ratio, goal = document["ratio"], document["goal"]
    few, scale = made["peer_images_timed"], made["peer_time_scaled_by"]
    scaled = f" explained {few} images, and its time is {scale:g} times that. It" * (scale > 1)
    verdict = "is reached" if ratio <= goal else "is missed"
    return [
        f"## Explanations on {made['threads']} CPU cores\n",
        f"From `results/explain_cpu.json`: `{made['command']}` on one {made['cpu']}, torch "
        f"{made['torch']}, commit {made['commit']}. {made['images']} images of {made['pixels']} "
        f"pixels, {made['classes_each']} classes each, with one network of the same weights in "
        f"both packages ({made['network']}): ours in one call, the peer one image and one class "
        f"at a time. Medians of {made['repeats']} turns; the peer{scaled} also "
        "draws its pictures.\n",
        "| | s | of the peer's |",
        "|---|---|---|",
        f"| peer | {seconds['peer']:.1f} | 1.00 |",
        f"| ours | {seconds['ours']:.1f} | {ratio:.3f} |",
        f"| ours, with pictures | {seconds['ours_with_pictures']:.1f} | "
        f"{document['ratio_with_pictures']:.3f} |",
        f"| peer, weights in channels last | {seconds['peer_channels_last']:.1f} | |",
        f"| ours, weights in channels last | {seconds['ours_channels_last']:.1f} | "
        f"{document['ratio_channels_last']:.3f} of that |",
        "",
        f"Our goal, at most {goal:.3f} of the peer's time, {verdict}. In other runs, not kept, "
        "ours without pictures took 0.35 to 0.46 of it.",
        "",
    ]


def explanations(rows: list[Row]) -> list[str]:
    lines = [
        "## Explanations, ResNet-34, one unit\n",
        "| | images | targets | ms | images/s | × inference of the same batch |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        if r["task"] != "explanation":
            continue
        same = [
            i["milliseconds"] for i in rows
            if i["task"] == "inference" and i["way"] == r["way"] and i["units"] == r["units"]
            and i["arch"] == r["arch"] and i["batch"] == r["batch"] and i["b"] == r["b"]
            and i["mode"] == "eager" and i["run"] == r["run"]
        ]  # fmt: skip
        ratio = f"{r['milliseconds'] / same[0]:.2f}" if same else "–"
        speed = f"{r['batch'] / r['milliseconds'] * 1000:,.0f}"
        cells = [r["way"], r["batch"], r["targets"], f"{r['milliseconds']:.1f}", speed, ratio]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return [*lines, ""]


def plot(rows: list[Row]) -> Figure:
    shown = [
        r for r in rows if r["task"] == "training" and r["arch"] == "resnet34" and usual(r, rows)
    ]
    chosen = [r for r in shown if r["mode"] == "eager"]
    chosen.sort(key=lambda r: (r["units"], list(COLOURS).index(r["way"])))
    captured = {(r["way"], r["units"]): r for r in shown if r["mode"] == "captured"}
    first = next(r["run"] for r in chosen if r["way"] == "ours")
    figure = Figure(figsize=(7.5, 3.2), layout="constrained", facecolor="white")
    axis = figure.add_subplot()
    names = [
        f"{LABELS.get(r['way'], r['way'])}, {r['units']} unit{'s' * (r['units'] > 1)}"
        + "*" * (r["run"] != first)
        for r in chosen
    ]
    places = range(len(chosen))
    axis.barh(places, [r["milliseconds"] for r in chosen], color="#eeeeee")
    axis.barh(
        places,
        [r["busy_milliseconds"] for r in chosen],
        color=[COLOURS[r["way"]] for r in chosen],
    )
    notes = ["pale: waiting for the host"]
    for place, r in zip(places, chosen, strict=True):
        if graph := captured.get((r["way"], r["units"])):
            axis.plot(graph["milliseconds"], place, "|", color="black", markersize=12)
    if captured:
        other = any(r["run"] != first for r in captured.values())
        notes.append("mark: captured" + ", of an earlier run" * other)
    axis.set_yticks(places, names)
    axis.invert_yaxis()
    if any(r["run"] != first for r in chosen):
        notes.append("*: of an earlier run")
    axis.set_xlabel(f"ms of a training step, ResNet-34\n({'; '.join(notes)})")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return figure


if __name__ == "__main__":
    document, cpu, apart, explained = (
        json.loads((ROOT / "results" / f"{name}.json").read_text())
        for name in ("speed_gpu", "speed_cpu", "launches_gpu", "explain_cpu")
    )
    text = page(document, apart["launches"], cpu, explained)
    (ROOT / "docs" / "speed.md").write_text(text.rstrip() + "\n")
    plot(document["measurements"]).savefig(ROOT / "docs" / "pictures" / "speed.png", dpi=100)
