"""Image sets: in memory on the device, or read from files when they are needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchbcos.images import ImageError, read_pixels

__all__ = ["DataError", "ImageFiles", "ImageSet", "Images", "Split"]


class DataError(ValueError):
    """A data set that cannot be used; the message is one sentence that says what to do."""


@dataclass(frozen=True)
class Images:
    """A set held as one tensor."""

    pixels: Tensor  # [N, C, H, W] uint8
    labels: Tensor  # [N]
    skipped: tuple[str, ...] = ()  # one sentence for each file left out

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def size(self) -> tuple[int, int]:
        return self.pixels.shape[2], self.pixels.shape[3]

    def to(self, device: torch.device | str) -> Images:
        return Images(self.pixels.to(device), self.labels.to(device), self.skipped)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images in 0..1 and labels."""
        indices = indices.to(self.labels.device)
        return self.pixels[indices].float() / 255, self.labels[indices]


@dataclass(frozen=True)
class ImageFiles:
    """A set read from files when it is needed, each image resized to `size`."""

    files: tuple[str, ...]
    labels: Tensor  # [N]
    size: tuple[int, int]
    channels: int = 3  # or 1: grey
    part: float = 1.0  # how much of the largest centred square is seen; see `read_pixels`
    skipped: tuple[str, ...] = ()  # one sentence for each file left out
    device: torch.device | str = "cpu"  # where `batch` brings them

    def __len__(self) -> int:
        return len(self.files)

    def to(self, device: torch.device | str) -> ImageFiles:
        return replace(self, device=device)

    def batch(
        self, indices: Tensor, crops: Tensor | None = None, size: tuple[int, int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Images in 0..1 and labels; `crops` [N, 4] takes parts as `augment.crops` draws them."""
        pixels, labels = self.decode(indices, crops, size)
        return pixels.to(self.device).float() / 255, labels.to(self.device)

    def decode(
        self, indices: Tensor, crops: Tensor | None = None, size: tuple[int, int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `batch`, in bytes."""
        boxes = [None] * len(indices) if crops is None else crops.tolist()
        images = [
            read_pixels(self.files[i], size or self.size, self.channels, part=self.part, crop=box)
            for i, box in zip(indices.tolist(), boxes, strict=True)
        ]
        return torch.stack(images), self.labels[indices]

    def read(self, workers: int = 8, bad: str = "fail") -> Images:
        """All of it in memory; with bad="skip" files that cannot be read are left out."""
        with ThreadPoolExecutor(workers) as pool:
            read = list(pool.map(self._try_read, self.files))
        damaged = {i: str(r) for i, r in enumerate(read) if isinstance(r, ImageError)}
        good = self.without(damaged, bad)
        pixels = torch.stack([r for r in read if isinstance(r, Tensor)])
        return Images(pixels, good.labels, good.skipped)

    def without(self, damaged: dict[int, str], bad: str) -> ImageFiles:
        """The others, if `bad` is "skip"; an error that names the first, if it is "fail"."""
        if not damaged:
            return self
        if bad == "fail":
            raise DataError(
                f"{len(damaged)} of {len(self)} images cannot be read: "
                f"{next(iter(damaged.values())).removesuffix('.')}; mend or remove them (a "
                "training leaves them out with bad='skip')."
            )
        good = [i for i in range(len(self)) if i not in damaged]
        if not good:
            raise DataError(f"none of {len(self)} images can be read: {damaged[0]}")
        return replace(
            self,
            files=tuple(self.files[i] for i in good),
            labels=self.labels[good],
            skipped=(*self.skipped, *damaged.values()),
        )

    def _try_read(self, file: str) -> Tensor | ImageError:
        try:
            return read_pixels(file, self.size, self.channels, part=self.part)
        except ImageError as error:
            return error


ImageSet = Images | ImageFiles


@dataclass(frozen=True)
class Split:
    """A training and a test set of the same classes."""

    train: ImageSet
    test: ImageSet
    classes: tuple[str, ...]

    @property
    def skipped(self) -> tuple[str, ...]:
        return self.train.skipped + self.test.skipped
