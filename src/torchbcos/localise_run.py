"""Play the grid pointing game with a model, a set of images and methods; results stay on disk."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from torchbcos._arguments import naming_size
from torchbcos._version import __version__
from torchbcos.batches import at_once
from torchbcos.checkpoint import write_atomically
from torchbcos.data import ImageSet
from torchbcos.disconnected import cell_targets, difull, dipart
from torchbcos.evidence import device_name
from torchbcos.explain import logits_of, network_input
from torchbcos.game import Game
from torchbcos.localise import (
    Summary,
    check_window,
    compose,
    plan_grids,
    score_cells,
    summarise,
)
from torchbcos.models import BcosModel, in_mode
from torchbcos.posthoc import Method, choose_methods
from torchbcos.wrappers import check_together, unwrapped

__all__ = ["Game", "MethodScores", "Played", "grid_images", "play", "subject_of", "targets_of"]

_SAVE_EVERY = 30.0  # seconds
# Grids that are looked at together: at most so many, and no more pixels than these on a CPU, or
# these for each GiB of a GPU's free memory, of which DenseNet-121 keeps 2.5 kB for a pixel.
_TOGETHER, _PIXELS, _PIXELS_PER_GIB = 8, 2**19, 2**15


@dataclass(frozen=True)
class MethodScores:
    """How one method did."""

    method: str
    label: str
    scores: np.ndarray  # [grids, n·n]
    seconds: float

    @property
    def summary(self) -> Summary:
        return summarise(self.scores)


@dataclass(frozen=True)
class Played:
    """How a model did, by all methods."""

    name: str
    accuracy: float  # on all images
    exponent: float | None  # B, of a B-cos model with one
    outputs: int  # of the model
    plan: Tensor  # [grids, n·n] indices of images
    methods: tuple[MethodScores, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.name,
            "accuracy": self.accuracy,
            "b": self.exponent,
            "methods": {
                m.method: {**asdict(m.summary), "seconds": round(m.seconds, 2)}
                for m in self.methods
            },
        }


def play(
    model: nn.Module,
    images: ImageSet,
    methods: Sequence[str] = ("all",),
    game: Game | None = None,
    *,
    name: str = "model",
    data: str = "",
    classes: int | None = None,
    out: Path | None = None,
    batch: int | None = None,
    console: Console | None = None,
    tell: Callable[[MethodScores], None] = lambda _: None,
) -> Played:
    """Score every method on the grids that `game` plans for this model.

    So many grids as `batch` says are looked at together, by default as the memory allows.

    With `out` each method's scores are written to `out/METHOD.json` as they come, and what is there
    already from the same game is not computed again. Images and model must be on one device; the
    model is in evaluation mode meanwhile. `tell` is told of each method as soon as it is scored. A
    method whose maps are not finite is an error, after the others are scored. If the number of
    `classes` of the data is given, the model must have as many outputs.
    """
    game = game or Game()
    if batch is not None and batch < 1:
        raise ValueError(f"`batch` (={batch}) must be at least 1 grid.")
    console = console or Console(quiet=True)
    chosen = choose_methods(methods, model)
    for method in chosen:
        method.check(model)
        kernel = game.kernel(method, images.size[-1])
        check_window(kernel, *(game.n * side for side in images.size))
    with in_mode(model, training=False):
        outputs = _check_fits(model, images, game)
        if classes is not None and classes != outputs:
            raise ValueError(
                f"`data` (={data!r}) has {classes} classes, and {name!r} has {outputs} outputs: "
                "name images of the classes that it learned."
            )
        device = images.batch(torch.tensor([0]))[0].device
        together = _grids_at_once(game, images, device) if batch is None else batch
        most = None if batch is None else batch * game.n**2
        logits = _predict(unwrapped(model), images, most, console)
        plan = plan_grids(
            logits, images.labels, grids=game.grids, n=game.n, preset=game.preset, seed=game.seed
        )
        identity = {
            "torchbcos": __version__,
            "model": name,
            "weights": _digest(model),
            "data": data,
            "size": images.size,
            "game": asdict(game),
            "plan": hashlib.sha256(plan.numpy().tobytes()).hexdigest(),
        }
        run = _Run(images, game, plan, outputs, together, identity, device, out, console)
        scores = _all_scored(run, model, chosen, name, tell)
    accuracy = _right(logits, images.labels).double().mean().item()
    return Played(name, accuracy, _exponent(model), outputs, plan, scores)


def _all_scored(
    run: _Run,
    model: nn.Module,
    methods: Sequence[Method],
    name: str,
    tell: Callable[[MethodScores], None],
) -> tuple[MethodScores, ...]:
    results: dict[str, MethodScores] = {}
    broken: list[str] = []
    for method in methods:
        subject = subject_of(run.game.given(model, method), run.images, run.plan, run.game)
        twin = results.get(method.twin(subject))
        if twin is not None:
            results[method.name] = replace(
                twin, method=method.name, label=method.label, seconds=0.0
            )
            run.console.print(f"{method.label}: the same as {twin.label} here.", highlight=False)
        else:
            found = run.score(method, subject)
            bad = int((~np.isfinite(found.scores).all(1)).sum())
            if bad:
                broken.append(f"{method.label} in {bad} of {len(run.plan)} grids")
                continue
            results[method.name] = found
        tell(results[method.name])
    if broken:
        raise ValueError(
            f"`methods` (={', '.join(broken)}) must give finite maps of {name!r}, and did not: "
            "leave them out, or look for logits that are not finite."
        )
    return tuple(results.values())


def _right(logits: Tensor, labels: Tensor) -> Tensor:
    """[N]; labels of images that are streamed stay on the CPU."""
    return logits.argmax(1) == labels.to(logits.device)


def grid_images(images: ImageSet, rows: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The grids of some rows of a plan, [G, C, n·H, n·W], and the classes of their cells."""
    cells, labels = images.batch(rows.flatten())
    return compose(cells, n), labels.view(len(rows), -1)


@dataclass(frozen=True)
class _Run:
    """A game of one model, whatever the method."""

    images: ImageSet
    game: Game
    plan: Tensor
    outputs: int
    batch: int
    identity: dict[str, Any]
    device: torch.device
    out: Path | None
    console: Console

    def score(self, method: Method, model: nn.Module) -> MethodScores:
        """By the file of earlier scores, as far as it goes; then on the grids that are left."""
        images, plan, n = self.images, self.plan, self.game.n
        smooth = self.game.kernel(method, images.size[-1])
        identity = {**self.identity, "method": method.name, "smooth": smooth}
        path = self.out / f"{method.name}.json" if self.out is not None else None
        done, seconds = _stored(path, identity)
        parts: list[Tensor] = [torch.tensor(done, dtype=torch.float64).reshape(-1, n**2)]
        if len(done) == len(plan):
            text = f"{method.label}: {len(done)} grids are scored already."
            self.console.print(text, highlight=False)
            return MethodScores(method.name, method.label, parts[0].numpy(), seconds)
        # [G, n·n]; on the CPU, so that no check waits for a GPU
        wanted = targets_of(images.labels.cpu()[plan], self.outputs, self.game)
        batch = 1 if method.perturbs else self.batch  # they fill the device by themselves
        started = saved = time.perf_counter()
        with _progress(self.console) as progress:
            task = progress.add_task(method.label, total=len(plan), completed=len(done))
            for rows, targets in zip(
                plan[len(done) :].split(batch), wanted[len(done) :].split(batch), strict=True
            ):
                grids, _ = grid_images(images, rows, n)
                scores = score_cells(method(model, grids, targets), n, smooth)
                # Fast methods never wait for a GPU; of slow ones the time is to be known.
                parts.append(scores.cpu() if method.perturbs else scores)
                if progress.tasks[0].completed == len(done):
                    taken = time.perf_counter() - started
                    left = len(plan) - len(done)
                    _announce(self.console, method.label, taken, len(rows), left, "grids")
                progress.advance(task, len(rows))
                now = time.perf_counter()
                if path is not None and now - saved > _SAVE_EVERY:
                    parts = [_joined(parts)]
                    passed = seconds + now - started
                    self._write(path, identity, parts[0], passed, complete=False)
                    saved = now
        scores = _joined(parts)
        seconds += time.perf_counter() - started
        if path is not None and bool(scores.isfinite().all()):
            self._write(path, identity, scores, seconds, complete=True)
        return MethodScores(method.name, method.label, scores.numpy(), seconds)

    def _write(
        self, path: Path, identity: dict[str, Any], scores: Tensor, seconds: float, complete: bool
    ) -> None:
        document = {
            "identity": identity,
            "complete": complete,
            **asdict(summarise(scores)),
            "seconds": seconds,
            "evidence": _evidence(self.device),
            "scores": scores.tolist(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(document) + "\n").encode())


def _grids_at_once(game: Game, images: ImageSet, device: torch.device) -> int:
    pixels = _PIXELS
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        pixels = int(free / 2**30 * _PIXELS_PER_GIB)
    height, width = images.size
    return max(1, min(_TOGETHER, pixels // (game.n**2 * height * width)))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([p.cpu() for p in parts])


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    shown = console.is_terminal
    return Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not shown
    )


def _announce(
    console: Console, what: str, taken: float, count: int, total: int, things: str
) -> None:
    """After the first batch of slow work, say how long it will take: also where no bar is drawn."""
    seconds = taken / count * (total - count)
    if seconds > 60:
        text = f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
        console.print(f"{what}: about {text} left for {total} {things}.", highlight=False)


def _stored(path: Path | None, identity: dict[str, Any]) -> tuple[list[list[float]], float]:
    """Scores of the same game that are there already, and the seconds they took."""
    if path is None or not path.exists():
        return [], 0.0
    try:
        document = json.loads(path.read_bytes())
        if document["identity"] != json.loads(json.dumps(identity)):
            return [], 0.0
        return document["scores"], float(document["seconds"])
    except (ValueError, KeyError, TypeError):
        return [], 0.0


def _evidence(device: torch.device) -> dict[str, str]:
    found = {"torchbcos": __version__, "torch": torch.__version__, "device": device_name(device)}
    for package in ("captum", "lime", "scikit-image"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


@torch.no_grad()
def _check_fits(model: nn.Module, images: ImageSet, game: Game) -> int:
    """How many outputs the network has, if it takes cells and grids of these sizes."""
    inner = unwrapped(model)
    cell, _ = images.batch(torch.tensor([0]))
    check_together(inner, cell)
    sizes = {"a cell": cell}
    if game.setting != "difull":  # there each cell is seen by itself
        grid = compose(cell.repeat(game.n**2, 1, 1, 1), game.n)
        sizes[f"a grid of {game.n}×{game.n} cells"] = grid
    for what, pixels in sizes.items():
        height, width = pixels.shape[-2:]
        remedy = "choose another `size`" if what == "a cell" else "choose setting 'difull'"
        with naming_size(f"{what} (={height}×{width} px)", inner, f"; {remedy}"):
            outputs = logits_of(inner, network_input(inner, pixels)).shape[1]
    return outputs


@torch.no_grad()
def _predict(model: nn.Module, images: ImageSet, most: int | None, console: Console) -> Tensor:
    """In batches that do not depend on what memory is free: others round otherwise, and images that
    are nearly as confident would change places in the plan.
    """
    batch = at_once(images.size, images.batch(torch.tensor([0]))[0].device)
    batch = min(batch, most or batch)
    logits: list[Tensor] = []
    with _progress(console) as progress:
        task = progress.add_task("Predictions", total=len(images))
        for indices in torch.arange(len(images)).split(batch):
            started = time.perf_counter()
            logits.append(logits_of(model, network_input(model, images.batch(indices)[0])))
            taken = time.perf_counter() - started
            if len(logits) == 2:  # the first also warms up
                _announce(console, "Predictions", taken, len(indices), len(images), "images")
            progress.advance(task, len(indices))
    return torch.cat(logits)


def subject_of(model: nn.Module, images: ImageSet, plan: Tensor, game: Game) -> nn.Module:
    """What is explained on the grids of a plan: the model or, by the setting, one that is cut."""
    if game.setting == "difull":
        return difull(model, game.n)
    if game.setting == "dipart":
        grids, _ = grid_images(images, plan[:1], game.n)
        return dipart(model, game.n, grids)
    return model


def targets_of(labels: Tensor, outputs: int, game: Game) -> Tensor:
    """The subject's outputs [G, n·n] for the classes of the cells, of a model with so many."""
    return labels if game.setting == "grid" else cell_targets(labels, outputs)


def _digest(model: nn.Module) -> str:
    """Of weights, and of settings such as B, γ and T, which are plain attributes."""
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        settings = [
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, int | float | str | tuple) and key != "training" and key[0] != "_"
        ]
        digest.update(f"{name} {settings}".encode())
    buffers = dict(model.named_buffers())  # those, too, that are in no state_dict
    for key, value in {**buffers, **model.state_dict()}.items():
        digest.update(key.encode())
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _exponent(model: nn.Module) -> float | None:
    inner = unwrapped(model)
    found = {layer.b for _, layer in inner.bcos_layers()} if isinstance(inner, BcosModel) else set()
    return float(found.pop()) if len(found) == 1 else None
