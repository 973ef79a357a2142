"""Image files in, an album out: pictures of explanations, one page, and the numbers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from torchbcos import render
from torchbcos._arguments import naming_size
from torchbcos.checkpoint import write_atomically
from torchbcos.explain import explain, logits_of, network_input
from torchbcos.explanation import Explanation
from torchbcos.images import ImageError, find_images, read_image
from torchbcos.models import BcosModel, refuse_conventional
from torchbcos.page import Panel, Section, build_page, png
from torchbcos.targets import class_index

__all__ = ["Album", "Request", "Result", "Row", "make_album"]

BATCH = 8


@dataclass(frozen=True)
class Request:
    """What to explain of each image."""

    classes: tuple[str, ...] = ()  # names or numbers; empty for the `top` most likely
    top: int | None = None  # 1, if no classes are named
    layer: str | None = None
    unit: int | tuple[int, int, int] | None = None
    delta: bool = False  # also the first target against the second
    style: str = "paper"
    size: int | None = None  # pixels; None for the size the model was made for


@dataclass(frozen=True)
class Row:
    """One explained output."""

    name: str
    index: int
    output: float
    probability: float | None  # None for an inner unit
    residual: float

    def cells(self) -> tuple[str, str, str, str]:
        probability = "" if self.probability is None else f"{self.probability:.1%}"
        return self.name, probability, f"{self.output:.3f}", f"{self.residual:.1e}"


@dataclass(frozen=True)
class Result:
    file: Path
    rows: tuple[Row, ...]
    pictures: tuple[Path, ...]


@dataclass
class Album:
    results: list[Result] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # one sentence for each file left out
    page: Path | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "page": str(self.page) if self.page else None,
            "images": [
                {
                    "file": str(r.file),
                    "explained": [vars(row) for row in r.rows],
                    "pictures": [str(p) for p in r.pictures],
                }
                for r in self.results
            ],
            "refused": self.refused,
        }


def make_album(
    paths: Sequence[str], model: BcosModel, request: Request, out: Path, progress: Console
) -> Album:
    """Explain every image that can be read, write pictures and page.html to `out`."""
    targets = _check_request(request, model)
    album = Album()
    sections: list[Section] = []
    files = _found(paths, out, album.refused)
    names = _unique_names(files)
    used: set[str] = set()
    steps = track(
        range(0, len(files), BATCH),
        "explaining",
        console=progress,
        disable=len(files) <= BATCH,
        transient=True,
    )
    for start in steps:
        batch = _readable(files[start : start + BATCH], model, request.size, album.refused)
        if not batch:
            continue
        images = torch.stack([image for _, image in batch])
        height, width = images.shape[-2:]
        with naming_size(f"`--size` (={height}×{width} px)", model):  # as too small for a pool
            e = _explain(model, images, targets, request)
        for (file, image), one in zip(batch, _each(e), strict=True):
            section, result = _show(file, names[file], image, one, request, out, used)
            sections.append(section)
            album.results.append(result)
    if sections:
        album.page = out / "page.html"
        page = build_page(_title(len(sections)), _lead(model, request), sections)
        write_atomically(album.page, page.encode(errors="backslashreplace"))
    return album


def _check_request(request: Request, model: BcosModel) -> list[int] | None:
    """The classes asked for, as `explain` takes them; None for the most likely ones."""
    refuse_conventional(model, "W(x) of it does not sum up to its output", called="`--model`")
    count = model.num_classes or 1
    if request.delta and request.layer is not None:
        raise ValueError("`--delta` compares two classes, not units: leave out --delta or --layer.")
    for name, given in (("--classes", request.classes), ("--top", request.top)):
        if given and request.layer is not None:
            raise ValueError(f"`{name}` chooses classes, not units: leave out {name} or --layer.")
    if request.classes and request.top is not None:
        raise ValueError(f"`--top` (={request.top}) and --classes both choose: leave out one.")
    top = request.top or 1
    if request.delta and (len(request.classes) or top) < 2:
        remedy = "name two with --classes" if request.classes else "add --top 2, or --classes"
        raise ValueError(f"`--delta` compares two classes: {remedy}.")
    if request.delta and len({*request.classes[:2]}) == 1:
        raise ValueError(f"`--delta` compares {request.classes[0]} with itself: name two classes.")
    if request.style not in ("paper", "released"):
        raise ValueError(f"`--style` (={request.style!r}) must be 'paper' or 'released'.")
    if (request.layer is None) != (request.unit is None):
        raise ValueError("`--layer` and `--unit` go together: name the layer and its unit.")
    if top > count:
        raise ValueError(f"`--top` (={top}) must be at most {count}, the model's classes.")
    if not request.classes:
        return None
    wanted: list[int | str] = list(request.classes)
    if not any(name.isdecimal() for name in model.classes or ()):  # else no number is a place
        wanted = [int(c) if c.isdecimal() else c for c in request.classes]
    return [class_index(c, count, model.classes, called="`--classes`") for c in wanted]


def _found(paths: Sequence[str], out: Path, refused: list[str]) -> list[Path]:
    files: dict[Path, None] = {}
    for path in paths:
        try:
            files.update(dict.fromkeys(find_images([path], out)))
        except ImageError as error:
            refused.append(str(error))
    return list(files)


def _readable(
    files: Sequence[Path], model: BcosModel, size: int | None, refused: list[str]
) -> list[tuple[Path, Tensor]]:
    batch = []
    shape = model.input_size if size is None else (size, size)
    for file in files:
        try:
            batch.append((file, read_image(file, shape, model.in_channels)))
        except ImageError as error:
            refused.append(str(error))
    return batch


def _explain(
    model: BcosModel, images: Tensor, targets: list[int] | None, request: Request
) -> Explanation:
    device = next(model.parameters()).device
    on_device = images.to(device)
    if request.layer is not None:
        return explain(model, on_device, layer=request.layer, unit=request.unit).to("cpu")
    top = request.top or 1
    if targets is not None or top == 1:  # the most likely class is what `explain` takes by itself
        return explain(model, on_device, targets).to("cpu")
    with torch.no_grad():
        best = logits_of(model, network_input(model, on_device)).topk(top, dim=1).indices
    return explain(model, on_device, best).to("cpu")


def _each(e: Explanation) -> Iterator[Explanation]:
    for i in range(len(e)):
        yield e[i]


def _show(
    file: Path,
    name: str,
    image: Tensor,
    e: Explanation,
    request: Request,
    out: Path,
    used: set[str],
) -> tuple[Section, Result]:
    pictures, maps = render.colour(e, style=request.style)[0], render.contributions(e)[0]
    height, width = image.shape[-2:]
    groups = [[Panel("input", png(render.photo(image)), f"{width}×{height} px")]]
    files, rows = [], []
    out.mkdir(parents=True, exist_ok=True)
    for k in range(e.outputs.shape[1]):
        row = _row(e, k)
        rows.append(row)
        share = "" if row.probability is None else f", {row.probability:.1%}"
        total = e.contributions[0, k].sum().item()
        picture, contributed = png(pictures[k]), png(maps[k])
        groups.append(
            [
                Panel(row.name, picture, f"W(x) in colour{share}"),
                Panel(row.name, contributed, f"contributions, sum {total:.2f}"),
            ]
        )
        slug = re.sub(r"[^A-Za-z0-9]+", "-", row.name).strip("-")[:60] or str(row.index)
        files.append(_write(out, f"{name}-{slug}", used, picture))
        files.append(_write(out, f"{name}-{slug}-contributions", used, contributed))
    if request.delta:
        difference = png(render.delta(e, 0, 1)[0])
        title = f"{rows[0].name} − {rows[1].name}"
        groups.append([Panel(title, difference, f"orange: more for {rows[0].name}")])
        files.append(_write(out, f"{name}-delta", used, difference))
    header = ("explained", "probability", "output", "residual")
    section = Section(str(file), groups, header, [row.cells() for row in rows])
    return section, Result(file, tuple(rows), tuple(files))


def _row(e: Explanation, k: int) -> Row:
    value = e.outputs[0, k].item()
    probability = torch.sigmoid(e.outputs[0, k].float()).item() if e.layer is None else None
    name = render.target_name(e, 0, k, e.classes)
    return Row(name, int(e.targets[0, k]), value, probability, e.residual[0, k].item())


def _write(out: Path, stem: str, used: set[str], picture: bytes) -> Path:
    path = out / f"{_unused(stem, used)}.png"
    write_atomically(path, picture)
    return path


def _unused(stem: str, used: set[str]) -> str:
    """`stem`, numbered where it is taken; it is taken from now on."""
    name, number = stem, 1
    while name in used:
        number += 1
        name = f"{stem}-{number}"
    used.add(name)
    return name


def _unique_names(files: Sequence[Path]) -> dict[Path, str]:
    """A name for each file's pictures: its stem, numbered where two have the same."""
    names: dict[Path, str] = {}
    used: set[str] = set()
    for file in files:
        # As much of the name as leaves room for the class, in what every file system can write.
        text = os.fsencode(file.stem)[:120].decode("utf-8", "ignore")
        names[file] = _unused(text or "image", used)
    return names


def _title(count: int) -> str:
    return f"{count} image{'s'[: count != 1]}, explained"


def _lead(model: BcosModel, request: Request) -> str:
    what = model.architecture.name or (model.report.architecture if model.report else "network")
    opacity = {
        "paper": "Opacity as in the paper, not smoothed.",
        "released": "Opacity smoothed over 15×15 pixels, as in the authors' code.",
    }[request.style]
    return (
        f"Each output of this B-cos {what} is W(x)·x + bias, exactly. The coloured pictures show "
        "the row of W(x) that made an output, the maps what each pixel added (red) or took (blue). "
        f"{opacity} The residual is what W(x)·x + bias misses by rounding."
    )
