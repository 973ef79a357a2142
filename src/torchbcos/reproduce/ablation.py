"""The part of a page that repeats the paper's Tab. B1: units and growth of DenseNet-121."""

from __future__ import annotations

from collections.abc import Container

from torchbcos.reproduce.imagenet import TABLE_B1
from torchbcos.reproduce.localised import median
from torchbcos.reproduce.results import Results
from torchbcos.reproduce.tables import accuracy, difference, table

__all__ = ["units_and_growth"]


def units_and_growth(found: Results, experiments: Container[str]) -> str:
    """The section, with a row for each of the `experiments` that the paper has there."""
    base = found.get("densenet121-conventional")
    rows = []
    for name, (what, size, paper) in TABLE_B1.items():
        if name not in experiments:
            continue
        r = found.get(name)
        own = f"{r.document['parameters'] / 1e6:.1f} M" if r else ""
        off = difference(r, base) if name != "densenet121-conventional" else ""
        score = "–" if name.endswith("-conventional") else median(r, "ours")
        rows.append([what, own, accuracy(r), off, score, f"{size} M", f"{paper}"])
    header = [
        "DenseNet-121", "parameters", "accuracy, %", "difference", "localisation",
        "paper, ImageNet: parameters", "accuracy, %",
    ]  # fmt: skip
    return "\n\n".join(["## Units and growth (Tab. B1)", table(header, rows)])
