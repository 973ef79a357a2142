"""One self-contained page of sheets; a sheet is drawn when it is scrolled to.

Pictures of a unit are tiles of one sprite, an image is stored once whatever the number of units it
excites, and all of it is text that the browser does not look into before it is needed, so that
thousands of units stay quick to open.
"""

from __future__ import annotations

import base64
import html
import io
import json
import re
from collections.abc import Iterable
from importlib import resources
from typing import Any

import numpy as np
import torch
from PIL import Image

from torchbcos import render
from torchbcos.neurons.collecting import ImageSet
from torchbcos.neurons.sheet import Sheet, Sight
from torchbcos.neurons.table import Neurons

__all__ = ["build_page"]

COLUMNS = 8  # tiles in a row of a sprite
LARGEST = 224  # pixels: larger images are stored smaller
LOSSLESS = 64  # pixels: smaller pictures are shown pixel by pixel
CLASSES = 10  # bars of a histogram


def build_page(title: str, neurons: Neurons, images: ImageSet, sheets: Iterable[Sheet]) -> str:
    """The page's text, with every picture inside and no link."""
    units: list[str] = []
    shown: set[int] = set()
    second = ""
    for sheet in sheets:
        units.append(_section(sheet, neurons))
        shown.update(sight.image for sight in sheet.first)
        if any(sight is not None for sight in sheet.second):
            second = ", orange ones its highest place outside of those"
    pictures = [_stored(f"image-{i}", _image(images, i)) for i in sorted(shown)]
    page = (resources.files("torchbcos.neurons") / "sheets.html").read_text(encoding="utf-8")
    lead = (
        f"Each unit with those of {neurons.count} images that excite it most. Blue squares mark "
        f"where it is highest{second}; the pictures below are its row of W(x) there, in colour, "
        "then those of the next images."
    )
    values = {
        "title": html.escape(title),
        "lead": html.escape(lead),
        "classes": _stored("classes", neurons.classes),
        "units": "\n".join(units),
        "images": "\n".join(pictures),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], page)


def _section(sheet: Sheet, neurons: Neurons) -> str:
    layer, unit = sheet.layer.name, sheet.unit
    statistics, skew = neurons.units(layer), neurons.skew[layer]
    highest, bits = statistics.values[unit, 0].item(), skew.divergence[unit].item()
    counts = neurons.histogram(layer)[unit]
    order = counts.argsort(descending=True, stable=True)
    order = order[counts[order] > 0]
    expected = neurons.class_counts / neurons.count * counts.sum()
    every = [*sheet.first, *(s for s in sheet.second if s is not None), *sheet.rest]
    tiles = {id(sight): i for i, sight in enumerate(every)}

    def told(sight: Sight | None) -> list[Any] | None:
        if sight is None:
            return None
        height, width = sight.contributions.shape
        top, left, bottom, right = sight.box
        shares = [left / width, top / height, (right - left) / width, (bottom - top) / height]
        return [
            tiles[id(sight)],
            sight.image,
            sight.label,
            float(f"{sight.value:.4g}"),
            [round(share, 4) for share in shares],
        ]

    document = {
        "text": (
            f"highest {highest:.3g} · mean {statistics.mean[unit]:.3g} ± {statistics.std[unit]:.3g}"
            f" · above {neurons.active_above:g} on {statistics.active[unit]:.1%} of the images"
        ),
        "skew": (
            f"Classes of its {int(counts.sum())} best images: {bits:.2f} bits from those of all "
            f"images (the lines), p {_small(skew.p[unit].item())}, "
            f"q {_small(skew.q[unit].item())}."
        ),
        "sprite": _sprite([sight.picture for sight in every]),
        "side": every[0].picture.shape[0],
        "columns": COLUMNS,
        "rows": -(-len(every) // COLUMNS),
        "first": [told(sight) for sight in sheet.first],
        "second": [told(sight) for sight in sheet.second],
        "rest": [told(sight) for sight in sheet.rest],
        "bars": [[int(k), int(counts[k]), round(expected[k].item(), 2)] for k in order[:CLASSES]],
        "others": [len(order[CLASSES:]), int(counts[order[CLASSES:]].sum())],
        "of": int(counts.sum()),
    }
    names = " ".join(neurons.classes[int(k)] for k in order[:3])
    return (
        f'<section class=unit data-highest="{highest:.6g}" data-bits="{bits:.6g}" '
        f'data-words="{html.escape(f"{layer} · unit {unit} {names}".lower())}">'
        f"<h2>{html.escape(layer)} · unit {unit}</h2>{_stored('', document)}</section>"
    )


def _small(p: float) -> str:
    return f"= {p:.2g}" if p >= 1e-4 else "< 0.0001"


def _stored(name: str, value: Any) -> str:
    """JSON that the browser keeps as text until it is asked for."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    identity = f" id={name}" if name else ""
    return f'<script type="application/json"{identity}>{text}</script>'


def _sprite(pictures: list[np.ndarray]) -> str:
    side, rows = pictures[0].shape[0], -(-len(pictures) // COLUMNS)
    sheet = np.zeros((rows * side, COLUMNS * side, 4), np.uint8)
    for i, picture in enumerate(pictures):
        y, x = i // COLUMNS * side, i % COLUMNS * side
        sheet[y : y + side, x : x + side] = picture
    return _data(Image.fromarray(sheet), lossless=side <= LOSSLESS)


def _image(images: ImageSet, index: int) -> str:
    picture = Image.fromarray(render.photo(images.batch(torch.tensor([index]))[0][0]))
    lossless = max(picture.size) <= LOSSLESS
    picture.thumbnail((LARGEST, LARGEST))
    return _data(picture, lossless)


def _data(picture: Image.Image, lossless: bool) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "WEBP", lossless=lossless, quality=80)
    return "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
