"""One experiment in its folder: train, measure, and write what came of it."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn
from torch.nn.functional import one_hot

from torchbcos._cuda import cuda_settings
from torchbcos._version import __version__
from torchbcos.baseline import to_explain
from torchbcos.batches import find_damaged
from torchbcos.checkpoint import load, save, write_atomically
from torchbcos.data import ImageFiles, ImageSet, Split, open_data
from torchbcos.evaluate import evaluate
from torchbcos.evidence import cores, device_name, without_home
from torchbcos.localise import plan_grids
from torchbcos.localise_run import Game, MethodScores, play
from torchbcos.models import BcosModel, create_model
from torchbcos.posthoc import METHODS
from torchbcos.reproduce.experiments import Experiment
from torchbcos.reproduce.units import describe_units
from torchbcos.train import train
from torchbcos.training_config import TrainConfig
from torchbcos.training_state import MODEL, STATE

__all__ = ["Trial"]

UNITS = "neurons"  # the name of the result about inner units


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
    smooth: int = 3  # pixels of the window that smooths maps
    slow: tuple[str, ...] = ()  # further methods for `slow_grids`

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

    @property
    def units_result(self) -> Path:
        return self.result.with_name(f"{UNITS}.json")

    def wanted(self) -> dict[str, int]:
        """How many grids each method is scored on; ours is the first, where there is one."""
        conventional = self.config.arch.startswith("conventional/")
        names = ["ours"]
        if self.experiment.compared:
            names += METHODS if "all" in self.methods else self.methods
        fitting = [METHODS[n] for n in names if not (conventional and METHODS[n].inherent)]
        slow = {m.name for m in fitting if m.perturbs or m.name in self.slow}
        return {m.name: self.slow_grids if m.name in slow else self.grids for m in fitting}

    def finished(self) -> bool:
        """Whether the result is there; one of other settings is an error."""
        if not self.result.exists():
            return False
        document = json.loads(self.result.read_bytes())
        for name, value in self._settings().items():
            made = document["config"].get(name, value)
            if made != value and name != "data":
                raise ValueError(
                    f"{self.result} was made with `{name}` (={made!r}), not {value!r}: choose "
                    f"another --out, or remove it and {self.folder}."
                )
        if self.experiment.units and not self.units_result.exists():
            return False
        scored = document["localisation"]["methods"]
        return all(scored.get(m, {}).get("grids") == n for m, n in self.wanted().items())

    def check(self) -> None:
        """Refuse what would end it after the training: missing packages, too few images."""
        c, names = self.config, self.wanted()
        if any(find_spec(package) is None for m in names for package in METHODS[m].needs):
            network = to_explain(create_model(c.arch, num_classes=10, **c.options))
            for name in names:
                METHODS[name].check(network)
        split, n = self._test_split(), Game().n
        if len(split.classes) < n * n:
            raise ValueError(
                f"`--data` (={self.data!r}) has {len(split.classes)} classes, and the pointing "
                f"game needs {n * n}, one for each cell of its {n}×{n} grids."
            )
        labels = split.test.labels.cpu().long()
        all_right = one_hot(labels, len(split.classes)).float()
        for grids in set(names.values()):
            plan_grids(all_right, labels, grids=grids, n=n)

    def run(self, console: Console) -> None:
        """Train or go on training, then measure; the result is written after every measurement."""
        with cuda_settings(tf32=self.config.tf32):  # also where another process trained
            self._run(console)

    def _run(self, console: Console) -> None:
        to_score = {**self.wanted(), **self._scored_before()}
        self.result.parent.mkdir(parents=True, exist_ok=True)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        of_scores = {**_machine(device), **(self.evidence or {}), "seed": self.config.seed}
        path = self.folder / "evidence.json"  # of the training, which other commands may score
        if not path.exists():
            _write(path, of_scores)
        of_training = json.loads(path.read_bytes())
        model = self._trained(console).to(device)
        model.to(memory_format=torch.channels_last)
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
                "game": asdict(Game(self.grids, smooth=self.smooth)),
                "methods": {},
            },
            "curve": self._curve(),
            "config": {**self._settings(), "data": without_home(self.data)},
            "evidence": of_training,
        }
        if of_scores != of_training:
            document["evidence_of_scores"] = of_scores
        document["seconds"] = {"training": document["curve"]["seconds"][-1], "localisation": 0.0}
        if self.experiment.bundle:
            document["bundle"] = self._bundle(model, images)
        _write(self.result, document)

        def add(scores: MethodScores) -> None:
            document["localisation"]["methods"][scores.method] = self._as_json(scores)
            document["seconds"]["localisation"] += round(scores.seconds, 2)
            _write(self.result, document)

        for grids in dict.fromkeys(to_score.values()):
            methods = [name for name, of in to_score.items() if of == grids]
            self._play(to_explain(model), images, methods, grids, console, add)
        if self.experiment.units:
            about = {name: document[name] for name in ("name", "what", "accuracy", "images")}
            found = describe_units(
                model, images, self.experiment.units, self.folder, console=console
            )
            _write(self.units_result, {**about, **found, "evidence": document["evidence"]})

    def _scored_before(self) -> dict[str, int]:
        """Further methods of the result that is there, on as many grids as they would get now.

        Their scores are in files, and are read: asking for another method loses none.
        """
        if not self.result.exists():
            return {}
        scored = json.loads(self.result.read_bytes())["localisation"]["methods"]
        stored = {path.stem for path in (self.folder / "scores").glob("*.json")}
        every = replace(self, methods=("all",)).wanted()
        return {
            m: n for m, n in every.items() if m in stored and scored.get(m, {}).get("grids") == n
        }

    def _bundle(self, model: BcosModel, images: ImageSet) -> dict[str, Any]:
        """The weights in float16 below `out`, and how good the model is with them."""
        path = self.out / f"{self.experiment.bundle}.safetensors"
        model.provenance["config"]["data"] = without_home(self.data)
        save(model, path, half=True)
        accuracy, loss = evaluate(load(path).to(images.labels.device), images)
        return {"name": path.stem, "bytes": path.stat().st_size, "accuracy": accuracy, "loss": loss}

    def _trained(self, console: Console) -> BcosModel:
        """From its file, that is, as everyone else will have it."""
        path = self.folder / MODEL
        if not path.exists() or not self._is_mine(load(path)):
            train(self.config, self.folder, console=console, resume=True)
        (self.folder / STATE).unlink(missing_ok=True)  # three times the model, and done with
        return load(path)

    def _is_mine(self, model: BcosModel) -> bool:
        made = {**model.provenance.get("config", {}), "data": self.data}
        return all(made.get(name, value) == value for name, value in self._settings().items())

    def _settings(self) -> dict[str, Any]:
        return {**self.config.as_json(), "data": self.data}

    def _test_split(self) -> Split:
        return open_data(self.config.data, only="test", **self.config.reading)

    def _test_images(self) -> ImageSet:
        """Those that the training tested on; of streamed ones it has noted the damaged."""
        images = self._test_split().test
        if isinstance(images, ImageFiles):
            damaged = find_damaged(images, self.folder / "checked-test.json")
            images = images.without(damaged, self.config.bad)
        return images

    def _curve(self) -> dict[str, list[float]]:
        lines = [json.loads(x) for x in (self.folder / "metrics.jsonl").read_bytes().splitlines()]
        names = "epoch train_loss train_accuracy test_loss test_accuracy seconds".split()
        return {name: [float(f"{line[name]:.5g}") for line in lines] for name in names}

    def _play(
        self,
        model: nn.Module,
        images: ImageSet,
        methods: Sequence[str],
        grids: int,
        console: Console,
        add: Callable[[MethodScores], None],
    ) -> None:
        def tell(scores: MethodScores) -> None:
            add(scores)
            console.print(
                f"{scores.label}: {scores.summary.mean:.3f} on {grids} grids, "
                f"{scores.seconds:.1f} s",
                highlight=False,
            )

        game = Game(grids, smooth=self.smooth)
        play(
            model, images, methods, game, name=self.name, data=self.data,
            out=self.folder / "scores", console=console, tell=tell,
        )  # fmt: skip

    def _as_json(self, scores: MethodScores) -> dict[str, Any]:
        """The summary, percentiles 0 to 100 of all cells' scores, from which boxes are drawn, and
        mean and median of the first grids, which slow methods are scored on: a plan of fewer grids
        begins as one of more.
        """
        first = scores.scores[: self.slow_grids]
        percentiles = np.percentile(scores.scores, np.arange(101))
        return {
            "label": scores.label,
            **asdict(scores.summary),
            "mean_of_first": float(first.mean()),
            "median_of_first": float(np.median(first)),
            "first": len(first),
            "smooth": 0 if METHODS[scores.method].perturbs else self.smooth,
            "seconds": round(scores.seconds, 2),
            "percentiles": [round(float(p), 4) for p in percentiles],
        }


def _write(path: Path, document: Mapping[str, Any]) -> None:
    write_atomically(path, (_readable(document) + "\n").encode())


def _scaling(model: BcosModel) -> dict[str, Any]:
    """How γ and T were set. In a plain sequence only γ₁·…·γ_L / T matters."""
    layers = [layer.scale for _, layer in model.bcos_layers()]
    found = {"kind": model.scaling, "temperature": model.temperature}
    if not layers:
        return found
    total = sum(math.log10(scale) for scale in layers) - math.log10(model.temperature)
    return {**found, "gamma": layers, "log10_total": total}


def _machine(device: str) -> dict[str, Any]:
    return {
        "hardware": device_name(device),
        "cores": cores(),
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
