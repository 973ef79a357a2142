"""What a training does, as one frozen object; made from recipes and changes to them."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from torchbcos.augment import AUGMENTATIONS

__all__ = ["TrainConfig", "read_recipe"]


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the result. Defaults are the paper's for CIFAR-10."""

    data: str
    arch: str = "cifar9"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # for create_model
    preset: str | None = None  # "paper", or None to calibrate on the first batch
    size: int | None = None  # pixels; None for the data's own
    epochs: float = 100
    batch: int = 64
    optimiser: str = "adam"  # adam, adamw or sgd
    lr: float = 1e-3
    lr_end: float = 1e-5
    schedule: str = "cosine"  # or "step": ÷10 at each milestone
    milestones: tuple[float, ...] = ()  # epochs
    warmup: float = 0  # epochs of linear increase from lr_end
    weight_decay: float = 0.0
    momentum: float = 0.9  # of sgd
    augment: tuple[str, ...] = ("flip", "padded_crop")
    label_smoothing: float = 0.0
    auxiliary_weight: float = 1.0
    ema: float = 0.0  # decay of the averaged weights; 0 for none
    clip: float = 0.0  # largest gradient norm; 0 for none
    adaptive_clip: float = 0.0  # largest ‖gradient‖/‖weight‖ of a row; 0 for none
    accumulate: int = 1
    precision: str = "32-true"  # or bf16-mixed, 16-mixed
    tf32: bool = True
    compile: bool = False
    cuda_graph: bool = True  # capture the step where shapes are fixed and one GPU is used
    seed: int = 0

    def __post_init__(self) -> None:
        def refuse(name: str, rule: str) -> None:
            raise ValueError(f"`{name}` (={getattr(self, name)!r}) must be {rule}.")

        if self.optimiser not in ("adam", "adamw", "sgd"):
            refuse("optimiser", "adam, adamw or sgd")
        if self.schedule not in ("cosine", "step"):
            refuse("schedule", "cosine or step")
        for name in ("batch", "accumulate"):
            if getattr(self, name) < 1:
                refuse(name, "at least 1")
        if self.epochs <= 0:
            refuse("epochs", "above 0")
        if not 0 < self.lr < math.inf:
            refuse("lr", "a positive number")
        if not 0 <= self.ema < 1:
            refuse("ema", "from 0 to below 1")
        if not 0 <= self.label_smoothing < 1:
            refuse("label_smoothing", "from 0 to below 1")
        for name in self.augment:
            if name not in AUGMENTATIONS:
                refuse("augment", f"names among {', '.join(AUGMENTATIONS)}")
        if self.batch % self.accumulate:
            refuse("accumulate", f"a divisor of the batch, {self.batch}")

    def as_json(self) -> dict[str, Any]:
        """The settings as JSON gives them back, with lists for tuples."""
        value: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return value

    def lr_at(self, epoch: float) -> float:
        """The learning rate at a point in time, in epochs."""
        if epoch < self.warmup:
            return self.lr_end + (self.lr - self.lr_end) * epoch / self.warmup
        if self.schedule == "step":
            return float(self.lr * 0.1 ** sum(epoch >= m for m in self.milestones))
        done = (epoch - self.warmup) / max(self.epochs - self.warmup, 1e-9)
        return self.lr_end + (self.lr - self.lr_end) * (1 + math.cos(math.pi * min(done, 1))) / 2


def read_recipe(data: str, recipe: str = "", changes: Sequence[str] = ()) -> TrainConfig:
    """A config from a recipe's name or TOML file, with changes such as "lr=3e-4"."""
    known = {p.name.removesuffix(".toml"): p for p in _recipe_folder().iterdir()}
    if not recipe:
        text = known[data].read_text() if data in known else ""
    elif recipe in known:
        text = known[recipe].read_text()
    elif Path(recipe).is_file():
        text = Path(recipe).read_text()
    else:
        raise ValueError(
            f"`recipe` (={recipe!r}) must be a TOML file or one of {', '.join(sorted(known))}."
        )
    try:
        settings = tomllib.loads(text)
        for change in changes:
            settings |= _setting(change)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"`recipe` (={recipe!r}) is no valid TOML: {error}.") from error
    names = {f.name for f in dataclasses.fields(TrainConfig)} - {"data"}
    for name in settings:
        if name not in names:
            raise ValueError(f"`{name}` is no setting: choose among {', '.join(sorted(names))}.")
    lists = {k: tuple(v) for k, v in settings.items() if isinstance(v, list)}
    return TrainConfig(data, **{**settings, **lists})


def _recipe_folder() -> Any:
    return resources.files("torchbcos") / "recipes"


def _setting(change: str) -> dict[str, Any]:
    name, found, value = change.partition("=")
    if not found:
        raise ValueError(f"`--set` (={change!r}) must be name=value, as in lr=3e-4.")
    try:
        return tomllib.loads(f"{name} = {value}")
    except tomllib.TOMLDecodeError:
        return {name.strip(): value}  # a bare word is text
