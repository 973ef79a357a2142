"""What came of the grid pointing game, to look at: plots, a table, and grids with their maps."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from torchbcos import render
from torchbcos.checkpoint import write_atomically
from torchbcos.data import ImageSet
from torchbcos.explain import explain
from torchbcos.localise_run import (
    Game,
    MethodScores,
    Played,
    grid_images,
    subject_of,
    targets_of,
)
from torchbcos.page import Panel, Section, build_page, png
from torchbcos.plots import accuracy_and_localisation, score_boxes
from torchbcos.posthoc import METHODS, Method

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["extreme_grids", "qualitative_figure", "write_report"]

ROWS = 6  # images in the figure
SHOWN = 3  # grids at either end
PICTURE = 224  # pixels of a panel


def write_report(
    played: Sequence[Played],
    models: Sequence[nn.Module],
    sets: Sequence[ImageSet],
    classes: Sequence[str],
    game: Game,
    out: Path,
) -> Path:
    """Write scores.json, the plots, the figure images × methods and page.html; return the page.

    `sets` are the test images as each model takes them, in its size.
    """
    out.mkdir(parents=True, exist_ok=True)
    document = {"game": vars(game), "models": [p.as_json() for p in played]}
    write_atomically(out / "scores.json", (json.dumps(document, indent=1) + "\n").encode())
    sections = [_plot_section("Localisation", out / "localisation.png", _box_figure(played, game))]
    points = [(p.exponent, p.accuracy, _best(p).scores) for p in played if p.exponent is not None]
    if len({b for b, _, _ in points}) > 1:
        figure = accuracy_and_localisation(points)
        sections.append(_plot_section("Accuracy and localisation over B", out / "b.png", figure))
    sections.append(_table(played))
    chosen = [METHODS[m.method] for m in played[0].methods]
    figure = qualitative_figure(models[0], sets[0], played[0], classes, chosen, game)
    sections.append(_plot_section("Images and methods", out / "methods.png", figure))
    for p, model, images in zip(played, models, sets, strict=True):
        sections += extreme_grids(p, model, images, classes, game)
    page = out / "page.html"
    text = build_page("The grid pointing game", _lead(game), sections)
    write_atomically(page, text.encode("utf-8", "backslashreplace"))
    return page


def qualitative_figure(
    model: nn.Module,
    images: ImageSet,
    played: Played,
    classes: Sequence[str],
    methods: Sequence[Method],
    game: Game,
) -> Figure:
    """Rows of confidently classified images of different classes, columns of methods (Fig. 6).

    Ours is in colour; the other maps are red where they are positive, blue where negative.
    """
    from matplotlib.figure import Figure

    known = images.labels.cpu()
    by_class: dict[int, int] = {}  # in the order of the plan: each class's most confident image
    for index in played.plan.flatten().tolist():
        by_class.setdefault(int(known[index]), index)
    first = torch.tensor(list(by_class.values())[:ROWS])
    pixels, labels = images.batch(first)
    fig = Figure(figsize=(1.35 * (len(methods) + 1), 1.35 * len(first) + 0.4), layout="constrained")
    axes = fig.subplots(len(first), len(methods) + 1, squeeze=False)
    for row, image in enumerate(pixels.cpu()):
        axes[row, 0].imshow(render.photo(image))
        name = render.shortened(classes[int(labels[row])], 18)
        axes[row, 0].set_ylabel(name, fontsize=8, parse_math=False)
    for column, method in enumerate(methods, start=1):
        seen = game.given(model, method)
        pictures = _pictures(method, seen, pixels, labels[:, None].cpu())
        axes[0, column].set_title(method.label, fontsize=9, parse_math=False)
        for row in range(len(first)):
            axes[row, column].imshow(pictures[row, 0])
    axes[0, 0].set_title("input", fontsize=9)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[:].set_color("#c9ced8")
    return fig


def extreme_grids(
    played: Played, model: nn.Module, images: ImageSet, classes: Sequence[str], game: Game
) -> list[Section]:
    """The most and the least successful grids of a model's best method, with every cell's map."""
    best = _best(played)
    method = METHODS[best.method]
    subject = subject_of(game.given(model, method), images, played.plan, game)
    means = best.scores.mean(1)
    order = np.argsort(-means, kind="stable")
    count = min(SHOWN, len(order) // 2) or 1
    ends = {"Most successful": order[:count], "Least successful": order[::-1][:count]}
    sections = []
    for word, chosen in ends.items():
        for g in chosen.tolist():
            grids, labels = grid_images(images, played.plan[g : g + 1], game.n)
            targets = targets_of(labels.cpu(), played.outputs, game)
            pictures = _pictures(method, subject, grids, targets)[0]
            photo = png(_small(render.photo(grids[0])))
            panels = [Panel("input", photo, f"mean score {means[g]:.2f}")]
            panels += [
                Panel(
                    classes[int(label)], png(_small(_lined(pictures[k], game.n, k))), f"{score:.2f}"
                )
                for k, (label, score) in enumerate(zip(labels[0], best.scores[g], strict=True))
            ]
            title = f"{word} of {played.name}, {method.label}: grid {g + 1}"
            sections.append(Section(title, [[p] for p in panels]))
    return sections


def _best(played: Played) -> MethodScores:
    """Ours where there is one, else the method with the best mean."""
    inherent = [m for m in played.methods if METHODS[m.method].inherent]
    return inherent[0] if inherent else max(played.methods, key=lambda m: m.summary.mean)


def _pictures(method: Method, model: nn.Module, images: Tensor, targets: Tensor) -> np.ndarray:
    """uint8 [N, K, H, W, 3 or 4]."""
    if method.inherent:
        return render.colour(explain(model, images, targets).to("cpu"))
    maps = torch.cat(
        [method(model, x, t) for x, t in zip(images.split(1), targets.split(1), strict=True)]
    )
    if method.name == "rise":  # all its values are positive: show where they are above the least
        maps = maps - maps.amin((-2, -1), keepdim=True)
    return render.signed(maps)


def _small(picture: np.ndarray) -> np.ndarray:
    image = Image.fromarray(picture)
    image.thumbnail((PICTURE, PICTURE), Image.Resampling.BOX, reducing_gap=None)
    return np.asarray(image)


def _lined(picture: np.ndarray, n: int, own: int) -> np.ndarray:
    """On white, with a frame around the cell that the map should be in."""
    if picture.shape[-1] == 4:
        alpha = picture[..., 3:] / 255
        picture = (alpha * picture[..., :3] + (1 - alpha) * 255).round().astype(np.uint8)
    framed = picture.copy()
    height, width = framed.shape[0] // n, framed.shape[1] // n
    thick = max(1, min(height, width) // 40)
    top, left = own // n * height, own % n * width
    cell = framed[top : top + height, left : left + width]
    inside = cell[thick:-thick, thick:-thick].copy()
    cell[:] = (29, 35, 48)
    cell[thick:-thick, thick:-thick] = inside
    return framed


def _box_figure(played: Sequence[Played], game: Game) -> Figure:
    """Each model's methods; beside others, ours of the first model as a reference (Fig. B2)."""
    panels: dict[str, dict[str, np.ndarray]] = {}
    for i, p in enumerate(played):
        scores = {m.label: m.scores for m in p.methods}
        if i and not any(METHODS[m.method].inherent for m in p.methods):
            reference = _best(played[0])
            scores = {f"{reference.label} ({played[0].name})": reference.scores, **scores}
        panels[f"{p.name}, {p.accuracy:.1%} accurate"] = scores
    return score_boxes(panels, chance=1 / game.n**2)


def _plot_section(title: str, path: Path, figure: Figure) -> Section:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=150, format="png")
    write_atomically(path, buffer.getvalue())
    return Section(title, [[Panel("", buffer.getvalue(), wide=True)]])


def _table(played: Sequence[Played]) -> Section:
    rows = []
    for p in played:
        for m in p.methods:
            s = m.summary
            low, middle, high = s.quartiles
            rows.append(
                (
                    m.label,
                    p.name,
                    f"{s.mean:.3f}",
                    f"{s.interval[0]:.3f} – {s.interval[1]:.3f}",
                    f"{low:.3f} / {middle:.3f} / {high:.3f}",
                    f"{m.seconds:.1f}",
                )
            )
    header = ("method", "model", "mean", "95 % interval", "quartiles", "seconds")
    return Section("Scores", [], header, rows)


def _lead(game: Game) -> str:
    how = {
        "grid": "",
        "difull": " DiFull: each cell went through the network alone.",
        "dipart": " DiPart: the head saw one cell's features alone.",
    }[game.setting]
    if game.derive == "colours":
        how += " Other methods than ours derive B-cos models by the colours of the image."
    return (
        f"{game.grids} grids of {game.n}×{game.n} images of different classes, preset "
        f"“{game.preset}”, seed {game.seed}. A score is the share of a map's positive values in "
        f"the cell of the explained class; {1 / game.n**2:.3f} is chance (dashed). Boxes are "
        "quartiles, whiskers 5 % to 95 %, dots means. In the grids below, the frame marks the cell "
        f"that each map should be in.{how}"
    )
