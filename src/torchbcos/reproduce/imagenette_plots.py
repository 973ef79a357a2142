"""The plots of the page on Imagenette."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchbcos.plots import APART, INK, LineStyle
from torchbcos.reproduce.imagenet import ARCHITECTURES
from torchbcos.reproduce.localised import draw_boxes
from torchbcos.reproduce.results import Results
from torchbcos.reproduce.tables import loss_curves

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FILES", "KINDS", "draw_figures"]

#: How the name of an experiment ends, and what such a network is called.
KINDS = {"": "B-cos, no norms", "-norm": "B-cos, norms", "-conventional": "conventional"}
FILES = {end: f"imagenette{end or '-no-norm'}.png" for end in KINDS}
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
    figures = {file: draw_boxes(found, KINDS, end) for end, file in FILES.items()}
    return {**figures, "imagenette-loss.png": loss_curves(found, {n: _look(n) for n in found})}


def _look(name: str) -> tuple[str, LineStyle]:
    """A colour for each architecture and a style for what else is in the name."""
    if name == "small":
        return INK, "-"
    arch, _, kind = name.partition("-")
    colours = dict(zip(ARCHITECTURES, APART, strict=False))
    return colours[arch.removesuffix("_bn")], _STYLES[kind if arch in colours else "bn"]
