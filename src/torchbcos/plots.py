"""Plots of scores; figures are returned, not shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "APART",
    "INK",
    "OURS",
    "LineStyle",
    "accuracy_and_localisation",
    "curves",
    "score_boxes",
]

BESIDE = 16  # boxes in one row of panels
OURS, OTHER, INK = "#d62728", "#8fa3bf", "#1d2330"
#: Colours that are told apart, also by most who see few (Okabe and Ito, the yellow darkened).
APART = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#8a8a00")
LineStyle = str | tuple[int, tuple[float, ...]]


def score_boxes(
    panels: Mapping[str, Mapping[str, np.ndarray]],
    *,
    means: Mapping[str, Mapping[str, float]] | None = None,
    chance: float | None = None,
) -> Figure:
    """One panel for each model, one box for each method: median, quartiles, 5 % to 95 %.

    `panels` are scores by model and method, as in Fig. 5 and B1/B2 of the paper; a dot is the mean,
    the dashed line is `chance`. Where the scores are percentiles of many, `means` are theirs.
    """
    from matplotlib.figure import Figure

    if not panels or not all(panels.values()):
        raise ValueError("`panels` (={}) must hold the scores of at least one model and method.")
    widths = [max(len(methods), 3, len(title) // 8 + 1) for title, methods in panels.items()]
    beside = sum(widths) <= BESIDE
    across, down = (sum(widths), 1) if beside else (max(widths), len(panels))
    fig = Figure(figsize=(1.2 + 0.62 * across, 3.6 * down), layout="constrained")
    if beside:
        axes = fig.subplots(1, len(panels), sharey=True, squeeze=False, width_ratios=widths)[0]
    else:
        axes = fig.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, (title, methods) in zip(axes, panels.items(), strict=True):
        dots = [means[title][m] if means else float(np.mean(s)) for m, s in methods.items()]
        special = [label.startswith("Ours") for label in methods]
        _boxes(axis, list(methods.values()), dots, special)
        labels = list(methods)
        axis.set_xticks(range(len(labels)), labels, rotation=40, ha="right", parse_math=False)
        axis.set_title(title, fontsize=10, parse_math=False)
        _finish(axis, chance)
    for axis in axes[:1] if beside else axes:
        axis.set_ylabel("localisation")
    return fig


def accuracy_and_localisation(
    points: Sequence[tuple[float, float, np.ndarray]], *, means: Mapping[float, float] | None = None
) -> Figure:
    """Over B: accuracies as crosses, scores as boxes, as in Fig. 4; points are (B, both).

    Where the scores are percentiles of many, `means` are theirs, by B.
    """
    from matplotlib.figure import Figure

    if not points:
        raise ValueError("`points` (=[]) must hold at least one (B, accuracy, scores).")
    points = sorted(points, key=lambda p: p[0])
    fig = Figure(figsize=(1.6 + 0.75 * max(len(points), 3), 3.4), layout="constrained")
    axis = fig.subplots()
    scores = [each for _, _, each in points]
    dots = [means[b] if means else float(np.mean(s)) for b, _, s in points]
    _boxes(axis, scores, dots, [False] * len(points))
    axis.set_xticks(range(len(points)), [f"{b:g}" for b, _, _ in points])
    axis.set_xlabel("B")
    axis.set_ylabel("localisation (boxes)")
    _finish(axis, None)
    right = axis.twinx()
    right.plot(
        range(len(points)), [100 * a for _, a, _ in points], "x", color=OURS, ms=8, mew=2, zorder=5
    )
    right.set_ylabel("accuracy in % (crosses)", color=OURS)
    right.tick_params(axis="y", colors=OURS)
    right.spines[["top"]].set_visible(False)
    right.margins(y=0.25)
    return fig


def curves(
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    looks: Mapping[str, tuple[str, LineStyle]],
) -> Figure:
    """One panel for each quantity, one line for each network: (epochs, values), values above 0.

    `looks` are the colour and the style of each network's lines.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    if not names:
        raise ValueError("`panels` (={}) must hold at least one line.")
    fig = Figure(figsize=(4.2 * len(panels) + 2.2, 3.6), layout="constrained")
    axes = fig.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        for name, (epochs, values) in lines.items():
            colour, style = looks[name]
            axis.plot(epochs, values, color=colour, linestyle=style, linewidth=1.3, label=name)
        axis.set_yscale("log")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("epoch")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#e3e6ec", linewidth=0.8)
    handles = {h.get_label(): h for a in fig.axes for h in a.get_lines()}
    fig.legend(
        handles=list(handles.values()),
        loc="outside right upper",
        fontsize=8,
        frameon=False,
        handlelength=3.2,
    )
    return fig


def _boxes(
    axis: Axes,
    scores: Sequence[np.ndarray],
    means: Sequence[float],
    highlighted: Sequence[bool],
) -> None:
    drawn: dict[str, Any] = axis.boxplot(
        [np.ravel(s) for s in scores],
        positions=range(len(scores)),
        widths=0.62,
        whis=(5, 95),
        showfliers=False,
        patch_artist=True,
        medianprops={"color": INK, "linewidth": 1.6},
        whiskerprops={"color": INK, "linewidth": 0.8},
        capprops={"color": INK, "linewidth": 0.8},
        boxprops={"linewidth": 0.8, "edgecolor": INK},
    )
    for box, special in zip(drawn["boxes"], highlighted, strict=True):
        box.set_facecolor(OURS if special else OTHER)
    axis.plot(range(len(means)), means, "o", color=INK, markersize=3.5, markeredgewidth=0, zorder=4)


def _finish(axis: Axes, chance: float | None) -> None:
    axis.set_ylim(-0.02, 1.02)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e3e6ec", linewidth=0.8)
    axis.set_axisbelow(True)
    if chance is not None:
        axis.axhline(chance, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
