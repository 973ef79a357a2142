"""What is kept of the images seen so far, in memory and on disk; batches and parts merge into it.

A merge leaves it as one pass over all images would have: the best images are the same ones whatever
the way, and the moments are merged in float64 by the formula of Chan, Golub and LeVeque.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from torchbcos.checkpoint import write_atomically
from torchbcos.neurons.table import Layer, NeuronsError

__all__ = ["Saved", "Seen", "Tally"]


@dataclass(frozen=True)
class Seen:
    """What a batch of B images does to all U units."""

    peaks: Tensor  # [B, U] the largest activation of each image
    where: Tensor  # [B, U] its position on the map, y · width + x
    means: Tensor  # [B, U] over the positions of each image
    stds: Tensor  # [B, U] the deviation over them, with which no digits cancel out


@dataclass
class Tally:
    """The best images and the moments of all U units."""

    values: Tensor  # [U, k], −∞ where no image has come yet
    images: Tensor  # [U, k] int32
    positions: Tensor  # [U, k] int32
    mean: Tensor  # [U] float64
    spread: Tensor  # [U] float64: over the images, the sum of the mean squared deviations
    peak_mean: Tensor  # [U] float64
    peak_spread: Tensor  # [U] float64
    active: Tensor  # [U] int64: images
    seen: int = 0

    @classmethod
    def empty(cls, units: int, top: int, dtype: torch.dtype) -> Self:
        moments = [torch.zeros(units, dtype=torch.float64) for _ in range(4)]
        return cls(
            values=torch.full((units, top), -torch.inf, dtype=dtype),
            images=torch.full((units, top), -1, dtype=torch.int32),
            positions=torch.full((units, top), -1, dtype=torch.int32),
            mean=moments[0],
            spread=moments[1],
            peak_mean=moments[2],
            peak_spread=moments[3],
            active=torch.zeros(units, dtype=torch.int64),
        )

    def tensors(self) -> dict[str, Tensor]:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device) -> Self:
        for name, value in self.tensors().items():
            setattr(self, name, value.to(device))
        return self

    def add(self, start: int, batch: Seen, active_above: float) -> None:
        """Images `start`, `start` + 1, …, which come after all images seen."""
        size, units = batch.peaks.shape
        numbers = torch.arange(start, start + size, dtype=torch.int32, device=batch.peaks.device)
        self._keep_largest(
            torch.cat([self.values, batch.peaks.T], 1),
            torch.cat([self.images, numbers.expand(units, -1)], 1),
            torch.cat([self.positions, batch.where.T.int()], 1),
        )
        self._add_moments(size, *_moments(batch.means, batch.stds), *_moments(batch.peaks))
        self.active += (batch.peaks > active_above).sum(0)
        self.seen += size

    def merge(self, other: Tally) -> None:
        """The tally of images that come after all of these."""
        self._keep_largest(
            torch.cat([self.values, other.values], 1),
            torch.cat([self.images, other.images], 1),
            torch.cat([self.positions, other.positions], 1),
        )
        self._add_moments(other.seen, other.mean, other.spread, other.peak_mean, other.peak_spread)
        self.active += other.active
        self.seen += other.seen

    def _keep_largest(self, values: Tensor, images: Tensor, positions: Tensor) -> None:
        """Candidates [U, M] come in the order of the images, which a stable sort keeps for ties."""
        top = self.values.shape[1]
        values, order = values.sort(dim=1, descending=True, stable=True)
        self.values, order = values[:, :top].clone(), order[:, :top]
        self.images, self.positions = images.gather(1, order), positions.gather(1, order)

    def _add_moments(
        self, size: int, mean: Tensor, spread: Tensor, peak_mean: Tensor, peak_spread: Tensor
    ) -> None:
        if not size:
            return
        part = size / (self.seen + size)
        shift, peak_shift = mean - self.mean, peak_mean - self.peak_mean
        self.spread += spread + shift.square() * (self.seen * part)
        self.peak_spread += peak_spread + peak_shift.square() * (self.seen * part)
        self.mean += shift * part
        self.peak_mean += peak_shift * part

    def statistics(self, layers: Sequence[Layer]) -> dict[str, Tensor]:
        """What the file holds, for the units of all layers."""
        finite = self.mean.isfinite() & self.spread.isfinite()
        for layer, fine in zip(layers, finite.split([la.units for la in layers]), strict=True):
            if not fine.all():
                raise NeuronsError(
                    f"`layer` (={layer.name!r}) has activations that are not finite: look at "
                    "torchbcos.signal(model, images)."
                )
        top = min(self.values.shape[1], self.seen)
        return {
            "values": self.values[:, :top],
            "images": self.images[:, :top],
            "positions": self.positions[:, :top],
            "mean": self.mean,
            "std": (self.spread / self.seen).sqrt(),
            "peak_mean": self.peak_mean,
            "peak_std": (self.peak_spread / self.seen).sqrt(),
            "active": self.active.double() / self.seen,
        }


def _moments(means: Tensor, stds: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and spread over images from those of each image, [B, U] → [U]."""
    means = means.double()
    mean = means.mean(0)
    spread = (means - mean).square().sum(0)
    if stds is not None:
        spread += stds.double().square().sum(0)
    return mean, spread


class Saved:
    """The tally on disk, for a later process to go on from."""

    def __init__(self, path: Path, identity: Mapping[str, Any], every: float) -> None:
        self.path, self.every = path, every  # seconds
        self.written = time.monotonic()
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))

    def write_if_due(self, tally: Tally) -> None:
        if time.monotonic() - self.written >= self.every:
            self.write(tally)
            self.written = time.monotonic()

    def write(self, tally: Tally) -> None:
        tensors = {name: value.cpu().contiguous() for name, value in tally.tensors().items()}
        about = json.dumps({"identity": self.identity, "seen": tally.seen})
        write_atomically(self.path, safetensors.torch.save(tensors, metadata={"state": about}))

    def read(self) -> Tally | None:
        if not self.path.exists():
            return None  # nothing was kept yet: begin
        try:
            with safetensors.safe_open(self.path, "pt") as file:
                about = json.loads(file.metadata()["state"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            tally = Tally(**tensors, seen=about["seen"])
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
            raise NeuronsError(f"{self.path} is damaged: remove it to begin anew.") from error
        for name, value in about["identity"].items():
            if self.identity.get(name) != value:
                raise NeuronsError(
                    f"`{name}` is not as in the run that {self.path} is left of: make it "
                    f"{_short(value)} again, or remove that file to begin anew."
                )
        return tally


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:76]} …"
