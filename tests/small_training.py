"""Small trainings for the tests, in this process or in others that can be killed."""

import os
import signal
import socket
import sys
import time
from multiprocessing import forkserver, get_context
from pathlib import Path

import lightning
import pytest
import torch
from rich.console import Console

from torchbcos import data, train
from torchbcos.checkpoint import load
from torchbcos.processes import make_fabric
from torchbcos.training_config import TrainConfig

__all__ = ["lightning"]  # imported here, so that a process forked from the server has it

QUIET = Console(quiet=True)


def few_shapes(size=24, count=48):
    drawn = [data.shapes(n, size=size, seed=s) for n, s in ((count, 1), (16, 2))]
    sets = [data.Images((d.images * 255).round().to(torch.uint8), d.labels) for d in drawn]
    return data.Split(*sets, drawn[0].classes)


def config(**changes):
    settings = {
        "data": "shapes",
        "arch": "mini",
        "options": {"width": 4, "max_out": 1},
        "epochs": 3,
        "batch": 16,
        "augment": ("flip", "padded_crop", "colour_jitter"),
        "cuda_graph": False,
    }
    return TrainConfig(**{**settings, **changes})


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def file_weights(folder):
    return weights(load(Path(folder) / "model.safetensors"))


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


class Processes:
    """Trainings in processes of their own, forked from one that has imported all they need."""

    def __init__(self):
        self.context = get_context("forkserver")
        self.context.set_forkserver_preload(["small_training"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
            forkserver.ensure_running()

    def start(self, out, settings, **how):
        out = Path(out)
        out.mkdir(parents=True, exist_ok=True)
        process = self.context.Process(target=_train, args=(out, settings), kwargs=how)
        process.start()
        return process

    def run(self, out, settings, **how):
        """The exit code: 0, 2 with a sentence in the file `said-RANK`, or minus a signal."""
        process = self.start(out, settings, **how)
        return ended(process)

    def run_two(self, out, settings, **how):
        """Two ranks, as torchrun would start them; how long the first went on after the second."""
        port = free_port()
        ranks = [self.start(out, settings, rank=r, world=2, port=port, **how) for r in (0, 1)]
        second = ended(ranks[1])
        since = time.monotonic()
        return (ended(ranks[0]), second), time.monotonic() - since


def ended(process, limit=120):
    process.join(limit)
    assert not process.is_alive(), "a process that should have ended goes on"
    return process.exitcode


def free_port():
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]


def _train(
    out, settings, *, kill_after=None, count=None, kill_at=None, strategy="auto", rank=0, world=1,
    port=0,
):  # fmt: skip
    """`kill_after`: this many function calls; `kill_at`: before this step, in the last rank."""
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if world > 1:
        as_torchrun = {
            "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": world,
            "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": "test",
        }  # fmt: skip
        os.environ.update({name: str(value) for name, value in as_torchrun.items()})
    train.open_data = lambda *_, **__: few_shapes()
    advance, calls = train._Run.advance, 0

    def step(run, *batch):
        if run.state.step == kill_at and rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        advance(run, *batch)

    def tick(*_):
        nonlocal calls
        calls += 1
        if calls == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    train._Run.advance = step
    begin = train._Run.begin

    def note_and_begin(run):
        begin(run)
        if count is not None:
            Path(count).write_text(f"{calls} ")

    train._Run.begin = note_and_begin
    fabric = make_fabric(strategy=strategy)
    if kill_after is not None or count is not None:
        sys.setprofile(tick)
    try:
        train.train(config(**settings), out, console=QUIET, resume=True, fabric=fabric)
    except (train.TrainError, ValueError) as error:
        (out / f"said-{rank}").write_text(str(error))
        os._exit(2)
    finally:
        sys.setprofile(None)
    if count is not None:
        with Path(count).open("a") as file:
            file.write(str(calls))
