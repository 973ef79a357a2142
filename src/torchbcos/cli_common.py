"""What commands share: words as they are."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def console(*, stderr: bool = False) -> Console:
    """One that shows paths and names as they are: brackets are no markup."""
    return Console(stderr=stderr, markup=False, emoji=False)


def as_text(words: str) -> Text:
    """Words as they are: brackets are no markup, and what is no Unicode is shown as bytes."""
    return Text(words.encode("utf-8", "backslashreplace").decode())
