"""What a conversion did, operation by operation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

__all__ = ["Change", "Report"]


@dataclass(frozen=True)
class Change:
    """One operation of the original network and what became of it."""

    place: str  # "layer1.0.conv1" for a module, "layer1.0: add" for a function inside one
    operation: str  # "Conv2d"
    became: str  # "BcosConv2d", "removed", "kept", …


@dataclass(frozen=True)
class Report:
    """Every operation found, what became of it, and whether the result is dynamic-linear."""

    architecture: str
    changes: tuple[Change, ...]
    breaks: tuple[str, ...]  # operations that break W(x)·x + bias = output; empty if none does
    note: str = ""  # how the conversion was made, where that was not by tracing

    @property
    def dynamic_linear(self) -> bool:
        return not self.breaks

    def counts(self) -> Counter[tuple[str, str]]:
        """How often each (operation, became) occurred."""
        return Counter((c.operation, c.became) for c in self.changes)

    def __str__(self) -> str:
        rows = [("operation", "became", "times")]
        rows += [(op, became, str(n)) for (op, became), n in sorted(self.counts().items())]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"{self.architecture} as a B-cos network"]
        lines += [f"  {r[0]:<{widths[0]}}  {r[1]:<{widths[1]}}  {r[2]:>{widths[2]}}" for r in rows]
        if self.note:
            lines.append(self.note)
        if self.dynamic_linear:
            lines.append("Dynamic-linear: W(x)·x + bias is the output.")
        else:
            lines.append("Not dynamic-linear, because of " + "; ".join(self.breaks) + ".")
        return "\n".join(lines)
