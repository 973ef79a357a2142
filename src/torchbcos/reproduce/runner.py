"""Several experiments side by side, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, get_all_start_methods, get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from torchbcos.evidence import cores
from torchbcos.interrupt import told_to_end
from torchbcos.reproduce.trial import Trial
from torchbcos.watch import TrainError

__all__ = ["MISTAKE", "Ended", "run_all"]

PATIENCE = 60.0  # seconds for a process that was told to end
STOPPED = 130
MISTAKE = 2  # a sentence says it all


@dataclass(frozen=True)
class Ended:
    """How a trial came out; `code` is 0, 130 where it was stopped and can go on, or 2 where its log
    ends with a sentence that says why.
    """

    trial: Trial
    code: int

    def report(self) -> str:
        """Why it failed, from the end of its log."""
        log = self.trial.log
        said = (
            log.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
            if log.exists()
            else []
        )
        if self.code == MISTAKE:
            return f"{self.trial.name}: {said[-1]}"
        killed = f"signal {-self.code}" if self.code < 0 else f"exit code {self.code}"
        return "\n    ".join([f"{self.trial.name} failed ({killed}); the end of {log}:", *said])


def run_all(trials: Sequence[Trial], jobs: int, console: Console) -> list[Ended]:
    """Run what is not finished, `jobs` at a time, those that compare first: they take longest.

    None stops the others by failing. If this process is told to end, all of them are, and they
    keep what they have.
    """
    if jobs < 1:
        raise ValueError(f"`jobs` (={jobs}) must be at least 1.")
    ended = [Ended(t, 0) for t in trials if t.finished()]
    for done in ended:
        console.print(f"{done.trial.name}: finished already", markup=False, highlight=False)
    waiting = [t for t in trials if t not in [e.trial for e in ended]]
    waiting.sort(key=lambda t: not t.experiment.compared)
    running: dict[str, tuple[Trial, BaseProcess]] = {}
    threads = max(1, cores() // min(jobs, max(1, len(waiting))))
    with told_to_end() as ending, _board(console) as show:
        try:
            while (waiting or running) and not ending():
                while waiting and len(running) < jobs:
                    trial = waiting.pop(0)
                    running[trial.name] = trial, _start(trial, threads)
                wait([process.sentinel for _, process in running.values()], timeout=1.0)
                for trial, process in [pair for pair in running.values() if not pair[1].is_alive()]:
                    del running[trial.name]
                    ended.append(Ended(trial, process.exitcode or 0))
                    show.ended(ended[-1])
                show.standings([trial for trial, _ in running.values()])
        finally:
            ended += _stop(list(running.values()))
    return ended + [Ended(trial, STOPPED) for trial in waiting]


def _start(trial: Trial, threads: int) -> BaseProcess:
    """Forked, where that exists, from a server that has imported everything and nothing else."""
    trial.folder.mkdir(parents=True, exist_ok=True)
    method = "forkserver" if "forkserver" in get_all_start_methods() else "spawn"
    context: Any = get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["lightning", __name__])
        _start_server()
    process: BaseProcess = context.Process(target=_conduct, args=(trial, threads))
    process.start()
    return process


def _start_server() -> None:
    """Deaf to SIGTERM, which may be sent to a whole process group: its trials end by themselves."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(running: Sequence[tuple[Trial, BaseProcess]]) -> list[Ended]:
    for _, process in running:
        process.terminate()
    until = time.monotonic() + PATIENCE
    for _, process in running:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return [Ended(trial, STOPPED if p.exitcode else 0) for trial, p in running]


# In the process of a trial.


def _conduct(trial: Trial, threads: int) -> None:
    """All that is said goes to the log, also by a process that dies."""
    with trial.log.open("ab", buffering=0) as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    for text in (sys.stdout, sys.stderr):
        text.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    try:
        trial.run(Console(file=sys.stdout, width=200))
    except KeyboardInterrupt as error:
        code, words = STOPPED, str(error)
    except (ValueError, OSError, TrainError) as error:
        code, words = MISTAKE, f"{traceback.format_exc()}\n{' '.join(str(error).split())}"
    except Exception:
        code, words = 1, traceback.format_exc()
    else:
        code, words = 0, "finished"
    sys.stdout.write(words + "\n")
    sys.exit(code)


def _end_with_parent() -> None:
    """Whoever started this may have been killed: then stop as if told to, and keep the state."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)


# What is shown meanwhile.


@contextmanager
def _board(console: Console) -> Iterator[_Board]:
    live = Live(console=console, auto_refresh=False, transient=True)
    if not console.is_terminal:
        yield _Board(console, None)
        return
    with live:
        yield _Board(console, live)


class _Board:
    """One line for each running trial, renewed; where there is no terminal, lines now and then."""

    def __init__(self, console: Console, live: Live | None) -> None:
        self.console, self.live = console, live
        self.told: dict[str, int] = {}  # tenths of its epochs, by trial

    def standings(self, trials: Sequence[Trial]) -> None:
        lines = [_standing(trial) for trial in trials]
        if self.live is not None:
            text = "\n".join(words for _, words in lines)
            self.live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
            return
        for trial, (tenths, words) in zip(trials, lines, strict=True):
            if self.told.get(trial.name, 0) != tenths:
                self.told[trial.name] = tenths
                self._print(words)

    def ended(self, one: Ended) -> None:
        if one.code:
            self._print(f"{one.trial.name:<26} failed: see {one.trial.log}")
            return
        found = json.loads(one.trial.result.read_bytes())
        ours = found["localisation"]["methods"].get("ours")
        self._print(
            f"{one.trial.name:<26} {found['accuracy']:.2%}"
            + (f"  localisation {ours['mean']:.3f}" if ours else "")
            + f"  trained in {_time(found['seconds']['training'])}"
        )

    def _print(self, words: str) -> None:
        self.console.print(words, markup=False, highlight=False, soft_wrap=True)


def _standing(trial: Trial) -> tuple[int, str]:
    """Tenths of the training that are done, 11 after it, and a line."""
    path, epochs = trial.folder / "metrics.jsonl", trial.config.epochs
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(True)[-2:] if line.endswith("\n")]
    if not lines:
        return 0, f"{trial.name:<26} starting"
    last = lines[-1]
    epoch, accuracy = last["epoch"], last["test_accuracy"]
    if epoch >= epochs:
        said = trial.log.read_text(encoding="utf-8", errors="replace").splitlines()[-1:]
        scored = "".join(line for line in said if " grids" in line)
        return 11, f"{trial.name:<26} {accuracy:.2%}  trained; the pointing game  {scored}"
    before = lines[0] if len(lines) == 2 else {"epoch": 0.0, "seconds": 0.0}
    pace = (last["seconds"] - before["seconds"]) / (epoch - before["epoch"])
    left = _time(pace * (epochs - epoch))
    words = f"{trial.name:<26} epoch {epoch:g} of {epochs:g}  {accuracy:.2%}  {left} left"
    return int(10 * epoch / epochs), words


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"
