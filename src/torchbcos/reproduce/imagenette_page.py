"""The page on Imagenette, made of nothing but the JSON files of the experiments."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torchbcos.checkpoint import write_atomically
from torchbcos.reproduce.ablation import units_and_growth
from torchbcos.reproduce.imagenette import EXPERIMENTS
from torchbcos.reproduce.imagenette_accuracies import accuracies
from torchbcos.reproduce.imagenette_plots import FILES, KINDS, draw_figures
from torchbcos.reproduce.localised import localisation, median
from torchbcos.reproduce.results import (
    Result,
    Results,
    read_json,
    read_repeats,
    read_results,
)
from torchbcos.reproduce.tables import (
    draw,
    evidence,
    listed,
    minutes,
    remarks,
    table,
    tries,
)

__all__ = ["write_page"]


def write_page(results: Path, docs: Path) -> list[Path]:
    """Write docs/imagenette.md and its plots from results/*.json; return what was written."""
    found = read_results(results, EXPERIMENTS)
    written = draw(draw_figures(found), docs / "pictures")
    shown = {path.name for path in written}
    units = results / "neurons.json"
    sections = [
        _head(found, results),
        accuracies(found, read_repeats(results, EXPERIMENTS)),
        localisation(found, KINDS, {end: file for end, file in FILES.items() if file in shown}),
        _ablation(found),
        _units(read_json(units) if units.exists() else None),
        _bundled(found.get("small")),
        tries(results, EXPERIMENTS, partial(median, method="ours")),
        _losses(shown),
        _limits(),
        evidence(found),
    ]
    page = docs / "imagenette.md"
    write_atomically(page, ("\n\n".join(filter(None, sections)) + "\n").encode())
    return [page, *written]


# The sections.


def _ablation(found: Results) -> str:
    words = "Fewer parameters here, as there are ten classes in place of a thousand."
    return f"{units_and_growth(found, EXPERIMENTS)}\n\n{words}"


def _head(found: Results, results: Path) -> str:
    grids = sorted({m["grids"] for r in found.values() for m in r.methods.values()})
    lines = [
        "# Imagenette: the paper's large networks on photographs",
        "",
        "Imagenette is ten classes of ImageNet, 9,469 photographs to train with and 3,925 to test, "
        "at 224×224 pixels (for Inception-v3 enlarged to 299). On it the four architectures of the "
        "paper's Tab. 2 are trained from scratch, each as it was (conventional), as a B-cos "
        "network without norms and with B = 2, as the paper has it, and as one with uncentred "
        "batch norms, which are dynamic-linear as well, and B = 2.5; the three of an architecture "
        "with the same data, augmentation and epochs. Beside them stand the paper's numbers for "
        "ImageNet, which is another and harder task; the conventional networks there are "
        "torchvision's pretrained ones.",
        "",
        "```",
        "torchbcos reproduce imagenette --data data/imagenette --out out/imagenette --jobs 4",
        "torchbcos reproduce imagenette --page --results out/imagenette/results",
        "```",
        "",
        f"This page is made by such a second command from the files in `{results.as_posix()}`; "
        "only notes on single results, below, are written by hand. A localisation score is the "
        "share of a map's positive contributions that lies in the cell of the explained class, in "
        "grids of 3×3 images of different classes at their own resolution (672 pixels; "
        "Inception-v3: 897), with maps smoothed 15×15; chance is 0.111."
        + (f" Methods were scored on {listed(map(str, grids), 'or')} grids." if grids else ""),
        *remarks(found, EXPERIMENTS),
    ]
    return "\n".join(lines)


def _units(document: Mapping[str, Any] | None) -> str:
    parts = ["## Inner units"]
    if document is None:
        return "\n\n".join([*parts, "Missing."])
    top, layers = document["top"], document["layers"]
    parts.append(
        f"Of {document['what']}, in a run with {100 * document['accuracy']:.2f} %, over "
        f"{document['images']} test images: units of an early, a middle and a late layer. For each "
        "unit stand its five largest activations, each in another image, how far the classes of "
        f"its {top} best images are from those of all (bits; q is the chance of that, adjusted "
        "for the number of units), and the classes of these images. Their explanations are "
        "pictures of the data, and so are not here: the first command above leaves them in "
        "`runs/resnet34-norm/units.html`."
    )
    for name, layer in layers.items():
        height, width = layer["map"]
        parts.append(f"### `{name}`: {layer['units']} units of {height}×{width} positions")
        rows = []
        for kind in ("most_active", "most_skewed"):
            for unit, u in layer[kind].items():
                largest = ", ".join(f"{v:.3g}" for v in u["activations"])
                named = ", ".join(f"{c} {n}" for c, n in u["classes"][:3])
                rest = sum(n for _, n in u["classes"][3:])
                rows.append([
                    unit, kind.replace("_", " "), largest, f"{u['bits']:.2f}", f"{u['q']:.2g}",
                    named + (f", others {rest}" if rest else ""),
                ])  # fmt: skip
        header = ["unit", "", "largest activations", "bits", "q", f"best {top} images"]
        parts.append(table(header, rows))
        parts.append(f"{layer['skewed']} of {layer['units']} units are skewed beyond chance.")
    skewed = {
        n: next(iter(v["most_skewed"].items())) for n, v in layers.items() if v["most_skewed"]
    }
    if skewed:
        counts = [dict(u["classes"]) for _, u in skewed.values()]
        classes = sorted({c for each in counts for c in each}, key=str.lower)
        rows = [[c, *(str(each.get(c, 0)) for each in counts)] for c in classes]
        header = ["class", *(f"unit {unit} of `{n}`" for n, (unit, _) in skewed.items())]
        parts.append("### Class histograms of the most skewed units (as Fig. B4, there of 500)")
        parts += [f"Of the {top} best images of each:", table(header, rows)]
    return "\n\n".join(parts)


def _bundled(r: Result | None) -> str:
    parts = ["## The bundled model"]
    if r is None or "bundle" not in r.document:
        return "\n\n".join([*parts, "Missing."])
    d, config = r.document["bundle"], r.document["config"]
    options = [f"{name} = {value}" for name, value in config["options"].items()]
    rows = [
        ["network", ", ".join([config["arch"], *options])],
        ["parameters", f"{r.document['parameters'] / 1e6:.2f} M"],
        ["file, in float16", f"{d['bytes'] / 2**20:.1f} MiB"],
        [f"accuracy before rounding, computed in {_computed_in(r)}", f"{r.accuracy:.2f} %"],
        ["accuracy of the float16 weights, computed in float32", f"{100 * d['accuracy']:.2f} %"],
        ["localisation, median", median(r, "ours")],
        ["training", minutes(r)],
    ]
    command = f"```\ntorchbcos evaluate --model {d['name']} --data data/imagenette\n```"
    return "\n\n".join([*parts, table([f"`{d['name']}`", ""], rows), command])


def _computed_in(r: Result) -> str:
    """A result that was put together from the log has the accuracy in the training's precision."""
    logged = r.document["curve"]["test_loss"][-1] == float(f"{r.document['loss']:.5g}")
    half = r.document["config"].get("precision") == "bf16-mixed"
    return "bfloat16" if logged and half else "float32"


def _losses(shown: set[str]) -> str:
    if "imagenette-loss.png" not in shown:
        return "\n\n".join(["## Loss curves", "Missing."])
    picture = "![Loss over the epochs](pictures/imagenette-loss.png)"
    words = (
        "A colour for each architecture, a style for each kind of network; `small`, the bundled "
        "model, is black."
    )
    return "\n\n".join(["## Loss curves", picture, words])


def _limits() -> str:
    return "\n\n".join([
        "## What this shows, and what it does not",
        "It shows how a B-cos network compares with the network it was converted from on few "
        "photographs, and whether its own explanations localise better than post-hoc ones. Within "
        "an architecture recipes differ in the norms, B, the length of the weights and, for the "
        "conventional VGG-11, the learning rate (2.5e-4 in place of 1e-3); Inception-v3 has other "
        "sizes of images than the others.",
        "These networks follow the paper in architecture, loss and, without norms, B. Unlike the "
        "paper's, their γ and T are set by `calibrate`; training is in bfloat16, "
        "with batches of 64, a learning rate of 1e-3 with warm-up and a cosine (the paper: 256, "
        "2.5e-4, divided by 10 after 60 epochs), on crops of at least a quarter of each image that "
        "grow from 128 to 192 pixels (Inception-v3: 160 to 224), while all are tested at full "
        "size; Inception-v3 has no auxiliary loss. The recipes `imagenet-…` have the paper's "
        "settings.",
        "It does not show the paper's accuracies: ten classes "
        "that differ in nearly everything are easier than a thousand that may differ in a detail, "
        "and 9,469 images are too few to learn what ImageNet's million teaches. Each number is one "
        "seed; with 3,925 test images a difference of two accuracies near 91 % is uncertain by "
        "up to about ±1.3 points, so differences below that decide nothing by themselves. "
        "Imagenette has no third split: recipes were chosen by the same test images that are "
        "reported. That flatters the B-cos networks, for which settings were tried (above), more "
        "than the conventional ones, which had no tries of their own. In the pointing game "
        "nine of the ten classes are in every grid, and only images that the network gets right "
        "take part, another choice of them for each network.",
    ])  # fmt: skip
