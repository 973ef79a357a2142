"""What is known of every unit over a data set: one safetensors file, read layer by layer.

The header's `torchbcos_neurons` entry is JSON: `format`, `version`, `count` (images), `top`,
`active_above`, `classes` (names), `model` (a fingerprint of the weights), `about` (what the caller
said of data and model) and `layers`, each with `name`, `units`, `height`, `width` and
`channels_last`. The tensors, for a layer L of C units and the k best images of each:

    L/values      [C, k]  the largest activation in each of the unit's best images, largest first
    L/images      [C, k]  int32, which images; of equal values the lower image comes first
    L/positions   [C, k]  int32, where on the map: y · width + x, the first of equal ones
    L/mean, L/std            [C]  float64, of the activation over all images and positions
    L/peak_mean, L/peak_std  [C]  float64, of the largest activation of an image
    L/active                 [C]  float64, the share of images with an activation above the limit
    labels        [N]     int32, the class of every image
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from torchbcos._version import __version__
from torchbcos.checkpoint import write_atomically
from torchbcos.neurons.skew import Skew, adjusted, chance, divergence, histogram

__all__ = [
    "Layer",
    "Neurons",
    "NeuronsError",
    "Ranked",
    "Units",
    "largest",
    "write",
]

FORMAT = 1
HEADER = "torchbcos_neurons"


class NeuronsError(ValueError):
    """A file of neurons that cannot be read or used; the message says why and what to do."""


@dataclass(frozen=True)
class Layer:
    """A layer and the map that each of its units has."""

    name: str
    units: int
    height: int
    width: int
    channels_last: bool = False  # [N, H, W, C], as from a linear layer over positions

    def maps(self, out: Tensor) -> Tensor:
        """[N, C, H, W] from the layer's output."""
        if self.channels_last:
            return out.movedim(-1, 1)
        return out[:, :, None, None] if out.dim() == 2 else out


@dataclass(frozen=True)
class Units:
    """The units of one layer, over a data set."""

    layer: Layer
    values: Tensor  # [C, k] the largest activation in each of a unit's best images
    images: Tensor  # [C, k] which images these are
    positions: Tensor  # [C, k, 2] (y, x) on the map
    mean: Tensor  # [C] of the activation, over all images and positions
    std: Tensor  # [C]
    peak_mean: Tensor  # [C] of the largest activation of an image
    peak_std: Tensor  # [C]
    active: Tensor  # [C] the share of images with an activation above the limit


class Ranked(NamedTuple):
    """A unit, and the score it was found by."""

    layer: str
    unit: int
    score: float


class Neurons:
    """A file that `collect` wrote. Opening reads the header; a layer is read when asked for."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        about = self._header()
        self.count: int = about["count"]
        self.top: int = about["top"]
        self.active_above: float = about["active_above"]
        self.classes: tuple[str, ...] = tuple(about["classes"])
        self.fingerprint: str = about["model"]
        self.about: dict[str, Any] = about["about"]
        self.layers = {each["name"]: Layer(**each) for each in about["layers"]}
        self.units = cache(self._units)

    def _header(self) -> dict[str, Any]:
        if not self.path.is_file():
            raise NeuronsError(f"{self.path} does not exist: make it with torchbcos neurons.")
        try:
            with safetensors.safe_open(self.path, "pt") as file:
                text = (file.metadata() or {}).get(HEADER)
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise NeuronsError(
                f"{self.path} is no intact file of neurons: make it anew."
            ) from error
        if text is None:
            raise NeuronsError(f"{self.path} holds no neurons: name a file that collect wrote.")
        about: dict[str, Any] = json.loads(text)
        if about.get("format") != FORMAT:
            raise NeuronsError(
                f"{self.path} has format {about.get('format')}, this version reads {FORMAT}: make "
                "it anew."
            )
        return about

    def _read(self, *names: str) -> list[Tensor]:
        with safetensors.safe_open(self.path, "pt") as file:
            return [file.get_tensor(name) for name in names]

    def _units(self, layer: str) -> Units:
        """The statistics of a layer's units."""
        where = self._layer(layer)
        names = ("values", "images", "positions", "mean", "std", "peak_mean", "peak_std", "active")
        values, images, flat, *moments = self._read(*(f"{layer}/{name}" for name in names))
        positions = torch.stack([flat // where.width, flat % where.width], 2)
        return Units(where, values, images, positions, *moments)

    def _layer(self, name: str) -> Layer:
        if name not in self.layers:
            raise NeuronsError(
                f"`layer` (={name!r}) is not in {self.path}: it has {', '.join(self.layers)}."
            )
        return self.layers[name]

    @cached_property
    def labels(self) -> Tensor:  # [N]
        return self._read("labels")[0].long()

    @cached_property
    def class_counts(self) -> Tensor:  # [K] images of each class in the whole set
        return torch.bincount(self.labels, minlength=len(self.classes))

    def histogram(self, layer: str) -> Tensor:
        """[C, K]: how many of each unit's best images are of each class."""
        return histogram(self.labels[self.units(layer).images], len(self.classes))

    @cached_property
    def skew(self) -> dict[str, Skew]:
        """How class-skewed each unit is, by layer; `q` counts all units of the file as tests."""
        far = {name: divergence(self.histogram(name), self.class_counts) for name in self.layers}
        p = chance(torch.cat(list(far.values())), min(self.top, self.count), self.class_counts)
        q = adjusted(p)
        sizes = [layer.units for layer in self.layers.values()]
        return {
            name: Skew(far[name], *both)
            for name, *both in zip(self.layers, p.split(sizes), q.split(sizes), strict=True)
        }

    def most_active(self, layer: str, count: int = 10) -> list[Ranked]:
        """The units of a layer with the largest activations anywhere in the set."""
        return largest({layer: self.units(layer).values[:, 0]}, count)

    def most_skewed(
        self, count: int = 10, layers: Sequence[str] | None = None, *, level: float = 0.05
    ) -> list[Ranked]:
        """The units whose best images share out most unevenly among the classes.

        By the divergence in bits, and only those that are not so by chance (q ≤ `level`). Of
        equally skewed units those come first that stand out more: whose best images excite them
        more deviations beyond what an image usually does.
        """
        scores, ties = {}, {}
        for name in layers if layers is not None else self.layers:
            self._layer(name)
            skew, units = self.skew[name], self.units(name)
            bits = skew.divergence.round(decimals=9)  # the same counts of other classes are a tie
            scores[name] = torch.where(skew.q <= level, bits, -torch.inf)
            usual = units.peak_std.clamp(min=torch.finfo(torch.float64).tiny)
            ties[name] = (units.values.double().mean(1) - units.peak_mean) / usual
        return largest(scores, count, ties)

    def __repr__(self) -> str:
        units = sum(layer.units for layer in self.layers.values())
        return (
            f"Neurons of {self.path}: {units} units, {len(self.layers)} "
            f"layer{'s'[: len(self.layers) != 1]}, the {self.top} best of {self.count} images each"
        )


def largest(
    scores: dict[str, Tensor], count: int, ties: dict[str, Tensor] | None = None
) -> list[Ranked]:
    """The units with the largest scores [C]; those of −∞ are left out."""
    if count < 1:
        raise ValueError(f"`count` (={count}) must be at least 1 unit.")
    places = [(name, unit) for name, values in scores.items() for unit in range(len(values))]
    flat = torch.cat(list(scores.values())).double()
    order = torch.arange(len(flat))
    for key in ([torch.cat(list(ties.values()))] if ties else []) + [flat]:
        order = order[key[order].sort(descending=True, stable=True).indices]
    found = [Ranked(places[i][0], places[i][1], flat[i].item()) for i in order[:count].tolist()]
    return [unit for unit in found if unit.score > -torch.inf]


def write(
    path: Path,
    about: dict[str, Any],
    layers: Sequence[Layer],
    statistics: dict[str, Tensor],  # each [U, …], the units of all layers in order
    labels: Tensor,
) -> None:
    tensors = {"labels": labels.cpu().to(torch.int32)}
    sizes = [layer.units for layer in layers]
    for name, values in statistics.items():
        for layer, part in zip(layers, values.cpu().split(sizes), strict=True):
            tensors[f"{layer.name}/{name}"] = part.clone()
    document = {
        "format": FORMAT,
        "version": __version__,
        **about,
        "layers": [asdict(layer) for layer in layers],
    }
    write_atomically(path, safetensors.torch.save(tensors, metadata={HEADER: json.dumps(document)}))
