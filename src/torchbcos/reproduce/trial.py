"""One experiment in its folder: train, measure, and write what came of it."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

from torchbcos._version import __version__
from torchbcos.baseline import to_explain
from torchbcos.checkpoint import load, write_atomically
from torchbcos.data import ImageSet, open_data
from torchbcos.evaluate import evaluate
from torchbcos.localise_run import Game, MethodScores, play
from torchbcos.models import BcosModel
from torchbcos.posthoc import METHODS
from torchbcos.reproduce.experiments import Experiment
from torchbcos.train import STATE, train
from torchbcos.training_config import TrainConfig

__all__ = ["Trial"]

SMOOTH = 3  # pixels, as in the paper for CIFAR-10


@dataclass(frozen=True)
class Trial:
    """Everything a process needs to know to run one experiment."""

    experiment: Experiment
    config: TrainConfig
    out: Path  # of the study
    data: str  # as the user named it; the config's may be a packed copy
    methods: tuple[str, ...] = ("all",)  # for experiments that compare
    grids: int = 500
    slow_grids: int = 100  # for methods that perturb images
    evidence: Mapping[str, Any] | None = None  # more of it: the command, the commit

    def __post_init__(self) -> None:
        for name in self.methods:
            if name != "all" and name not in METHODS:
                known = ", ".join(sorted(METHODS))
                raise ValueError(f"`--methods` (={name!r}) must be 'all' or of: {known}.")

    @property
    def name(self) -> str:
        return self.experiment.name

    @property
    def folder(self) -> Path:
        return self.out / "runs" / self.name

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    @property
    def result(self) -> Path:
        return self.out / "results" / f"{self.name}.json"

    def wanted(self) -> dict[str, int]:
        """How many grids each method is scored on; ours is the first, where there is one."""
        conventional = self.config.arch.startswith("conventional/")
        names = ["ours"]
        if self.experiment.compared:
            names += METHODS if "all" in self.methods else self.methods
        fitting = [METHODS[n] for n in names if not (conventional and METHODS[n].inherent)]
        return {m.name: self.slow_grids if m.perturbs else self.grids for m in fitting}

    def finished(self) -> bool:
        """Whether the result is there; one of other settings is an error."""
        if not self.result.exists():
            return False
        document = json.loads(self.result.read_text())
        for name, value in self._settings().items():
            made = document["config"].get(name, value)
            if made != value and name != "data":
                raise ValueError(
                    f"{self.result} was made with `{name}` (={made!r}), not {value!r}: choose "
                    f"another --out, or remove it and {self.folder}."
                )
        scored = document["localisation"]["methods"]
        return all(scored.get(m, {}).get("grids") == n for m, n in self.wanted().items())

    def run(self, console: Console) -> None:
        """Train or go on training, then measure; the result is written after every measurement."""
        self.result.parent.mkdir(parents=True, exist_ok=True)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = self._trained(console).to(device)
        tf32 = self.config.tf32  # also where the training was in another process
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        images = self._test_images().to(device)
        accuracy, loss = evaluate(model, images)
        document: dict[str, Any] = {
            "name": self.name,
            "what": self.experiment.what,
            "recipe": self.experiment.recipe,
            "accuracy": accuracy,
            "loss": loss,
            "images": len(images),
            "parameters": sum(p.numel() for p in model.parameters()),
            "scaling": _scaling(model),
            "localisation": {
                "game": asdict(Game(self.grids, smooth=SMOOTH)),
                "methods": {},
            },
            "curve": self._curve(),
            "config": self._settings(),
            "evidence": {**_machine(device), **(self.evidence or {}), "seed": self.config.seed},
        }
        document["seconds"] = {"training": document["curve"]["seconds"][-1], "localisation": 0.0}
        self._write(document)
        for method, grids in self.wanted().items():
            scores = self._scores(to_explain(model), images, method, grids, console)
            document["localisation"]["methods"][method] = _as_json(scores, self.slow_grids)
            document["seconds"]["localisation"] += round(scores.seconds, 2)
            self._write(document)

    def _trained(self, console: Console) -> BcosModel:
        """From its file, that is, as everyone else will have it."""
        path = self.folder / "model.safetensors"
        if not path.exists() or not self._is_mine(load(path)):
            train(self.config, self.folder, console=console, resume=True)
        (self.folder / STATE).unlink(missing_ok=True)  # three times the model, and done with
        return load(path)

    def _is_mine(self, model: BcosModel) -> bool:
        made = {**model.provenance.get("config", {}), "data": self.data}
        return made == self._settings()

    def _settings(self) -> dict[str, Any]:
        return {**self.config.as_json(), "data": self.data}

    def _test_images(self) -> ImageSet:
        c = self.config
        size = c.size or None
        return open_data(c.data, size, bad=c.bad, memory=c.memory, part=c.test_part).test

    def _curve(self) -> dict[str, list[float]]:
        lines = [json.loads(x) for x in (self.folder / "metrics.jsonl").read_text().splitlines()]
        names = "epoch train_loss train_accuracy test_loss test_accuracy seconds".split()
        return {name: [float(f"{line[name]:.5g}") for line in lines] for name in names}

    def _scores(
        self, model: nn.Module, images: ImageSet, method: str, grids: int, console: Console
    ) -> MethodScores:
        game = Game(grids, smooth=SMOOTH)
        where = self.folder / "scores"
        played = play(
            model, images, [method], game, name=self.name, data=self.data, out=where,
            console=console,
        )  # fmt: skip
        scores = played.methods[0]
        console.print(
            f"{scores.label}: {scores.summary.mean:.3f} on {grids} grids, {scores.seconds:.1f} s",
            highlight=False,
        )
        return scores

    def _write(self, document: Mapping[str, Any]) -> None:
        write_atomically(self.result, (_readable(document) + "\n").encode())


def _as_json(scores: MethodScores, first: int) -> dict[str, Any]:
    """The summary, percentiles 0 to 100 of all cells' scores, from which boxes are drawn, and the
    mean of the `first` grids, which slow methods are scored on: a plan of fewer grids begins as one
    of more.
    """
    percentiles = np.percentile(scores.scores, np.arange(101))
    method = METHODS[scores.method]
    return {
        "label": scores.label,
        **asdict(scores.summary),
        "mean_of_first": float(scores.scores[:first].mean()),
        "first": min(first, len(scores.scores)),
        "smooth": 0 if method.perturbs else SMOOTH,
        "seconds": round(scores.seconds, 2),
        "percentiles": [round(float(p), 4) for p in percentiles],
    }


def _scaling(model: BcosModel) -> dict[str, Any]:
    """How γ and T were set. In a plain sequence only γ₁·…·γ_L / T matters."""
    layers = [layer.scale for _, layer in model.bcos_layers()]
    found = {"kind": model.scaling, "temperature": model.temperature}
    if not layers:
        return found
    total = sum(math.log10(scale) for scale in layers) - math.log10(model.temperature)
    return {**found, "gamma": layers, "log10_total": total}


def _machine(device: str) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "hardware": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "cores": cores,
        "torch": torch.__version__,
        "torchbcos": __version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _readable(document: Mapping[str, Any]) -> str:
    """JSON with one line for each entry of a table, however long its lists are."""

    def lines(value: Any, indent: str) -> str:
        if not isinstance(value, Mapping) or not value:
            return json.dumps(value, ensure_ascii=False)
        inner = indent + " "
        entries = (f"{inner}{json.dumps(k)}: {lines(v, inner)}" for k, v in value.items())
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"

    return lines(document, "")
