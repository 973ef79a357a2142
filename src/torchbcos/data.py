"""Data sets for training and evaluation: class folders, CIFAR-10, packed ones, drawn shapes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchbcos.evidence import cores
from torchbcos.image_sets import DataError, ImageFiles, Images, ImageSet, Split
from torchbcos.images import ImageError, image_size, image_suffixes
from torchbcos.shapes import Shapes, shapes

__all__ = [
    "CIFAR10_CLASSES",
    "DataError",
    "ImageFiles",
    "ImageSet",
    "Images",
    "Shapes",
    "Split",
    "default_workers",
    "imagenet_classes",
    "open_data",
    "shapes",
    "write_packed",
]

PACKED = "packed.json"


def default_workers() -> int:
    """How many processes read images when nobody says."""
    return min(16, cores())


def open_data(
    path: str | os.PathLike[str],
    size: int | None = None,
    *,
    bad: str = "fail",
    memory: float = 4.0,
    part: float = 1.0,
    only: str = "",
    channels: int = 3,
) -> Split:
    """A data set by its place: "shapes", a CIFAR-10 folder, class folders, or packed ones.

    A folder holds `train` and `val` or `test`, each with one folder for each class, with images of
    any shape; the WordNet ids of Imagenette and of all of ImageNet become names. Up to `memory` GiB
    they are read at once, at `size` (by default that of the first); larger sets stay in their
    files, `ImageFiles`. `bad` says what becomes of an image that cannot be read, an empty class,
    and a class that only the test images have: "fail" names it, "skip" leaves it out and says so in
    `skipped`. `part` is for test images; see `read_pixels`. With only="train" or "test" no image of
    the other set is read; for "test", folders need no `train`, and may be the class folders
    themselves. With channels=1 images are read in grey.
    """
    if bad not in ("skip", "fail"):
        raise DataError(f"`bad` (={bad!r}) must be 'skip' or 'fail'.")
    if only not in ("", "train", "test"):
        raise DataError(f"`only` (={only!r}) must be 'train', 'test' or '' for both.")
    if channels not in (1, 3):
        raise DataError(f"`channels` (={channels!r}) must be 1 (grey) or 3, as image files have.")
    if str(path) == "shapes":
        return _as_seen(_shapes_split(size or 48), channels)
    root = Path(path)
    if not root.is_dir():
        raise DataError(
            f"{root} is no folder: name one with train and val, CIFAR-10's own, or 'shapes'."
        )
    if (root / PACKED).exists():
        return _as_seen(_packed(root, size), channels)
    if (root / "data_batch_1.bin").exists() or (root / "cifar-10-batches-bin").is_dir():
        _check_size(root, (32, 32), size, "ask for 32, or make class folders of them")
        own = (root / "data_batch_1.bin").exists()
        return _as_seen(_cifar_binary(root if own else root / "cifar-10-batches-bin"), channels)
    if (root / "cifar-10-batches-py").is_dir():
        _check_size(root, (32, 32), size, "ask for 32, or make class folders of them")
        return _as_seen(_cifar_python(root), channels)
    train, test, classes = _folders(root, size, bad, part, only, channels)
    count = len(train) * (only != "test") + len(test) * (only != "train")
    if count * channels * train.size[0] * train.size[1] > memory * 2**30:
        return Split(train, test, classes)
    return Split(
        train if only == "test" else train.read(bad=bad),
        test if only == "train" else test.read(bad=bad),
        classes,
    )


def write_packed(split: Split, folder: Path) -> None:
    """Write a split that is in memory to `folder`, where `open_data` finds it decoded.

    The arrays are mapped into memory, so that processes on one machine share them.
    """
    about = {"classes": split.classes, "skipped": split.skipped}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for name, images in (("train", split.train), ("test", split.test)):
            if not isinstance(images, Images):
                raise ValueError("`split` is streamed from its files: open it with more `memory`.")
            np.save(folder / f"{name}.npy", images.pixels.numpy())
            np.save(folder / f"{name}-labels.npy", images.labels.numpy())
        part = folder / f"{PACKED}.part"
        part.write_bytes(json.dumps(about, indent=1).encode())
        part.replace(folder / PACKED)  # last: now all is there
    except OSError as error:  # NumPy counts bytes, without the reason or the file
        raise DataError(
            f"{folder} cannot hold the decoded images ({error}): is its disk full?"
        ) from error


def _packed(folder: Path, size: int | None) -> Split:
    about = json.loads((folder / PACKED).read_bytes())

    def read(name: str, skipped: Sequence[str] = ()) -> Images:
        arrays = [np.load(folder / f"{name}{end}.npy", mmap_mode="c") for end in ("", "-labels")]
        pixels, labels = map(torch.from_numpy, arrays)
        held = (pixels.shape[2], pixels.shape[3])
        _check_size(folder, held, size, "name the folder that it was made from")
        return Images(pixels, labels, tuple(skipped))

    return Split(read("train", about["skipped"]), read("test"), tuple(about["classes"]))


def _as_seen(split: Split, channels: int) -> Split:
    """Sets in memory, in grey if one channel is asked for."""

    def seen(images: ImageSet) -> ImageSet:
        assert isinstance(images, Images)
        if images.pixels.shape[1] == channels:
            return images
        if channels == 3:
            return replace(images, pixels=images.pixels.expand(-1, 3, -1, -1))
        parts = images.pixels.split(1024)
        return replace(images, pixels=torch.cat([_grey(part) for part in parts]))

    return Split(seen(split.train), seen(split.test), split.classes)


def _grey(pixels: Tensor) -> Tensor:
    """As Pillow makes bytes of RGB grey."""
    shares = torch.tensor([19595, 38470, 7471], dtype=torch.int32)[:, None, None]
    return ((pixels * shares).sum(1, keepdim=True) + 0x8000 >> 16).to(torch.uint8)


def _check_size(folder: Path, held: tuple[int, int], size: int | None, remedy: str) -> None:
    if size is not None and held != (size, size):
        raise DataError(
            f"{folder} holds images of {held[0]}×{held[1]} pixels, not of {size}: {remedy}."
        )


def _shapes_split(size: int) -> Split:
    train, test = shapes(8192, size=size, seed=1), shapes(2048, size=size, seed=2)
    sets = [Images((s.images * 255).round().to(torch.uint8), s.labels) for s in (train, test)]
    return Split(sets[0], sets[1], train.classes)


CIFAR10_CLASSES = (
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
    return Split(train, read(["test_batch.bin"]), CIFAR10_CLASSES)


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


#: Imagenette's folders have the WordNet ids of its classes.
_IMAGENETTE = {
    "n01440764": "tench",
    "n02102040": "English springer",
    "n02979186": "cassette player",
    "n03000684": "chain saw",
    "n03028079": "church",
    "n03394916": "French horn",
    "n03417042": "garbage truck",
    "n03425413": "gas pump",
    "n03445777": "golf ball",
    "n03888257": "parachute",
}


def _folders(
    root: Path, size: int | None, bad: str, part: float, only: str, channels: int
) -> tuple[ImageFiles, ImageFiles, tuple[str, ...]]:
    folder = {name: root / name for name in ("train", "val", "test") if (root / name).is_dir()}
    alone = only == "test" and "train" not in folder  # the test images say what classes there are
    if not alone and ("train" not in folder or len(folder) < 2):
        raise DataError(f"{root} must hold the folders train and val (or test).")
    test_folder = folder.get("val") or folder.get("test") or root
    test = _files_by_class(test_folder)
    train = dict(test) if alone else _files_by_class(folder["train"])

    skipped: list[str] = []
    matters = alone or only != "test" or bad == "skip"  # which then names the classes as it did
    for name in [n for n, files in train.items() if matters and not files]:
        where = test_folder if alone else folder["train"]
        skipped.append(f"{where / name} holds no images: fill it or remove the class.")
        del train[name]
        if alone:
            del test[name]
    for name in [n for n in test if n not in train]:
        skipped.append(f"{test_folder} has the class {name!r}, which train lacks: remove it.")
        del test[name]
    skipped += [
        f"{test_folder / name} holds no images: fill it or remove the class."
        for name, files in test.items()
        if not files
    ]
    if skipped and bad == "fail":
        advice = "." if only else ", or set bad='skip'."  # which is a setting of trainings
        raise DataError(skipped[0].removesuffix(".") + advice)
    if len(train) < 2 or not any(test.values()):
        what = "folders of images of at least two classes"
        if not alone:
            what = "images of at least two classes in train and some in val"
        raise DataError(f"{root} must hold {what}.")
    classes = tuple(train)
    if size is None:
        size = _size_of_first([file for name in classes for file in train[name]])
    sets = [
        ImageFiles(
            tuple(file for name in classes for file in files.get(name, ())),
            torch.tensor([k for k, name in enumerate(classes) for _ in files.get(name, ())]),
            (size, size),
            channels,
            seen,
            tuple(words),
        )
        for files, seen, words in (({} if alone else train, 1.0, skipped), (test, part, ()))
    ]
    return sets[0], sets[1], _names_of(classes)


def _names_of(folders: tuple[str, ...]) -> tuple[str, ...]:
    """The names of their classes, if they are WordNet ids of Imagenette or all of ImageNet's."""
    if _IMAGENETTE.keys() >= set(folders):
        return tuple(_IMAGENETTE[name] for name in folders)
    if len(folders) == 1000 and _IMAGENETTE.keys() <= set(folders):
        names = imagenet_classes()
        if all(names[folders.index(i)] == name for i, name in _IMAGENETTE.items()):
            return names  # the ids in their order are ImageNet's numbers
    return folders


def imagenet_classes() -> tuple[str, ...]:
    """The names of ImageNet's 1000 classes in their order, by torchvision."""
    from torchvision.models import ResNet18_Weights

    return tuple(ResNet18_Weights.DEFAULT.meta["categories"])


def _size_of_first(files: Sequence[str]) -> int:
    """The shorter side of the first that can be read; what becomes of others is said later."""
    for file in files:
        with contextlib.suppress(ImageError):
            return min(image_size(file))
    raise DataError(f"none of {len(files)} images can be read: is {files[0]} one?")


def _files_by_class(folder: Path) -> dict[str, list[str]]:
    """The image files below each class's folder, by their suffix; names in their order.

    Hidden ones are not looked at: programs keep their own things there.
    """
    suffixes = tuple(image_suffixes())
    names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    return {
        name: sorted(file for file in _below(folder / name) if file.lower().endswith(suffixes))
        for name in names
    }


def _below(folder: Path) -> Iterator[str]:
    """All files, through links; a folder that several links lead to counts once."""
    met = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        folders[:] = sorted(f for f in folders if not f.startswith(".") and real not in met)
        if real not in met:
            # a million paths as strings
            yield from (os.path.join(place, f) for f in files if not f.startswith("."))  # noqa: PTH118
        met.add(real)
