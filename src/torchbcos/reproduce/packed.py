"""CIFAR-10 in class folders takes long to decode: do it once for all processes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from rich.console import Console

from torchbcos.checkpoint import write_atomically
from torchbcos.data import Images, open_data

__all__ = ["pack"]

_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
_FILES = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]


def pack(data: str, out: Path, console: Console) -> str:
    """Where to read `data` from: below `out`, in CIFAR-10's own binary format, or where it is.

    Only the whole set in folders of its ten classes is packed, and not again if it is there.
    """
    root = Path(data)
    if not (root / "train").is_dir() or sorted(_folders(root / "train")) != _CLASSES:
        open_data(data)  # what is wrong with it is said here, once
        return data
    key = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:8]
    folder = out / f"data-{key}"
    if all((folder / name).exists() for name in _FILES):
        return str(folder)
    console.print(f"reading {data}", markup=False, highlight=False)
    split = open_data(data)
    if [len(split.train), len(split.test), *split.train.size] != [50_000, 10_000, 32, 32]:
        return data
    assert isinstance(split.train, Images)
    assert isinstance(split.test, Images)
    folder.mkdir(parents=True, exist_ok=True)
    both = [
        torch.cat([s.labels[:, None].byte(), s.pixels.flatten(1)], 1)
        for s in (split.train, split.test)
    ]
    for name, rows in zip(_FILES, torch.cat(both).split(10_000), strict=True):
        write_atomically(folder / name, rows.numpy().tobytes())
    return str(folder)


def _folders(place: Path) -> list[str]:
    return [p.name for p in place.iterdir() if p.is_dir()]
