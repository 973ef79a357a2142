"""The plots of the page on Imagenette."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torchbcos.plots import APART, INK, LineStyle, score_boxes
from torchbcos.reproduce.imagenette import ARCHITECTURES
from torchbcos.reproduce.results import Result, Results
from torchbcos.reproduce.tables import loss_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["KINDS", "draw_figures", "more_accurate_first"]

#: How the name of an experiment ends, and what such a network is called.
KINDS = {"": "B-cos, no norms", "-norm": "B-cos, norms", "-conventional": "conventional"}
_STYLES: dict[str, LineStyle] = {
    "": "-",
    "norm": "--",
    "conventional": ":",
    "one-unit": "-.",
    "growth22": (0, (6, 1, 1, 1, 1, 1)),
    "bn": (0, (1, 3)),
}


def draw_figures(found: Results) -> dict[str, Figure | None]:
    """By file name; None where nothing is there to be drawn."""
    figures = {f"imagenette{end or '-no-norm'}.png": _boxes(found, end) for end in KINDS}
    return {**figures, "imagenette-loss.png": loss_curves(found, {n: _look(n) for n in found})}


def more_accurate_first(found: Results, arch: str) -> list[Result]:
    """The B-cos networks of an architecture, the more accurate first."""
    both = [found[arch + end] for end in ("", "-norm") if arch + end in found]
    return sorted(both, key=lambda r: -r.accuracy)


def _boxes(found: Results, end: str) -> Figure | None:
    """All methods on the networks of one kind; beside conventional ones stands ours (Fig. B2)."""
    panels, means = {}, {}
    for arch, (title, _, _) in ARCHITECTURES.items():
        r = found.get(arch + end)
        if r is None:
            continue
        most = max((m["grids"] for m in r.methods.values()), default=0)
        drawn = {m["label"] + "*" * (m["grids"] < most): m for m in r.methods.values()}
        bcos = next((b for b in more_accurate_first(found, arch) if "ours" in b.methods), None)
        if end == "-conventional" and bcos is not None:
            kind = KINDS[bcos.experiment.name.removeprefix(arch)]
            drawn = {f"Ours ({kind})": bcos.methods["ours"], **drawn}
        if len(drawn) > 1:
            name = f"{title}, {KINDS[end]}, {r.accuracy:.1f} % accurate"
            panels[name] = {label: np.array(m["percentiles"]) for label, m in drawn.items()}
            means[name] = {label: m["mean"] for label, m in drawn.items()}
    return score_boxes(panels, means=means, chance=1 / 9) if panels else None


def _look(name: str) -> tuple[str, LineStyle]:
    """A colour for each architecture and a style for what else is in the name."""
    if name == "small":
        return INK, "-"
    arch, _, kind = name.partition("-")
    colours = dict(zip(ARCHITECTURES, APART, strict=False))
    return colours[arch.removesuffix("_bn")], _STYLES[kind if arch in colours else "bn"]
