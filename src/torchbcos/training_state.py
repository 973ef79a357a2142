"""All that changes during a training, and its file: enough to go on as if nothing had happened."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from torchbcos.checkpoint import write_atomically
from torchbcos.models import BcosModel
from torchbcos.training_config import TrainConfig

__all__ = ["MODEL", "STATE", "TrainingState", "check_free", "check_same", "held", "whole"]


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of it if this process holds only a shard."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


MODEL, STATE = "model.safetensors", "state.safetensors"  # in a run's folder


def check_free(out: Path) -> None:
    """Refuse a folder that holds a training, which another would overwrite."""
    there = [name for name in (MODEL, STATE) if (out / name).exists()]
    if there:
        raise ValueError(
            f"`out` (={str(out)!r}) holds a training already, in {there[0]}: go on with it by "
            "--resume (`resume=True`), or choose another folder."
        )


_held: set[int] = set()  # the folders that this process holds


def _let_go() -> None:
    for folder in _held:
        os.close(folder)
    _held.clear()


if hasattr(os, "register_at_fork"):  # what reads images may outlive a training by some seconds
    os.register_at_fork(after_in_child=_let_go)


@contextmanager
def held(out: Path) -> Iterator[None]:
    """Refuse a folder in which another training runs; the hold ends with the process."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    folder = os.open(out, os.O_RDONLY)
    _held.add(folder)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"`out` (={str(out)!r}) is in use by a training that runs: wait until it ends, or "
                "choose another folder."
            ) from None
        except OSError:  # some file systems of networks know no such thing
            pass
        yield
    finally:
        _held.discard(folder)
        os.close(folder)


@dataclass
class TrainingState:
    model: BcosModel
    optimiser: torch.optim.Optimizer
    averaged: list[Tensor]  # the averaged weights, if there are any
    loss: Tensor  # sums over the epoch, on the device
    correct: Tensor
    scaler: torch.amp.GradScaler | None = None  # of 16-mixed
    metrics: dict[str, float] = field(default_factory=dict)  # of the last epoch
    step: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def save(self, path: Path, config: TrainConfig, images: int, *, write: bool = True) -> None:
        """Every process calls this, for the shards; those that `write` write the file."""
        about = {
            "step": self.step,
            "metrics": self.metrics,
            "seconds": self.seconds,
            "config": config.as_json(),
            "images": images,
            "classes": self.model.classes,
            "size": self.model.input_size,
            "scales": {name: layer.scale for name, layer in self.model.bcos_layers()},
            "temperature": self.model.temperature,
            "scaling": self.model.scaling,
            "scaler": self.scaler.state_dict() if self.scaler else {},
        }
        tensors = {n: whole(t.detach()).cpu().contiguous() for n, t in self._tensors().items()}
        if write:
            content = safetensors.torch.save(tensors, metadata={"state": json.dumps(about)})
            write_atomically(path, content)

    def load(self, path: Path, config: TrainConfig, images: int) -> None:
        """Take over a state of the same config and data, or say what differs."""
        with _read(path) as (file, about):
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if about["images"] != images:
            raise ValueError(
                f"`data` (={config.data!r}) holds {images} images for training, but had "
                f"{about['images']} in the run to be resumed in {path.parent}: choose another "
                "folder, or bring the data back."
            )
        for name, now in (("classes", self.model.classes), ("size", self.model.input_size)):
            before = tuple(about.get(name) or now or ())  # a state of an older version has none
            if before != tuple(now or ()):
                raise ValueError(
                    f"`data` (={config.data!r}) has the {name} {_shortly(now)}, but had "
                    f"{_shortly(before)} in the run to be resumed in {path.parent}: choose "
                    "another folder, or bring the data back."
                )
        self._create_optimiser_state()
        own = self._tensors()
        with torch.no_grad():
            for name, value in tensors.items():
                _fill(own[name], value)
        for name, layer in self.model.bcos_layers():
            layer.scale = about["scales"][name]
        self.model.temperature, self.model.scaling = about["temperature"], about["scaling"]
        if self.scaler and about.get("scaler"):
            self.scaler.load_state_dict(about["scaler"])
        self.step, self.metrics = about["step"], about["metrics"]
        self.started = time.monotonic() - about["seconds"]

    def average(self, decay: float, step: Tensor) -> None:
        """After the optimiser's `step`, from 1; the first ones count more, lest the start stays."""
        if self.averaged:
            with torch.no_grad():
                averaged = _shards(self.averaged)
                moved = torch._foreach_sub(_shards(self.model.parameters()), averaged)
                torch._foreach_mul_(moved, (9 / (10 + step)).clamp(min=1 - decay))
                torch._foreach_add_(averaged, moved)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The averaged weights are in the model, if there are any, while this context lasts."""
        if not self.averaged:
            yield
            return
        own = [p.detach().clone() for p in self.model.parameters()]
        try:
            self.put(self.averaged)
            yield
        finally:
            self.put(own)

    def put(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(_shards(self.model.parameters()), _shards(values))

    def _tensors(self) -> dict[str, Tensor]:
        state = {f"model.{name}": t for name, t in self.model.state_dict(keep_vars=True).items()}
        state |= {f"average.{i}": t for i, t in enumerate(self.averaged)}
        for i, parameter in enumerate(self.model.parameters()):
            for key, value in self.optimiser.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    state[f"optimiser.{i}.{key}"] = value
        return state | {"loss": self.loss, "correct": self.correct}

    def _create_optimiser_state(self) -> None:
        """Optimisers make their state in the first step: take one that changes nothing."""
        if self.optimiser.state:
            return
        trained: list[Any] = [p for group in self.optimiser.param_groups for p in group["params"]]
        kept = [p.detach().clone() for p in trained]
        for p in trained:
            p.grad = torch.zeros_like(p)
        self.optimiser.step()
        self.optimiser.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(_shards(trained), _shards(kept))


def check_same(path: Path, config: TrainConfig) -> None:
    """Refuse to resume with other settings than those of the state in `path`, if there is one."""
    if not path.exists():
        return
    with _read(path) as (_, about):
        before = about["config"]
    mine = config.as_json()
    for name, value in before.items():
        if name != "data" and mine.get(name) != value:  # which may be in another place now
            raise ValueError(
                f"`{name}` (={mine.get(name)!r}) must be {value!r}, as in the run to be "
                f"resumed in {path.parent}: change it back, or choose another folder."
            )


@contextmanager
def _read(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A state's file, and what its header says."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            yield file, json.loads(file.metadata()["state"])
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: remove it to begin anew.") from error


def _shortly(values: Iterable[Any] | None) -> str:
    listed = list(map(str, values or ()))
    return ", ".join(listed[:10]) + (f" and {len(listed) - 10} more" if len(listed) > 10 else "")


def _shards(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this process holds of each tensor: all of it, unless it is sharded."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def _fill(own: Tensor, value: Tensor) -> None:
    if isinstance(own, DTensor):
        value = distribute_tensor(value.to(own.device), own.device_mesh, own.placements)
    own.copy_(value)
