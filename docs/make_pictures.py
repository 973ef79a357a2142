"""Draw the pictures of the documentation anew, from the bundled model, photos and the text."""

import doctest
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import torchbcos as tb
import torchbcos.toy
from torchbcos.images import read_image

ROOT = Path(__file__).parent.parent


def church() -> None:
    model = tb.load("imagenette")
    seen = read_image(ROOT / "examples" / "photos" / "church.jpg", model.input_size)[None]
    e = tb.explain(model, seen, ["church", "garbage truck"])
    maps, sums = tb.render.contributions(e)[0], e.contributions[0].sum((1, 2))
    panels = {
        "photo": seen[0].permute(1, 2, 0).numpy(),
        "W(x) for church": tb.render.colour(e)[0, 0],
        f"contributions to church, in all {sums[0]:+.1f}": maps[0],
        f"to garbage truck, in all {sums[1]:+.1f}": maps[1],
    }
    _row(panels, 3.05, "church.png")


def cat() -> None:
    model = tb.load("cifar10")
    photo = ROOT / "examples" / "photos" / "cat.jpg"
    seen = read_image(photo, model.input_size)[None]
    e = tb.explain(model, seen, ["cat", "dog"])
    maps, sums = tb.render.contributions(e)[0], e.contributions[0].sum((1, 2))
    panels = {
        "photo": read_image(photo, (300, 300)).permute(1, 2, 0).numpy(),
        "what the network sees": seen[0].permute(1, 2, 0).numpy(),
        "W(x) for cat": tb.render.colour(e)[0, 0],
        f"contributions to cat, in all {sums[0]:+.0f}": maps[0],
        f"contributions to dog, in all {sums[1]:+.0f}": maps[1],
    }
    _row(panels, 2.7, "cat.png")


def toy() -> None:
    figure = tb.toy.figure(tb.toy.solve((1.0, 2.0, 10.0)))
    figure.savefig(ROOT / "docs" / "pictures" / "toy.png", dpi=80)


def neurons() -> None:
    """The sheets of docs/neurons.md, after running the example in it."""
    text = (ROOT / "docs" / "neurons.md").read_text(encoding="utf-8")
    scope: dict[str, Any] = {}
    for example in doctest.DocTestParser().get_examples(text):
        exec(example.source, scope)
    figure = Figure(figsize=(11.2, 5.6), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(6, 14)
    for row, sheet in enumerate(scope["sheets"]):
        for column, sight in enumerate(sheet.first[:7]):
            axis = figure.add_subplot(grid[2 * row, column])
            axis.imshow(scope["test"].pixels[sight.image].permute(1, 2, 0), interpolation="nearest")
            top, left, bottom, right = sight.box
            place = (left - 0.5, top - 0.5)
            axis.add_patch(Rectangle(place, right - left, bottom - top, fill=False, ec="#1f77d0"))
            _bare(axis)
            _bare(_shown(figure.add_subplot(grid[2 * row + 1, column]), sight), "#1f77d0")
        for place, sight in enumerate(sheet.rest[:14]):
            _bare(_shown(figure.add_subplot(grid[2 * row + place // 7, 7 + place % 7]), sight))
        title = f"layer {sheet.layer.name}, unit {sheet.unit}"
        figure.axes[28 * row].set_title(title, fontsize=9, loc="left")
        figure.axes[28 * row + 14].set_title("the next images", fontsize=9, loc="left")
    figure.savefig(ROOT / "docs" / "pictures" / "neurons.png", dpi=100)


def _row(panels: Mapping[str, np.ndarray], height: float, file: str) -> None:
    figure = Figure(figsize=(11.2, height), layout="constrained", facecolor="white")
    axes = figure.subplots(1, len(panels))
    for axis, (title, picture) in zip(axes, panels.items(), strict=True):
        axis.imshow(picture, interpolation="nearest")
        axis.set_title(title, fontsize=9.5)
        _bare(axis)
    figure.savefig(ROOT / "docs" / "pictures" / file, dpi=100)


def _shown(axis: Axes, sight: tb.neurons.Sight) -> Axes:
    axis.imshow(sight.picture, interpolation="nearest")
    return axis


def _bare(axis: Axes, colour: str = "#cccccc") -> None:
    axis.set_xticks([])
    axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_color(colour)


if __name__ == "__main__":
    church()
    cat()
    toy()
    neurons()
