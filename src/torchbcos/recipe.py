"""Recipes: TOML files that make a `TrainConfig`, each for one experiment."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from torchbcos.training_config import TrainConfig

__all__ = ["list_recipes", "read_recipe"]


def read_recipe(recipe: str, data: str = "", changes: Sequence[str] = ()) -> TrainConfig:
    """A config from a recipe's name or TOML file, with changes such as "lr=3e-4".

    A recipe may name another as its `base`, whose settings are its own unless it says otherwise.

    >>> read_recipe("cifar10-b1.25", "data/cifar10", ["options.max_out=1"]).options
    {'b': 1.25, 'max_out': 1}
    """
    changed: dict[str, Any] = {}
    for change in changes:
        changed = _merged(changed, _setting(change))
    settings = _above(_settings(recipe), changed)
    if data:
        settings["data"] = data
    if not settings.get("data"):
        raise ValueError(f"`--data` is missing: the recipe {recipe!r} needs a folder of images.")
    names = {f.name for f in dataclasses.fields(TrainConfig)}
    for name in settings:
        if name not in names:
            close = difflib.get_close_matches(name, names, 3)
            if close:
                raise ValueError(f"`{name}` is no setting: did you mean {' or '.join(close)}?")
            raise ValueError(f"`{name}` is no setting; all are {', '.join(sorted(names))}.")
    lists = {k: tuple(v) for k, v in settings.items() if isinstance(v, list)}
    return TrainConfig(**{**settings, **lists})


def list_recipes() -> dict[str, str]:
    """The name of each recipe and what it is for, from its first line.

    >>> list_recipes()["shapes"]
    'The synthetic shapes, on two CPU cores in two minutes'
    """
    texts = {name: path.read_text(encoding="utf-8") for name, path in sorted(_bundled().items())}
    return {
        name: text.split("\n")[0].removeprefix("#").strip().removesuffix(".")
        for name, text in texts.items()
    }


def _bundled() -> dict[str, Path]:
    folder = Path(str(resources.files("torchbcos"))) / "recipes"
    return {path.name.removesuffix(".toml"): path for path in folder.glob("*.toml")}


def _settings(recipe: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    bundled = _bundled()
    path = bundled.get(recipe, Path(recipe))
    if not path.is_file():
        close = difflib.get_close_matches(recipe, bundled, 3) or ["shapes", "cifar10"]
        raise ValueError(
            f"`recipe` (={recipe!r}) must be a TOML file or a recipe's name: did you mean "
            f"{' or '.join(close)}? torchbcos train --list shows all."
        )
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"`recipe` (={recipe!r}) is no valid TOML: {error}.") from error
    base = settings.pop("base", None)
    if base is None:
        return settings
    if not isinstance(base, str) or base in above:
        raise ValueError(f"`base` (={base!r}) of {recipe} must be the name of another recipe.")
    below = _settings(base, (*above, recipe))
    return _above(below, settings)


def _above(below: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` over those of a base, whose options were for its own network alone."""
    if settings.get("arch", below.get("arch")) != below.get("arch"):
        below = {name: value for name, value in below.items() if name != "options"}
    return _merged(below, settings)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`; tables are merged key by key."""
    merged = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(name), dict)
        merged[name] = _merged(below[name], value) if both else value
    return merged


def _setting(change: str) -> dict[str, Any]:
    name, found, value = change.partition("=")
    if not found:
        raise ValueError(f"`{change}` must be name=value, as in lr=3e-4.")
    for written in (value, json.dumps(value.strip(), ensure_ascii=False)):  # a bare word is text
        with contextlib.suppress(tomllib.TOMLDecodeError):
            return tomllib.loads(f"{name} = {written}")
    return {name.strip(): value.strip()}  # no setting has such a name
