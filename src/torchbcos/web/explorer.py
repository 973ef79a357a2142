"""What the page asks for: predictions, pictures and units of images that are kept in memory."""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchbcos import render
from torchbcos.explain import explain, logits_of, network_input
from torchbcos.explanation import Explanation
from torchbcos.images import read_image
from torchbcos.layers import BcosConv2d
from torchbcos.models import BcosModel, refuse_conventional
from torchbcos.page import png
from torchbcos.tap import tap

__all__ = ["Explorer", "NotThereError"]

IMAGES = 32  # kept in memory, with as many results as follows; what was not used for longest goes
RESULTS = 256
TOP = 5  # classes that are told with an image
UNITS = 6  # that respond most to a place

T = TypeVar("T")


class NotThereError(LookupError):
    """An image, class, layer or unit that there is not; the message is one sentence."""


@dataclass(frozen=True)
class _Kept:
    image: Tensor  # [1, C, H, W]
    logits: Tensor  # [K]


class Explorer:
    """A model and the images that were shown to it. All methods can be called from any thread."""

    def __init__(self, model: BcosModel, name: str, samples: tuple[Path, ...] = ()) -> None:
        refuse_conventional(model, "has no W(x) to show", called=f"`model` (={name!r})")
        self.model = model.eval()
        self.name = name
        self.samples = samples
        self._images: OrderedDict[str, _Kept] = OrderedDict()
        self._results: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.RLock()

    @property
    def layers(self) -> list[str]:
        """Whose units have places in the image."""
        return [n for n, layer in self.model.bcos_layers() if isinstance(layer, BcosConv2d)]

    def class_names(self) -> list[str]:
        count = self.model.num_classes or 0
        return list(self.model.classes or map(str, range(count)))

    def about(self) -> dict[str, Any]:
        height, width = self.model.input_size
        return {
            "name": self.name,
            "architecture": self.model.architecture.name or type(self.model.network).__name__,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "height": height,
            "width": width,
            "classes": self.class_names(),
            "layers": self.layers,
            "samples": [path.name for path in self.samples],
        }

    # Images.

    def add(self, content: bytes, name: str) -> dict[str, Any]:
        """An image file's content; the same image gets the same id."""
        file: Any = _NamedBytes(content)
        file.name = name or "this file"
        return self._keep(read_image(file, self.model.input_size, self.model.in_channels), name)

    def add_sample(self, index: int) -> dict[str, Any]:
        path = self._sample(index)
        return self._keep(
            read_image(path, self.model.input_size, self.model.in_channels), path.name
        )

    def thumbnail(self, index: int) -> bytes:
        return png(render.photo(read_image(self._sample(index), (96, 96))))

    def _sample(self, index: int) -> Path:
        if not 0 <= index < len(self.samples):
            raise NotThereError(f"there is no sample {index}: there are {len(self.samples)}.")
        return self.samples[index]

    def _keep(self, image: Tensor, name: str) -> dict[str, Any]:
        key = hashlib.sha256(image.numpy().tobytes()).hexdigest()[:16]
        device = next(self.model.parameters()).device
        with self._lock:
            if key not in self._images:
                batch = image[None].to(device)
                with torch.no_grad():
                    logits = logits_of(self.model, network_input(self.model, batch))[0]
                self._images[key] = _Kept(batch, logits.float().cpu())
                while len(self._images) > IMAGES:
                    self._images.popitem(last=False)
            kept = self._image(key)
        best = kept.logits.topk(min(TOP, len(kept.logits))).indices.tolist()
        return {"id": key, "name": name, "predictions": [self._prediction(kept, k) for k in best]}

    def _image(self, key: str) -> _Kept:
        if key not in self._images:
            raise NotThereError("this image is not in memory any more: open it again.")
        self._images.move_to_end(key)
        return self._images[key]

    def _prediction(self, kept: _Kept, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "name": self.class_names()[index],
            "logit": kept.logits[index].item(),
            "probability": kept.logits[index].sigmoid().item(),
        }

    def picture_of_image(self, key: str) -> bytes:
        with self._lock:
            return png(render.photo(self._image(key).image[0]))

    # Classes.

    def explained(self, key: str, index: int) -> dict[str, Any]:
        """The numbers of one class."""
        with self._lock:
            kept, e = self._image(key), self._explanation(key, index)
        return {
            **self._prediction(kept, index),
            "sum": e.contributions.double().sum().item(),
            "bias": e.bias.item(),
            "residual": e.residual.item(),
        }

    def contributions(self, key: str, index: int) -> bytes:
        """Of all pixels, row by row, in float32."""
        return self._explanation(key, index).contributions.float().cpu().numpy().tobytes()

    def colour(self, key: str, index: int, style: str) -> bytes:
        if style not in ("paper", "released"):
            raise NotThereError(f"`style` (={style!r}) must be 'paper' or 'released'.")
        return self._made(
            key,
            ("colour", index, style),
            lambda _: png(render.colour(self._explanation(key, index), style=style)[0, 0]),
        )

    def map(self, key: str, index: int) -> bytes:
        return self._made(
            key,
            ("map", index),
            lambda _: png(render.contributions(self._explanation(key, index))[0, 0]),
        )

    def delta(self, key: str, first: int, second: int) -> bytes:
        """Where the first class (orange) and the second (blue) have the larger contribution."""

        def make(_: _Kept) -> bytes:
            one, two = (self._explanation(key, k).contributions[0, 0] for k in (first, second))
            return png(
                render.signed(one - two, positive=render.ORANGE, negative=render.AZURE),
            )

        return self._made(key, ("delta", first, second), make)

    def _explanation(self, key: str, index: int) -> Explanation:
        count = len(self.class_names())
        if not 0 <= index < count:
            raise NotThereError(f"there is no class {index}: the model has {count}.")
        return self._made(
            key, ("class", index), lambda kept: explain(self.model, kept.image, targets=[index])
        )

    # Inner units.

    def units(self, key: str, layer: str, x: float, y: float) -> dict[str, Any]:
        """Those of `layer` that respond most to the place (x, y), in 0..1 from the top left."""
        if not (0 <= x <= 1 and 0 <= y <= 1):
            raise NotThereError(f"the place ({x:g}, {y:g}) must be in 0..1, from the top left.")
        activation = self._activation(key, layer)
        height, width = activation.shape[-2:]
        row, column = min(int(y * height), height - 1), min(int(x * width), width - 1)
        here = activation[:, row, column]
        best = here.topk(min(UNITS, len(here))).indices.tolist()
        return {
            "layer": layer,
            "row": row,
            "column": column,
            "height": height,
            "width": width,
            "units": [{"unit": unit, "value": here[unit].item()} for unit in best],
        }

    def unit_picture(self, key: str, layer: str, unit: int, row: int, column: int) -> bytes:
        channels, height, width = self._activation(key, layer).shape
        if not (0 <= unit < channels and 0 <= row < height and 0 <= column < width):
            raise NotThereError(
                f"there is no unit {unit} at ({row}, {column}): {layer} has {channels} on "
                f"{height}×{width} places."
            )

        def make(kept: _Kept) -> bytes:
            e = explain(self.model, kept.image, layer=layer, unit=(unit, row, column))
            return png(render.colour(e)[0, 0])

        return self._made(key, ("unit", layer, unit, row, column), make)

    def _activation(self, key: str, layer: str) -> Tensor:
        if layer not in self.layers:
            raise NotThereError(f"`layer` (={layer!r}) is no layer of the page's list.")

        def make(kept: _Kept) -> Tensor:
            x = network_input(self.model, kept.image)
            with torch.no_grad():
                return tap(self.model.network, layer, x)[0].float().cpu()

        return self._made(key, ("activation", layer), make)

    def _made(self, key: str, what: Hashable, make: Callable[[_Kept], T]) -> T:
        """`make(image)`, or what it gave before; one thing at a time is computed."""
        with self._lock:
            kept = self._image(key)
            if (key, what) not in self._results:
                self._results[key, what] = make(kept)
            self._results.move_to_end((key, what))
            found: T = self._results[key, what]
            while len(self._results) > RESULTS:
                self._results.popitem(last=False)
            return found


class _NamedBytes(io.BytesIO):
    """A file in memory that messages can name."""

    name: str

    def __str__(self) -> str:
        return self.name
