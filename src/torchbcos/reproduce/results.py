"""The JSON files of the experiments, read again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchbcos.posthoc import METHODS
from torchbcos.recipe import read_recipe
from torchbcos.reproduce.experiments import Experiment

__all__ = [
    "Result",
    "Results",
    "method_rank",
    "read_json",
    "read_repeats",
    "read_results",
    "read_tries",
]


@dataclass(frozen=True)
class Result:
    """What is in one JSON file, as it is quoted."""

    experiment: Experiment
    document: Mapping[str, Any]

    @property
    def accuracy(self) -> float:
        """In %."""
        return 100 * float(self.document["accuracy"])

    @property
    def methods(self) -> Mapping[str, Mapping[str, Any]]:
        """In one order, however they were run."""
        found: Mapping[str, Mapping[str, Any]] = self.document["localisation"]["methods"]
        return {name: found[name] for name in sorted(found, key=method_rank)}

    @property
    def ours(self) -> float | None:
        return self.methods["ours"]["mean"] if "ours" in self.methods else None

    @property
    def b(self) -> float:
        return float(self.document["config"]["options"].get("b", 2.0))

    def deviations(self) -> list[str]:
        """Settings that are not the recipe's."""
        e, made = self.experiment, self.document["config"]
        usual = read_recipe(e.recipe, made["data"], e.changes).as_json()
        apart = {"options"}
        if made["arch"].startswith("conventional/"):
            apart.add("weight_rms")  # of B-cos weights, of which it has none
        others = [k for k, v in usual.items() if k not in apart and made.get(k, v) != v]
        options, own = usual["options"], made["options"]
        return [f"{k}={made[k]!r}" for k in others] + [
            f"options.{k}={own[k]!r}" if k in own else f"options.{k}=default"
            for k in sorted({*options, *own})
            if options.get(k) != own.get(k)
        ]


Results = Mapping[str, Result]


def method_rank(name: str) -> int:
    """Where a method stands in tables and pictures; unknown ones come last."""
    return list(METHODS).index(name) if name in METHODS else len(METHODS)


def read_results(folder: Path, experiments: Mapping[str, Experiment]) -> Results:
    """Those that are there, by name, in the order of the experiments."""
    if not folder.is_dir():
        raise ValueError(f"`--results` (={str(folder)!r}) must be a folder of JSON files.")
    found = {}
    for name, experiment in experiments.items():
        path = folder / f"{name}.json"
        if path.exists():
            found[name] = Result(experiment, read_json(path))
    if not found:
        raise ValueError(f"`--results` (={str(folder)!r}) holds no result of an experiment.")
    return found


def read_tries(folder: Path, experiments: Mapping[str, Experiment]) -> dict[str, Result]:
    """By file name, of tries/*.json: experiments with other settings, or once more."""
    documents = {path.stem: read_json(path) for path in sorted((folder / "tries").glob("*.json"))}
    return {stem: Result(experiments[d["name"]], d) for stem, d in documents.items()}


def read_repeats(folder: Path, experiments: Mapping[str, Experiment]) -> list[Result]:
    """The tries that differ in no setting."""
    return [r for r in read_tries(folder, experiments).values() if not r.deviations()]


def read_json(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): run it again.") from error
    return document
