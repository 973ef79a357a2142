"""Image sets for training and evaluation: in memory on the device, or streamed from a folder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from torchbcos.images import ImageError, read_image
from torchbcos.shapes import Shapes, shapes

__all__ = ["DataError", "ImageFiles", "Images", "Shapes", "Split", "open_data", "shapes"]

_MEMORY_LIMIT = 4 << 30  # bytes of uint8 pixels that `open_data` keeps in memory


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

    def to(self, device: torch.device | str) -> Images:
        return Images(self.pixels.to(device), self.labels.to(device), self.skipped)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Images in 0..1 and labels."""
        indices = indices.to(self.labels.device)
        return self.pixels[indices].float() / 255, self.labels[indices]


@dataclass(frozen=True)
class ImageFiles:
    """A set read from files when it is needed."""

    files: tuple[Path, ...]
    labels: Tensor  # [N]
    size: tuple[int, int]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, workers: int = 8, bad: str = "skip") -> Images:
        """All of it in memory; with bad="fail" a file that cannot be read ends it, by name."""
        with ThreadPoolExecutor(workers) as pool:
            read = list(pool.map(self._try_read, range(len(self.files))))
        skipped = tuple(str(r) for r in read if isinstance(r, ImageError))
        if skipped and bad == "fail":
            raise DataError(f"{len(skipped)} of {len(self)} files cannot be read; {skipped[0]}")
        good = [i for i, r in enumerate(read) if not isinstance(r, ImageError)]
        pixels = torch.stack([r for r in read if isinstance(r, Tensor)])
        return Images(pixels, self.labels[good], skipped)

    def _try_read(self, index: int) -> Tensor | ImageError:
        try:
            pixels = read_image(self.files[index], self.size)
        except ImageError as error:
            return error
        return (pixels * 255).round().to(torch.uint8)


@dataclass(frozen=True)
class Split:
    """A training and a test set of the same classes."""

    train: Images
    test: Images
    classes: tuple[str, ...]


def open_data(
    path: str | os.PathLike[str],
    size: int | None = None,
    *,
    bad: str = "skip",
    workers: int | None = None,
) -> Split:
    """A data set by its place: "shapes", a CIFAR-10 folder in any of its formats, or class folders.

    A folder holds `train` and `val` or `test`, each with one folder for each class. Images are read
    into memory at `size`, by default that of the first. `bad` says what becomes of a file that
    cannot be read: "skip" it with a count, or "fail".
    """
    if bad not in ("skip", "fail"):
        raise DataError(f"`bad` (={bad!r}) must be 'skip' or 'fail'.")
    if str(path) == "shapes":
        return _shapes_split(size or 48)
    root = Path(path)
    if not root.is_dir():
        raise DataError(f"{root} is no folder: name one with train and val, or 'shapes'.")
    if (root / "data_batch_1.bin").exists() or (root / "cifar-10-batches-bin").is_dir():
        return _cifar_binary(
            root if (root / "data_batch_1.bin").exists() else root / "cifar-10-batches-bin"
        )
    if (root / "cifar-10-batches-py").is_dir():
        return _cifar_python(root)
    return _folders(root, size, bad, workers or min(16, (os.cpu_count() or 2) * 2))


def _shapes_split(size: int) -> Split:
    train, test = shapes(8192, size=size, seed=1), shapes(2048, size=size, seed=2)
    sets = [Images((s.images * 255).round().to(torch.uint8), s.labels) for s in (train, test)]
    return Split(sets[0], sets[1], train.classes)


_CIFAR_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip


def _cifar_binary(folder: Path) -> Split:
    def read(names: Sequence[str]) -> Images:
        rows = []
        for name in names:
            try:
                raw = np.fromfile(folder / name, dtype=np.uint8)
            except OSError as error:
                raise DataError(f"{folder / name} cannot be read: is the copy complete?") from error
            if len(raw) != 10_000 * 3073:
                raise DataError(
                    f"{folder / name} has {len(raw)} bytes, not 30730000: copy it again."
                )
            rows.append(torch.from_numpy(raw.reshape(-1, 3073)))
        table = torch.cat(rows)
        return Images(table[:, 1:].reshape(-1, 3, 32, 32).contiguous(), table[:, 0].long())

    train = read([f"data_batch_{i}.bin" for i in range(1, 6)])
    return Split(train, read(["test_batch.bin"]), _CIFAR_CLASSES)


def _cifar_python(root: Path) -> Split:
    from torchvision.datasets import CIFAR10

    try:  # torchvision compares checksums before it unpickles
        sets = [CIFAR10(root, train=train, download=False) for train in (True, False)]
    except RuntimeError as error:
        raise DataError(f"{root}/cifar-10-batches-py is not complete or was changed.") from error
    train, test = (
        Images(torch.from_numpy(s.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(s.targets))
        for s in sets
    )
    return Split(train, test, tuple(sets[0].classes))


def _folders(root: Path, size: int | None, bad: str, workers: int) -> Split:
    folder = {name: root / name for name in ("train", "val", "test") if (root / name).is_dir()}
    if "train" not in folder or len(folder) < 2:
        raise DataError(f"{root} must hold the folders train and val (or test).")
    test_folder = folder.get("val") or folder["test"]
    classes = _class_names(folder["train"])
    unknown = sorted(set(_class_names(test_folder)) - set(classes))
    if unknown:
        raise DataError(f"{test_folder} has the class {unknown[0]!r}, which train lacks.")
    listed = [_list_files(f, classes) for f in (folder["train"], test_folder)]
    if size is None:
        with Image.open(listed[0][0][0]) as first:
            size = min(first.size)
    total = sum(len(files) for files, _ in listed) * 3 * size * size
    if total > _MEMORY_LIMIT:
        raise DataError(
            f"{root} takes {total / 2**30:.1f} GiB at {size} px, more than is kept in memory: "
            "give a smaller `size`."
        )
    train, test = (
        ImageFiles(tuple(files), labels, (size, size)).read(workers, bad)
        for files, labels in listed
    )
    return Split(train, test, classes)


def _class_names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(p.name for p in folder.iterdir() if p.is_dir()))


def _list_files(folder: Path, classes: Sequence[str]) -> tuple[list[Path], Tensor]:
    suffixes = set(Image.registered_extensions())
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        inside = sorted(p for p in (folder / name).rglob("*") if p.suffix.lower() in suffixes)
        if not inside:
            raise DataError(f"{folder / name} holds no images: fill it or remove the class.")
        files += inside
        labels += [label] * len(inside)
    return files, torch.tensor(labels)
