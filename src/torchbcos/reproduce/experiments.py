"""What is trained and measured: experiments, and the studies they belong to."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchbcos.recipe import read_recipe
from torchbcos.training_config import TrainConfig

__all__ = ["Experiment", "Study"]


@dataclass(frozen=True)
class Experiment:
    """One training and what is measured afterwards."""

    name: str
    recipe: str
    what: str
    changes: tuple[str, ...] = ()  # of the recipe's settings
    compared: bool = False  # with the post-hoc methods, too
    paper: float | None = None  # the accuracy that the paper reports, in %
    units: tuple[str, ...] = ()  # layers whose units are looked at, too
    bundle: str = ""  # the name under which its weights are also written in float16

    def config(self, data: str, changes: Sequence[str] = ()) -> TrainConfig:
        return read_recipe(self.recipe, data, [*self.changes, *changes])


@dataclass(frozen=True)
class Study:
    """Experiments on one data set, and the page made of their results."""

    name: str
    data: str  # what its folder holds
    experiments: Mapping[str, Experiment]  # by name, in the order of the page
    write_page: Callable[[Path, Path], list[Path]]  # of the results' folder and the docs'
    reported: str = "paper"  # where the experiments' `paper` is from
    smooth: int = 3  # pixels of the window that smooths maps
    grids: int = 500
    slow_grids: int = 100  # for methods that perturb images and for those of `slow`
    slow: tuple[str, ...] = ()

    def choose(self, names: Iterable[str] = ()) -> list[Experiment]:
        """Those of these names, or all."""
        chosen = list(dict.fromkeys(names)) or list(self.experiments)
        for name in chosen:
            if name not in self.experiments:
                close = difflib.get_close_matches(name, self.experiments, 3)
                meant = f"did you mean {' or '.join(close)}? " if close else ""
                raise ValueError(
                    f"`--only` (={name!r}) must name experiments: {meant}--list shows all."
                )
        return [self.experiments[name] for name in chosen]
