"""Class folders take long to decode: do it once for all processes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from torchbcos.data import PACKED, Images, open_data, write_packed
from torchbcos.training_config import TrainConfig

__all__ = ["pack"]


def pack(configs: Iterable[TrainConfig], out: Path, console: Console) -> list[TrainConfig]:
    """The configs, with data that is decoded already: below `out`, and not again if it is there.

    Sets in other formats, and those that are streamed, stay where they are.
    """
    places: dict[str, str] = {}
    packed = []
    for c in configs:
        key = f"{Path(c.data).resolve()} {c.reading}"
        if key not in places:
            digest = hashlib.sha256(key.encode()).hexdigest()[:8]
            places[key] = _place(c.data, c.reading, out / f"data-{digest}", console)
        packed.append(replace(c, data=places[key]))
    return packed


def _place(data: str, reading: dict[str, Any], folder: Path, console: Console) -> str:
    if (folder / PACKED).exists():
        return str(folder)
    in_folders = (Path(data) / "train").is_dir()
    if in_folders:
        console.print(f"reading {data}", markup=False, highlight=False)
    split = open_data(data, **reading)  # what is wrong with it is said here, once
    in_memory = isinstance(split.train, Images) and isinstance(split.test, Images)
    if not (in_folders and in_memory):
        return data
    write_packed(split, folder)
    return str(folder)
