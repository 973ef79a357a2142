"""What commands share: options, words as they are, and what is checked before any work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

ModelName = Annotated[
    str, typer.Option(help="A model file, or a bundled name.", show_default="imagenette")
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu, cuda, …")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")]


def console(*, stderr: bool = False) -> Console:
    """One that shows paths and names as they are: no markup, no emoji, no colours of its own."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


#: Results go to the output, progress and complaints to the error stream.
output, errors = console(), console(stderr=True)


def as_text(words: str) -> Text:
    """Words as they are: brackets are no markup, and what is no Unicode is shown as bytes."""
    return Text(words.encode("utf-8", "backslashreplace").decode())


def complain(sentence: str) -> None:
    """One line in red."""
    errors.print(f"torchbcos: {' '.join(sentence.split())}", style="red", soft_wrap=True)


def check_file(out: Path) -> None:
    """Refuse an `--out` that cannot become a file."""
    if out.is_dir():
        raise ValueError(f"`--out` (={str(out)!r}) is a folder: name a file in it.")
    if not out.parent.is_dir():
        raise ValueError(f"`--out` (={str(out)!r}): its folder does not exist; create it.")
    _check_access(out, out.parent)


def check_folder(out: Path) -> None:
    """Refuse an `--out` that cannot become a folder with files."""
    there = next((p for p in (out, *out.parents) if p.exists()), None)
    if there is None:
        return
    if not there.is_dir():
        raise ValueError(f"`--out` (={str(out)!r}) needs a folder where {there} is a file.")
    _check_access(out, there)


def _check_access(out: Path, folder: Path) -> None:
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(
            f"`--out` (={str(out)!r}): {folder} cannot be written to; name another folder."
        )
