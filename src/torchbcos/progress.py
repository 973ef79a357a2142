"""What is told of a training while it runs: a live line, a line for each epoch, and metrics."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from torchbcos.checkpoint import write_atomically
from torchbcos.training_state import TrainingState

__all__ = ["Journal", "Progress"]


class Progress:
    """A live line on a terminal, renewed twice a second; elsewhere only what `line` prints."""

    def __init__(
        self,
        console: Console,
        total_steps: int,
        steps_per_epoch: int,
        batch: int,
        steps_per_round: int = 0,  # after which the state's sums begin anew; 0 for an epoch
    ) -> None:
        self.console, self.steps_per_epoch, self.batch = console, steps_per_epoch, batch
        self.steps_per_round = steps_per_round or steps_per_epoch
        self.bar = Bar(
            TextColumn("epoch {task.fields[epoch]:.1f}"),
            BarColumn(bar_width=20),
            TextColumn(
                "step {task.completed:.0f}/{task.total:.0f}  loss {task.fields[loss]:.4f}  "
                "accuracy {task.fields[accuracy]:.1%}  {task.fields[speed]:,.0f} images/s  left"
            ),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        nothing = {"epoch": 0.0, "loss": 0.0, "accuracy": 0.0, "speed": 0.0}
        self.task = self.bar.add_task("train", total=total_steps, **nothing)  # type: ignore[arg-type]
        self.last = (time.monotonic(), 0)

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(self, state: TrainingState, processes: int) -> None:
        """Reading the loss stops a GPU, so this looks at it only when it is time."""
        (before, step), now = self.last, time.monotonic()
        if self.bar.disable or now - before < 0.5:
            return
        within = (state.step - 1) % self.steps_per_round + 1
        seen = within * self.batch / processes  # by this process
        self.bar.update(
            self.task,
            completed=state.step,
            epoch=state.step / self.steps_per_epoch,
            loss=state.loss.item() / within,
            accuracy=state.correct.item() / seen,
            speed=(state.step - step) * self.batch / (now - before) if step else 0.0,
        )
        self.last = (now, state.step)

    def line(self, words: str) -> None:
        self.console.print(words, highlight=False, markup=False, soft_wrap=True)


class Journal:
    """metrics.jsonl in the run's folder and, where TensorBoard is installed, its events."""

    def __init__(self, out: Path, step: int) -> None:
        self.path = out / "metrics.jsonl"
        if self.path.exists():  # lines after the resumed step will be written again
            text = self.path.read_text(encoding="utf-8")
            lines = [line for line in text.splitlines() if line.strip()]
            if lines and not _is_json(lines[-1]):  # the process was killed while it wrote
                lines.pop()
            kept = [line for line in lines if json.loads(line)["step"] <= step]
            write_atomically(self.path, "".join(line + "\n" for line in kept).encode())
        self.board: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self.board = SummaryWriter(str(out), purge_step=step + 1)

    def write(self, metrics: Mapping[str, float]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(metrics) + "\n")
        if self.board is not None:
            for name, value in metrics.items():
                if name not in ("step", "epoch"):
                    self.board.add_scalar(name, value, int(metrics["step"]))
            self.board.flush()


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return False
    return True
