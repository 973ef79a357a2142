"""One process or many: how a training is spread over devices and machines, and when one is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchbcos.layers import BcosLayer
from torchbcos.watch import TrainError

__all__ = ["make_fabric", "naming_lost_processes"]


def make_fabric(
    precision: str = "32-true",
    devices: int | None = None,
    nodes: int | None = None,
    strategy: str = "auto",
    accelerator: str = "auto",
) -> Any:
    """Lightning's Fabric for one device or, with "ddp" or "fsdp", for several.

    Under torchrun (or `fabric run`) devices and nodes are those it was started with.
    """
    try:
        import lightning
        from lightning.fabric.plugins.environments.lightning import LightningEnvironment
        from lightning.fabric.strategies.model_parallel import ModelParallelStrategy
    except ImportError as error:
        raise ValueError(
            "training, and several devices, need more packages: pip install 'torchbcos[train]'."
        ) from error
    if strategy not in ("auto", "ddp", "fsdp"):
        raise ValueError(f"`strategy` (={strategy!r}) must be auto, ddp or fsdp.")
    if "LOCAL_WORLD_SIZE" in os.environ:
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        devices, nodes = devices or here, nodes or int(os.environ["WORLD_SIZE"]) // here
    devices, nodes = devices or 1, nodes or 1
    how: Any = strategy
    if strategy == "auto" and devices * nodes > 1:
        how = "ddp"
    if strategy == "fsdp":
        how = ModelParallelStrategy(
            _shard, data_parallel_size=devices * nodes, tensor_parallel_size=1
        )
    fabric = lightning.Fabric(
        accelerator=accelerator,
        strategy=how,
        devices=devices,
        num_nodes=nodes,
        precision=precision,  # type: ignore[arg-type]
    )
    environment = getattr(fabric.strategy, "cluster_environment", None)
    if nodes > 1 and isinstance(environment, LightningEnvironment):
        needed = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK")
        missing = [name for name in needed if name not in os.environ]
        if missing:
            raise ValueError(
                f"{nodes} machines cannot find each other: {', '.join(missing)} must be set on "
                "each; it is simpler to start the command there with torchrun, as in "
                "docs/training.md."
            )
    return fabric


def _shard(model: nn.Module, mesh: Any) -> nn.Module:
    """Each weight in equal parts, one on each device, brought together where it is used."""
    from torch.distributed.fsdp import fully_shard

    model.to(memory_format=torch.contiguous_format)  # shards are cut from plain tensors
    mesh = mesh["data_parallel"]
    for module in model.modules():
        if isinstance(module, BcosLayer):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


@contextmanager
def naming_lost_processes(fabric: Any, out: Path) -> Iterator[None]:
    """The errors that torch raises when another process has died, as one sentence."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        remedy = f"start the run again with --resume: it goes on from the last state in {out}."
        if "DataLoader worker" in text:
            raise TrainError(
                f"a process that read images was killed, perhaps for lack of memory; {remedy}"
            ) from error
        lost = isinstance(error, torch.distributed.DistError) or "gloo" in text.lower()
        if fabric.world_size > 1 and lost and not isinstance(error, TrainError):
            raise TrainError(
                f"process {fabric.global_rank} of {fabric.world_size} lost the connection to "
                f"another one, which has ended or cannot be reached; {remedy}"
            ) from error
        raise
