"""The page on ImageNet, made of nothing but the JSON files of the experiments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torchbcos.checkpoint import write_atomically
from torchbcos.plots import APART, LineStyle
from torchbcos.reproduce.ablation import units_and_growth
from torchbcos.reproduce.imagenet import ARCHITECTURES, EXPERIMENTS, PLUS
from torchbcos.reproduce.localised import draw_boxes, localisation
from torchbcos.reproduce.results import Results, read_results
from torchbcos.reproduce.tables import (
    accuracy,
    difference,
    draw,
    evidence,
    loss_curves,
    remarks,
    table,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_page"]

#: How the name of an experiment ends, what such a network is called, and its picture.
KINDS = {"": "B-cos", "-conventional": "conventional"}
FILES = {"": "imagenet-bcos.png", "-conventional": "imagenet-conventional.png"}
LOSS = "imagenet-loss.png"
HEAD = """\
# ImageNet: the paper's large networks

The four architectures of the paper's Tab. 2, each as it was (conventional) and as a B-cos network,
trained by the recipes `imagenet-…`, which have the paper's settings; then DenseNet-121 with longer
training, training⁺, and the paper's ablation of units and growth.

```
torchbcos reproduce imagenet --data data/imagenet --out out/imagenet
torchbcos reproduce imagenet --page --results out/imagenet/results
```

This page is made by the second command from the files in `{results}`. The paper's conventional
networks are torchvision's; here they are trained as the B-cos ones are. A localisation score is the
share of a map's positive contributions that lies in the cell of the explained class, in grids of
3×3 images of different classes (672 pixels; Inception-v3: 897), with maps smoothed 15×15; chance is
0.111."""


def write_page(results: Path, docs: Path) -> list[Path]:
    """Write docs/imagenet.md and its plots from results/*.json; return what was written."""
    found = read_results(results, EXPERIMENTS)
    figures: dict[str, Figure | None] = {
        file: draw_boxes(found, KINDS, end) for end, file in FILES.items()
    }
    written = draw({**figures, LOSS: _losses(found)}, docs / "pictures")
    shown = {path.name for path in written}
    sections = [
        "\n".join([HEAD.format(results=results.as_posix()), *remarks(found, EXPERIMENTS)]),
        _accuracies(found),
        localisation(found, KINDS, {end: file for end, file in FILES.items() if file in shown}),
        units_and_growth(found, EXPERIMENTS),
        f"## Loss curves\n\n![Loss over the epochs](pictures/{LOSS})" if LOSS in shown else "",
        evidence(found),
    ]
    page = docs / "imagenet.md"
    write_atomically(page, ("\n\n".join(filter(None, sections)) + "\n").encode())
    return [page, *written]


def _accuracies(found: Results) -> str:
    rows = []
    for name, title, paper_conventional, paper_bcos in (
        *((arch, *reported) for arch, reported in ARCHITECTURES.items()),
        PLUS,
    ):
        base, r = found.get(f"{name}-conventional"), found.get(name)
        paper = [
            f"{paper_conventional}",
            f"{paper_bcos}",
            f"{paper_bcos - paper_conventional:+.1f}",
        ]
        rows.append([title, accuracy(base), accuracy(r), difference(r, base), *paper])
    header = [
        "network", "conventional, %", "B-cos, %", "difference", "paper: conventional", "B-cos",
        "difference",
    ]  # fmt: skip
    return "\n\n".join(["## Accuracy (Tab. 2)", table(header, rows)])


def _losses(found: Results) -> Figure | None:
    """Of Tab. 2's networks: a colour for each, dotted for the conventional one."""
    looks: dict[str, tuple[str, LineStyle]] = {}
    for name, colour in zip((*ARCHITECTURES, PLUS[0]), APART, strict=False):
        looks |= {name: (colour, "-"), f"{name}-conventional": (colour, ":")}
    return loss_curves({name: r for name, r in found.items() if name in looks}, looks)
