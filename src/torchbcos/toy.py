"""The paper's Fig. 2: one B-cos unit in the plane, and where its best weights point.

Two problems share a red cluster; the blue one lies on another side of it. A linear unit (B = 1)
turns away from blue, so its weights say as much about blue as about red. With growing B both
problems have the same best weights: those that point at red.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchbcos.checkpoint import write_atomically
from torchbcos.functional import bcos_linear
from torchbcos.plots import INK, OURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPONENTS", "Problem", "Toy", "figure", "problems", "solve", "write"]

EXPONENTS = (1.0, 2.0, 4.0, 10.0, 30.0)
RED_ANGLE, RED_RADIUS = 60.0, 4.0
BLUE = {"blue on the left": (150.0, 3.0), "blue on the right": (5.0, 3.0)}  # degrees, radius
SPREAD = 0.35
_BLUE = "#1f5ab4"


@dataclass(frozen=True)
class Problem:
    """Points of two classes in the plane."""

    name: str
    points: Tensor  # [N, 2]
    labels: Tensor  # [N] 1 for red, 0 for blue


@dataclass(frozen=True)
class Toy:
    """The loss of each problem at each angle of w, and the angles where it is least."""

    problems: tuple[Problem, ...]
    exponents: tuple[float, ...]
    angles: Tensor  # [A] degrees
    losses: Tensor  # [problem, B, A] binary cross-entropy

    @property
    def best(self) -> Tensor:
        """[problem, B] degrees."""
        return self.angles[self.losses.argmin(2)]

    def as_json(self) -> dict[str, Any]:
        return {
            "red_degrees": RED_ANGLE,
            "exponents": list(self.exponents),
            "best_degrees": {
                p.name: [round(float(v), 3) for v in row]
                for p, row in zip(self.problems, self.best, strict=True)
            },
            "angles": self.angles.tolist(),
            "losses": {p.name: v.tolist() for p, v in zip(self.problems, self.losses, strict=True)},
            "data": {
                p.name: {"points": p.points.tolist(), "labels": p.labels.tolist()}
                for p in self.problems
            },
        }


def problems(count: int = 100, seed: int = 0) -> tuple[Problem, ...]:
    """Two problems with `count` points in each cluster; red is the same in both."""
    if count < 1:
        raise ValueError(f"`count` (={count}) must be at least 1 point.")
    generator = torch.Generator().manual_seed(seed)

    def cluster(degrees: float, radius: float) -> Tensor:
        angle = math.radians(degrees)
        centre = radius * torch.tensor([math.cos(angle), math.sin(angle)], dtype=torch.float64)
        drawn = torch.randn(count, 2, generator=generator, dtype=torch.float64)
        return centre + SPREAD * drawn

    red = cluster(RED_ANGLE, RED_RADIUS)
    labels = torch.cat([torch.ones(count), torch.zeros(count)]).double()
    return tuple(
        Problem(name, torch.cat([red, cluster(*place)]), labels) for name, place in BLUE.items()
    )


def solve(
    exponents: Sequence[float] = EXPONENTS, *, count: int = 100, steps: int = 3600, seed: int = 0
) -> Toy:
    """The mean cross-entropy of sigmoid(B-cos(x; w)) at `steps` angles of w, for every B."""
    if not exponents:
        raise ValueError("`exponents` (=[]) must hold at least one B.")
    given = problems(count, seed)
    angles = torch.arange(steps, dtype=torch.float64) * 360 / steps - 180
    w = torch.stack([angles.deg2rad().cos(), angles.deg2rad().sin()], 1)  # [A, 2]
    losses = []
    for problem in given:
        rows = []
        for b in exponents:
            logits = bcos_linear(problem.points, w, b=b)  # [N, A]
            target = problem.labels[:, None].expand_as(logits)
            rows.append(
                F.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(0)
            )
        losses.append(torch.stack(rows))
    return Toy(given, tuple(exponents), angles, torch.stack(losses))


def figure(toy: Toy) -> Figure:
    """A row for each B: a problem, the losses of both, the other problem; arrows are the best w."""
    from matplotlib.figure import Figure

    rows = len(toy.exponents)
    fig = Figure(figsize=(8.4, 2.3 * rows), layout="constrained")
    axes = fig.subplots(rows, 3, squeeze=False, width_ratios=(1, 1.35, 1))
    styles = ("-", (0, (4, 2)))
    for row, b in enumerate(toy.exponents):
        for p, problem in enumerate(toy.problems):
            axis = axes[row, 2 * p]
            _draw_problem(axis, problem, float(toy.best[p, row]))
            if row == 0:
                axis.set_title(problem.name, fontsize=10)
            middle = axes[row, 1]
            middle.plot(
                toy.angles, toy.losses[p, row], color=INK, linestyle=styles[p], lw=1.3,
                label=problem.name,
            )  # fmt: skip
            low = float(toy.losses[p, row].min())
            middle.plot([float(toy.best[p, row])], [low], "o", color=INK, ms=4)
        middle.axvline(RED_ANGLE, color=OURS, lw=0.8, alpha=0.6)
        middle.set_xlim(-180, 180)
        middle.set_xticks([-180, -90, 0, 90, 180])
        middle.spines[["top", "right"]].set_visible(False)
        middle.set_ylabel("BCE", fontsize=8)
        middle.tick_params(labelsize=7)
        axes[row, 0].set_ylabel(f"B = {b:g}", fontsize=11, rotation=0, ha="right", va="center")
    axes[0, 1].set_title("loss by the angle of w (red line: the red cluster)", fontsize=9)
    axes[0, 1].legend(fontsize=7, frameon=False)
    axes[-1, 1].set_xlabel("degrees", fontsize=8)
    return fig


def _draw_problem(axis: Any, problem: Problem, degrees: float) -> None:
    red = problem.labels == 1
    for chosen, colour in ((red, OURS), (~red, _BLUE)):
        x, y = problem.points[chosen].T
        axis.scatter(x, y, s=5, color=colour, alpha=0.6, linewidths=0)
    end = 3 * math.cos(math.radians(degrees)), 3 * math.sin(math.radians(degrees))
    axis.annotate(
        "", end, (0, 0), arrowprops={"arrowstyle": "-|>", "color": INK, "lw": 1.8, "shrinkA": 0}
    )
    axis.axhline(0, color="#d5d9e0", lw=0.7, zorder=0)
    axis.axvline(0, color="#d5d9e0", lw=0.7, zorder=0)
    axis.set_xlim(-5.2, 5.2)
    axis.set_ylim(-4.2, 5.2)
    axis.set_aspect("equal")
    axis.set_xticks([])
    axis.set_yticks([])


def write(toy: Toy, out: Path) -> list[Path]:
    """toy.json with data and numbers, and toy.png."""
    out.mkdir(parents=True, exist_ok=True)
    numbers, picture = out / "toy.json", out / "toy.png"
    write_atomically(numbers, (json.dumps(toy.as_json()) + "\n").encode())
    figure(toy).savefig(picture, dpi=150)
    return [numbers, picture]
