"""The page on CIFAR-10, made of nothing but the JSON files of the experiments."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchbcos.checkpoint import write_atomically
from torchbcos.plots import APART, INK, LineStyle, accuracy_and_localisation, score_boxes
from torchbcos.reproduce.cifar10 import EXPERIMENTS, SEEDS
from torchbcos.reproduce.results import Result, Results, read_results
from torchbcos.reproduce.tables import (
    MISSING,
    accuracy,
    draw,
    evidence,
    grids,
    listed,
    loss_curves,
    minutes,
    remarks,
    table,
    tries,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_page"]

NEAR = 0.3  # points of accuracy that count as reached


def write_page(results: Path, docs: Path) -> list[Path]:
    """Write docs/cifar10.md and its plots from results/*.json; return what was written."""
    found = read_results(results, EXPERIMENTS)
    written = draw(
        {
            "cifar10-b.png": _over_b(found),
            "cifar10-methods.png": _method_boxes(found),
            "cifar10-loss.png": _loss_curves(found),
        },
        docs / "pictures",
    )
    shown = {path.name for path in written}
    sections = [
        _head(found, results),
        _table_1(found),
        _fig_4(found, shown),
        _calibrated(found),
        _seeds(found),
        _post_hoc(found, shown),
        _others(found),
        tries(results, EXPERIMENTS, partial(_score, method="ours")),
        _losses(found, shown),
        evidence(found),
    ]
    page = docs / "cifar10.md"
    write_atomically(page, ("\n\n".join(filter(None, sections)) + "\n").encode())
    return [page, *written]


# The sections.


def _head(found: Results, results: Path) -> str:
    lines = [
        "# CIFAR-10: the paper's networks, trained again",
        "",
        "The nine-layer networks of Tab. 1, each trained by its recipe (`torchbcos train --list`), "
        "then measured on the test images: accuracy, and how well explanations localise. "
        "A localisation score is the share of a map's positive contributions that lies in the cell "
        "of the explained class, in grids of 3×3 images of different classes (maps smoothed 3×3; "
        "chance is 0.111). Its interval is the 95 % interval of the mean over grids.",
        "",
        "```",
        "torchbcos reproduce cifar10 --data data/cifar10 --out out/cifar10 --jobs 8",
        "torchbcos reproduce cifar10 --page --results out/cifar10/results",
        "```",
        "",
        f"This page is made by such a second command from the files in `{results.as_posix()}`; "
        "nothing in it is written by hand.",
    ]
    lines += remarks(found, EXPERIMENTS)
    return "\n".join(lines)


def _table_1(found: Results) -> str:
    rows, near, measured = [], 0, 0
    for name, e in EXPERIMENTS.items():
        if e.paper is None:
            continue
        r = found.get(name)
        if r is None:
            rows.append([e.what, f"{e.paper}", MISSING, "", "", "", ""])
            continue
        off = round(r.accuracy - e.paper, 2)
        measured += 1
        near += off >= -NEAR
        rows.append([
            e.what, f"{e.paper}", f"{r.accuracy:.2f}", f"{off:+.2f}", _score(r, "ours"),
            minutes(r), f"{100 * max(r.document['curve']['test_accuracy']):.2f}",
        ])  # fmt: skip
    header = [
        "network", "paper, %", "here, %", "difference", "localisation", "training", "best epoch, %"
    ]  # fmt: skip
    verdict = (
        f"{near} of {measured} measured accuracies are above the paper's or at most {NEAR} points "
        "below. They are those of the last epoch. The best epoch is chosen by the test images "
        "themselves, so its accuracy is optimistic; it only shows how much epochs differ."
    )
    return "\n\n".join(["## Accuracy (Tab. 1)", table(header, rows), verdict])


def _fig_4(found: Results, shown: set[str]) -> str:
    parts = ["## Accuracy and localisation over B (Fig. 4)"]
    points = [(r.b, r.ours) for r in _by_b(found) if r.ours is not None]
    steps = list(pairwise(points))
    falls = [f"{low[0]:g} to {high[0]:g}" for low, high in steps if high[1] <= low[1]]
    if not steps:
        return "\n\n".join([*parts, "Two values of B at least are missing."])
    if "cifar10-b.png" in shown:
        parts.append(
            "![Accuracy as crosses and localisation as boxes over B](pictures/cifar10-b.png)"
        )
    means = ", ".join(f"{score:.3f}" for _, score in points)
    exponents = ", ".join(f"{b:g}" for b, _ in points)
    trend = "it rises with B" + (f", except from {' and '.join(falls)}" if falls else "")
    parts.append(
        f"MaxOut, B = {exponents}: localisation {means}; {trend}. Boxes are quartiles of all "
        "cells' scores, whiskers 5 % to 95 %, dots means."
    )
    return "\n\n".join(parts)


def _calibrated(found: Results) -> str:
    rows = []
    for name in EXPERIMENTS:
        if not name.endswith("-calibrated"):
            continue
        hand, auto = found.get(name.removesuffix("-calibrated")), found.get(name)
        pair = [accuracy(hand), accuracy(auto)]
        off = f"{auto.accuracy - hand.accuracy:+.2f}" if hand and auto else ""
        scores = [_score(r, "ours") for r in (hand, auto)]
        rows.append(
            [
                EXPERIMENTS[name].what.split(", γ")[0],
                *pair,
                off,
                *scores,
                _total(hand),
                _total(auto),
            ]
        )
    header = [
        "network", "paper's γ, T: %", "calibrated: %", "difference", "localisation, paper's",
        "localisation, calibrated", "log₁₀(γ₁⋯γ₉/T), paper's", "calibrated",
    ]  # fmt: skip
    words = (
        "The paper tunes γ and T by hand for each B. `torchbcos.calibrate` sets them from the "
        "first batch; of these networks only the product γ₁⋯γ₉/T matters."
    )
    return "\n\n".join(["## Scales: calibrated against tuned by hand", words, table(header, rows)])


def _seeds(found: Results) -> str:
    rows = []
    for name in SEEDS:
        names = [n for n in EXPERIMENTS if n == name or n.startswith(f"{name}-seed")]
        results = [found[n] for n in names if n in found]
        each = ", ".join(accuracy(found.get(n)) for n in names)
        localised = [r.ours for r in results if r.ours is not None]
        rows.append([
            EXPERIMENTS[name].what, each, _spread([r.accuracy for r in results], 2),
            ", ".join(f"{v:.3f}" for v in localised), _spread(localised, 3),
        ])  # fmt: skip
    header = ["network", "seeds 0, 1, 2: %", "mean ± deviation", "localisation", "mean ± deviation"]
    return "\n\n".join(["## Seeds and spread", table(header, rows)])


def _post_hoc(found: Results, shown: set[str]) -> str:
    bcos, other = found.get("maxout-b2"), found.get("conventional")
    labels: dict[str, str] = {}
    for r in filter(None, (bcos, other)):
        labels |= {key: m["label"] for key, m in r.methods.items()}
    rows = [
        [
            label,
            _score(bcos, key),
            _score(other, key, inherent=key == "ours"),
            grids(key, bcos, other),
        ]
        for key, label in labels.items()
    ]
    parts = ["## Ours against post-hoc methods"]
    if "cifar10-methods.png" in shown:
        parts.append("![Localisation of every method](pictures/cifar10-methods.png)")
        parts.append(
            "Boxes are as above, the dashed line is chance; a star marks methods that were scored "
            "on fewer grids than others. The table has means."
        )
    if rows:
        parts.append(table(["method", "B-cos, B = 2", "conventional", "grids"], rows))
    if bcos and bcos.ours is not None and len(bcos.methods) > 1:
        parts.append(_verdict(bcos.methods))
    missing = [n for n, r in (("maxout-b2", bcos), ("conventional", other)) if r is None]
    if missing:
        parts.append(f"Missing: {', '.join(missing)}.")
    return "\n\n".join(parts)


def _verdict(methods: Mapping[str, Mapping[str, Any]]) -> str:
    """Each method is compared with ours on the grids that it was scored on."""
    ours = methods["ours"]
    others = {key: m for key, m in methods.items() if key != "ours"}
    fewer = [m["label"] for m in others.values() if m["grids"] < ours["grids"]]

    def lead(m: Mapping[str, Any]) -> float:
        return float(ours["mean_of_first" if m["label"] in fewer else "mean"] - m["mean"])

    best = min(others.values(), key=lead)
    where = "below" if lead(best) > 0 else "above"
    words = (
        f"On the B-cos network ours is above {sum(lead(m) > 0 for m in others.values())} of "
        f"{len(others)} post-hoc methods; the nearest on the same grids, {best['label']}, is "
        f"{abs(lead(best)):.3f} {where} ours."
    )
    if not fewer:
        return words
    return (
        f"{words} {listed(fewer)} {'are slow and were' if fewer[1:] else 'is slow and was'} scored "
        f"on the first {ours['first']} grids only, those of the most confident images, where ours "
        f"has {ours['mean_of_first']:.3f}. Maps of methods that perturb images are not smoothed, "
        "as in the paper."
    )


def _others(found: Results) -> str:
    rows = []
    for name in ("conventional", "best"):
        if name in EXPERIMENTS:
            r, what = found.get(name), EXPERIMENTS[name].what
            size = f"{r.document['parameters'] / 1e6:.2f} M" if r else ""
            score = _score(r, "ours") if name == "best" else "–"
            rows.append([what, accuracy(r), score, size, minutes(r) if r else ""])
    header = ["network", "accuracy, %", "localisation", "parameters", "training"]
    return "\n\n".join(["## Other networks", table(header, rows)])


def _losses(found: Results, shown: set[str]) -> str:
    picture = "![Loss over the epochs](pictures/cifar10-loss.png)"
    if "cifar10-loss.png" not in shown:
        return "\n\n".join(["## Loss curves", "Missing."])
    parts = ["## Loss curves", picture]
    best = found.get("best")
    if best is not None:
        loss = best.document["curve"]["train_loss"][-1]
        parts.append(
            f"`best` ends at {loss:.2f} on training images because CutMix and RandAugment make "
            "them harder."
        )
    return "\n\n".join(parts)


# The plots.


def _by_b(found: Results) -> list[Result]:
    """The MaxOut networks of Tab. 1."""
    return [
        r for n, r in found.items() if n.startswith("maxout") and r.experiment.paper is not None
    ]


def _over_b(found: Results) -> Figure | None:
    points = [
        (r.b, r.accuracy / 100, np.array(r.methods["ours"]["percentiles"]))
        for r in _by_b(found)
        if "ours" in r.methods
    ]
    means = {r.b: r.ours for r in _by_b(found) if r.ours is not None}
    return accuracy_and_localisation(points, means=means) if len(points) > 1 else None


def _method_boxes(found: Results) -> Figure | None:
    panels, means = {}, {}
    for name, title in (("maxout-b2", "B-cos, B = 2"), ("conventional", "conventional")):
        r = found.get(name)
        if r is not None and len(r.methods) > 1:
            title = f"{title}, {r.accuracy:.1f} % accurate"
            most = max(m["grids"] for m in r.methods.values())
            drawn = {m["label"] + "*" * (m["grids"] < most): m for m in r.methods.values()}
            panels[title] = {label: np.array(m["percentiles"]) for label, m in drawn.items()}
            means[title] = {label: m["mean"] for label, m in drawn.items()}
    return score_boxes(panels, means=means, chance=1 / 9) if panels else None


def _loss_curves(found: Results) -> Figure | None:
    """MaxOut networks in a colour for each B, the others in black, each in another style."""
    looks: dict[str, tuple[str, LineStyle]]
    looks = {n: (INK, s) for n, s in (("plain-b2", "--"), ("conventional", ":"), ("best", "-."))}
    by_b = [e.name for e in EXPERIMENTS.values() if e.paper is not None and e.name not in looks]
    looks |= {name: (colour, "-") for name, colour in zip(by_b, APART, strict=True)}
    return loss_curves({name: r for name, r in found.items() if name in looks}, looks)


# Cells.


def _score(r: Result | None, method: str, *, inherent: bool = False) -> str:
    """`inherent`: the method exists for B-cos networks alone."""
    if r is None or method not in r.methods:
        return "–" if inherent else MISSING
    m = r.methods[method]
    return "{:.3f} ({:.3f} – {:.3f})".format(m["mean"], *m["interval"])


def _total(r: Result | None) -> str:
    return MISSING if r is None else f"{r.document['scaling']['log10_total']:.2f}"


def _spread(values: Sequence[float], digits: int) -> str:
    if len(values) < 2:
        return MISSING
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"
