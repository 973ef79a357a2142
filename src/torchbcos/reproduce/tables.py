"""What the pages of all studies have in common: cells, tables, plots and evidence."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torchbcos.checkpoint import write_atomically
from torchbcos.plots import LineStyle, curves
from torchbcos.reproduce.experiments import Experiment
from torchbcos.reproduce.results import Result, Results, read_tries

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "MISSING",
    "accuracy",
    "difference",
    "draw",
    "evidence",
    "grids",
    "listed",
    "loss_curves",
    "minutes",
    "remarks",
    "table",
    "tries",
]

MISSING = "missing"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, rule, *rows])


def accuracy(r: Result | None) -> str:
    return MISSING if r is None else f"{r.accuracy:.2f}"


def difference(r: Result | None, base: Result | None) -> str:
    return f"{r.accuracy - base.accuracy:+.2f}" if r and base else ""


def grids(method: str, *results: Result | None) -> str:
    """On how many grids the method was scored, in each of the results that have it."""
    counts = {r.methods[method]["grids"] for r in results if r and method in r.methods}
    return ", ".join(map(str, sorted(counts)))


def minutes(r: Result) -> str:
    return f"{r.document['seconds']['training'] / 60:.1f} min"


def draw(figures: Mapping[str, Figure | None], pictures: Path) -> list[Path]:
    """Write those that there are, by their names, and return where."""
    pictures.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures.items():
        if figure is not None:
            buffer = io.BytesIO()
            figure.savefig(buffer, dpi=120, format="png", metadata={"Software": None})
            write_atomically(pictures / name, buffer.getvalue())
            written.append(pictures / name)
    return written


def listed(words: Iterable[str], last: str = "and") -> str:
    """As in "a, b and c"."""
    *others, end = words
    return f"{', '.join(others)} {last} {end}" if others else end


def remarks(found: Results, experiments: Mapping[str, Experiment]) -> list[str]:
    """Lines that name what was not run, what was run otherwise, and what is to be known of it."""
    lines = []
    absent = [name for name in experiments if name not in found]
    if absent:
        lines += ["", f"**Not run yet: {', '.join(absent)}.**"]
    off = {name: r.deviations() for name, r in found.items() if r.deviations()}
    if off:
        lines += ["", "**Not with the recipe's settings:**", ""]
        lines += [f"- {name}: {', '.join(settings)}" for name, settings in off.items()]
    for name, r in found.items():
        if "note" in r.document:
            lines += ["", f"**Of {name}:** {r.document['note']}"]
    return lines


def tries(
    results: Path, experiments: Mapping[str, Experiment], score: Callable[[Result], str]
) -> str:
    """How the recipes were found: results/tries/*.json, of experiments with other settings."""
    rows = [
        [stem, r.experiment.name, ", ".join(r.deviations()) or "none", accuracy(r), score(r),
         minutes(r)]
        for stem, r in read_tries(results, experiments).items()
    ]  # fmt: skip
    if not rows:
        return ""
    header = ["try", "experiment", "other settings", "accuracy, %", "localisation", "training"]
    words = (
        "Each try differs from the recipe of its experiment in the settings named. They were "
        "compared on the test images that results are reported on, so what was chosen is reported "
        "a little too well. Tries that were cut off, or whose files were not kept, are not here."
    )
    return "\n\n".join(["## How the recipes were found", words, table(header, rows)])


def loss_curves(results: Results, looks: Mapping[str, tuple[str, LineStyle]]) -> Figure | None:
    titles = {"train_loss": "loss on training images", "test_loss": "loss on test images"}
    drawn = {name: r.document["curve"] for name, r in results.items()}
    panels = {
        title: {name: (curve["epoch"], curve[key]) for name, curve in drawn.items()}
        for key, title in titles.items()
    }
    return curves(panels, looks) if drawn else None


def evidence(found: Results) -> str:
    header = [
        "experiment", "recipe", "seed", "epochs", "training", "pointing game", "hardware",
        "side by side", "torch", "commit", "source",
    ]  # fmt: skip
    rows = []
    for name, r in found.items():
        d, e = r.document, r.document["evidence"]
        rows.append([
            f"`{name}`", d["recipe"], str(e["seed"]), f"{d['config']['epochs']:g}", minutes(r),
            f"{d['seconds']['localisation'] / 60:.1f} min", e["hardware"],
            str(e.get("side_by_side", "")), e["torch"], e.get("commit", "unknown")[:7],
            e.get("source", ""),
        ])  # fmt: skip
    commands = sorted(
        {
            r.document[of].get("command", "unknown")
            for r in found.values()
            for of in ("evidence", "evidence_of_scores")
            if of in r.document
        }
    )
    ran = "\n".join(["```", *commands, "```"])
    words = (
        "“Side by side” is how many processes shared the device, this one included; times are "
        "those of such a process. “Source” is a digest of the package's code and recipes."
    )
    return "\n\n".join(["## How it was made", table(header, rows), words, ran])
