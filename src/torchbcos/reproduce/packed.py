"""Class folders take long to decode: do it once for all processes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from torchbcos.batches import digest_of_files
from torchbcos.data import PACKED, ImageFiles, open_data, write_packed
from torchbcos.training_config import TrainConfig

__all__ = ["pack"]


def pack(configs: Iterable[TrainConfig], out: Path, console: Console) -> list[TrainConfig]:
    """The configs, with data that is decoded already: below `out`, and not again if it is there and
    the files have not changed.

    Sets in other formats, and those that are streamed, stay where they are.
    """
    places: dict[str, str] = {}
    packed = []
    for c in configs:
        key = f"{Path(c.data).resolve()} {c.reading}"
        if key not in places:
            places[key] = _place(c, key, out, console)
        packed.append(replace(c, data=places[key]))
    return packed


def _place(c: TrainConfig, key: str, out: Path, console: Console) -> str:
    listed = open_data(c.data, **{**c.reading, "memory": 0})  # what is missing is said here, once
    if not (isinstance(listed.train, ImageFiles) and isinstance(listed.test, ImageFiles)):
        return c.data
    files = digest_of_files([*listed.train.files, *listed.test.files])
    folder = out / f"data-{hashlib.sha256(f'{key} {files}'.encode()).hexdigest()[:8]}"
    if not (folder / PACKED).exists():
        console.print(f"reading {c.data}", markup=False, highlight=False)
        split = open_data(c.data, **c.reading)
        if isinstance(split.train, ImageFiles):
            return c.data
        write_packed(split, folder)
    return str(folder)
