"""The best images of a unit and what it saw in them, as in the paper's Fig. 7 and 8."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from torchbcos import render
from torchbcos.explain import explain
from torchbcos.explanation import Explanation
from torchbcos.models import BcosModel, in_mode
from torchbcos.neurons.collecting import ImageSet, fingerprint
from torchbcos.neurons.table import Layer, Neurons, NeuronsError, Ranked
from torchbcos.wrappers import bcos_within

__all__ = ["Sheet", "Sight", "sheets"]

FIRST, REST = 7, 30  # as in the paper
CROP = 72  # pixels, the paper's patch; in small images at most half of the side


@dataclass(frozen=True)
class Sight:
    """What a unit saw at one position of one image."""

    image: int
    label: int
    value: float  # its activation there
    position: tuple[int, int]  # (y, x) on the layer's map
    box: tuple[int, int, int, int]  # (top, left, bottom, right) of the picture in the image
    picture: np.ndarray  # uint8 [S, S, 4]: its row of W₁→l(x) in that box, in colour
    contributions: Tensor  # [H, W] what each pixel of the image added


@dataclass(frozen=True)
class Sheet:
    """A unit's best images, best first."""

    layer: Layer
    unit: int
    first: tuple[Sight, ...]  # the best few, to be shown with their images
    second: tuple[Sight | None, ...]  # the second-highest places in those, where asked for
    rest: tuple[Sight, ...]  # the next ones, to be shown as a strip


def sheets(
    model: nn.Module,
    images: ImageSet,
    neurons: Neurons,
    units: Iterable[tuple[str, int] | Ranked],
    *,
    first: int = FIRST,
    rest: int = REST,
    second: bool = False,
    size: int | None = None,
) -> Iterator[Sheet]:
    """A sheet for each of `units`, which are (layer, unit), explained one after the other.

    Pictures show `size`×`size` pixels around the unit's position, by default its receptive field,
    or the paper's 72 pixels (of small images, half the side) where that is larger. With `second`
    there are also those of the highest activation outside of each of the first pictures: the very
    next one is nearly always the neighbour of the highest, and shows the same.
    """
    model = bcos_within(model)
    if fingerprint(model) != neurons.fingerprint:
        raise NeuronsError(f"`model` is not the one that {neurons.path} was made with: load that.")
    if len(images) != neurons.count or not torch.equal(images.labels.cpu().long(), neurons.labels):
        raise NeuronsError(
            f"`images` (={len(images)} images) are not the {neurons.count} that {neurons.path} was "
            "made from: give the same set in the same order."
        )
    if first < 1 or rest < 0:
        raise ValueError(f"`first` (={first}) and `rest` (={rest}) must be at least 1 and 0.")
    for name, unit, *_ in units:
        known = neurons.units(name)
        if not 0 <= unit < known.layer.units:
            raise NeuronsError(
                f"`unit` (={unit}) must be from 0 to {known.layer.units - 1}: layer {name!r} has "
                f"{known.layer.units} units."
            )
        numbers = known.images[unit, : first + rest].long()
        seen = _Pass(model, images, neurons, known.layer, unit, numbers, size)
        with in_mode(model, training=False):
            sights = seen.sights(known.positions[unit, : len(numbers)])
            _check(known.values[unit, : len(numbers)], sights, neurons)
            others: tuple[Sight | None, ...] = (None,) * len(sights[:first])
            if second:
                others = seen.seconds(sights[:first])
        yield Sheet(known.layer, unit, tuple(sights[:first]), others, tuple(sights[first:]))


def _check(stored: Tensor, sights: list[Sight], neurons: Neurons) -> None:
    values = torch.tensor([sight.value for sight in sights], dtype=torch.float64)
    off = (values - stored.double()).abs().amax()
    if off > 1e-2 * stored.double().abs().amax():  # beyond what half precision or TF32 may do
        raise NeuronsError(
            f"`images` are not those that {neurons.path} was made from: a unit now has "
            f"{values[0]:.4g} where it had {stored[0]:.4g}; give the same set at the same size."
        )


class _Pass:
    """One unit and some images."""

    def __init__(
        self,
        model: BcosModel,
        images: ImageSet,
        neurons: Neurons,
        layer: Layer,
        unit: int,
        numbers: Tensor,
        size: int | None,
    ) -> None:
        self.model, self.neurons, self.layer, self.unit = model, neurons, layer, unit
        self.numbers, self.size = numbers, size
        device = next(model.parameters()).device
        self.images = images.batch(numbers)[0].to(device)
        limit = min(self.images.shape[2:])
        if size is not None and not 1 <= size <= limit:
            raise ValueError(f"`size` (={size}) must be from 1 to {limit} pixels.")

    def sights(self, positions: Tensor) -> list[Sight]:
        """What the unit saw at `positions` [n, 2] of the images, one for each."""
        e = self._explain(lambda maps, part: positions[part].to(maps.device))
        return self._show(e, positions, self.size)

    def seconds(self, firsts: list[Sight]) -> tuple[Sight | None, ...]:
        """The highest places outside of the boxes of `firsts`, where there are any."""
        found = torch.zeros(len(firsts), 2, dtype=torch.long)
        apart = torch.zeros(len(firsts), dtype=torch.bool)

        def outside(maps: Tensor, part: slice) -> Tensor:
            free = torch.ones_like(maps, dtype=torch.bool)
            ys, xs = self._centres(0).to(maps.device), self._centres(1).to(maps.device)
            for i, sight in enumerate(firsts[part]):
                top, left, bottom, right = sight.box
                inside = ((ys >= top) & (ys < bottom))[:, None] & ((xs >= left) & (xs < right))
                free[i] = ~inside
            flat = torch.where(free, maps, -torch.inf).flatten(1).argmax(1)
            places = torch.stack([flat // self.layer.width, flat % self.layer.width], 1)
            found[part] = places
            apart[part] = free.flatten(1).any(1)
            return places

        e = self._explain(outside, len(firsts))
        sights = self._show(e, found, firsts[0].picture.shape[0])
        return tuple(s if there else None for s, there in zip(sights, apart, strict=True))

    def _explain(
        self, where: Callable[[Tensor, slice], Tensor], count: int | None = None
    ) -> Explanation:
        """The rows of the unit at the places [n, 2] that `where` picks from its maps [n, H, W].

        Images come in parts; `where` is also told which of them each part is.
        """
        seen = 0

        def pick(out: Tensor) -> Tensor:
            nonlocal seen
            maps = self.layer.maps(out)[:, self.unit]
            places = where(maps.detach(), slice(seen, seen + len(maps)))
            seen += len(maps)
            return maps[torch.arange(len(maps)), places[:, 0], places[:, 1]]

        e = explain(self.model, self.images[:count], layer=self.layer.name, unit=pick)
        return e.to("cpu")

    def _show(self, e: Explanation, positions: Tensor, side: int | None) -> list[Sight]:
        windows = [e.window(i) for i in range(len(e))]
        side = side or self._side(windows)
        found = []
        for i, window in enumerate(windows):
            y, x = positions[i].tolist()
            box = self._box((y, x), window, side)
            number = int(self.numbers[i])
            found.append(
                Sight(
                    image=number,
                    label=int(self.neurons.labels[number]),
                    value=e.outputs[i, 0].item(),
                    position=(y, x),
                    box=box,
                    picture=_cut(render.colour(e[i])[0, 0], box),
                    contributions=e.contributions[i, 0],
                )
            )
        return found

    def _side(self, windows: list[tuple[int, int, int, int]]) -> int:
        """The side of the largest receptive field, or the paper's patch where that is smaller."""
        height, width = self.images.shape[2:]
        seen = max(max(b - t, r - left) for t, left, b, r in windows)
        return max(1, min(seen, CROP, min(height, width) // 2))

    def _box(
        self, position: tuple[int, int], window: tuple[int, int, int, int], side: int
    ) -> tuple[int, int, int, int]:
        """A square around the centre of what the unit sees, moved inside of the image."""
        edges = []
        for axis, place in enumerate(position):
            length = self.images.shape[2 + axis]
            low, high = window[axis], window[axis + 2]
            cut = low == 0 or high == length  # by the border, so that its middle is no centre
            centre = float(self._centres(axis)[place]) if cut else (low + high) / 2
            edges.append(min(max(round(centre - side / 2), 0), length - side))
        return edges[0], edges[1], edges[0] + side, edges[1] + side

    def _centres(self, axis: int) -> Tensor:
        """Where on the image each row or column of the map is, in pixels."""
        steps = (self.layer.height, self.layer.width)[axis]
        return (torch.arange(steps) + 0.5) * (self.images.shape[2 + axis] / steps)


def _cut(picture: np.ndarray, box: tuple[int, int, int, int]) -> np.ndarray:
    """A part of a whole picture: as in the paper, opacity is relative to all of the image."""
    top, left, bottom, right = box
    return picture[top:bottom, left:right]
