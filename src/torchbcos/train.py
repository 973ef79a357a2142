"""Train a model: one loop on Lightning Fabric, one frozen config."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from torchbcos._cuda import cuda_settings
from torchbcos.batches import Batches, find_damaged
from torchbcos.calibrate import calibrate
from torchbcos.captured import capture
from torchbcos.checkpoint import load, save
from torchbcos.data import Images, ImageSet, Split, open_data
from torchbcos.evaluate import tally
from torchbcos.finetune import freeze_all_but_the_head, with_new_head
from torchbcos.interrupt import told_to_end
from torchbcos.loss import bce
from torchbcos.models import BcosModel, ConventionalModel, create_model
from torchbcos.ops.aside import weight_gradients_aside
from torchbcos.optimiser import clip_adaptively, make_optimiser, set_rate, set_weight_rms
from torchbcos.processes import make_fabric, naming_lost_processes
from torchbcos.progress import Journal, Progress
from torchbcos.training_config import TrainConfig
from torchbcos.training_pictures import draw
from torchbcos.training_state import (
    MODEL,
    STATE,
    TrainingState,
    check_free,
    check_same,
    held,
    whole,
)
from torchbcos.watch import TrainError, Watch

__all__ = ["TrainConfig", "TrainError", "train"]


def train(
    config: TrainConfig,
    out: Path | str,
    *,
    fabric: Any = None,
    console: Console | None = None,
    resume: bool = False,
    pictures: int = 0,
    workers: int | None = None,
) -> BcosModel:
    """Train as `config` says; `out` receives model.safetensors, metrics.jsonl and the state.

    The state is written after each test and when the process is told to end; `resume` goes on
    from it, to the same result as if nothing had happened. Without it, an `out` that holds a
    training is refused. `pictures` = k draws explanations of the same test images every k epochs,
    after the next test; `workers` processes decode images that are streamed.
    """
    out = Path(out)
    if resume:
        check_same(out / STATE, config)
    else:
        check_free(out)
    out.mkdir(parents=True, exist_ok=True)
    fabric = fabric or make_fabric(config.precision)
    if "LT_CLI_USED" not in os.environ:  # `fabric run` has launched it already
        fabric.launch()
    mine = held(out) if fabric.is_global_zero else nullcontext()
    # cuDNN may search for the fastest algorithm: batches keep their shape for long
    fast = cuda_settings(tf32=config.tf32, benchmark=True)
    with naming_lost_processes(fabric, out), mine, fast:
        run = _Run(config, out, fabric, console or Console(stderr=True), workers)
        if pictures and isinstance(run.state.model, ConventionalModel):
            raise ValueError(
                f"`pictures` (={pictures}) must be 0 for a conventional network, which has no W(x) "
                "to draw."
            )
        if resume:
            run.load_state()
        run.begin()
        with told_to_end() as ending, run.progress:
            batches = run.batches.following(run.state.step)
            while run.state.step < run.total_steps:
                run.advance(*next(batches))
                step = run.state.step
                if step % run.steps_per_round == 0 or step == run.total_steps:
                    run.close_epoch(pictures)
                if run.all_told(ending()):
                    run.save_state()
                    raise KeyboardInterrupt(
                        f"stopped after step {step}; resuming goes on from there."
                    )
        return run.finished_model()


class _Run:
    """One training: its parts, and what is done with them."""

    def __init__(
        self, config: TrainConfig, out: Path, fabric: Any, console: Console, workers: int | None
    ) -> None:
        self.config, self.out, self.fabric, self.workers = config, out, fabric, workers
        self.data = self._open_data(console)
        if len(self.data.train) < config.batch:
            raise ValueError(
                f"`batch` (={config.batch}) must be at most the {len(self.data.train)} images."
            )
        pair = 2 if config.cutmix else 1
        if config.batch % (fabric.world_size * config.accumulate * pair):
            raise ValueError(
                f"`batch` (={config.batch}) must be a multiple of the {fabric.world_size} "
                f"processes times `accumulate` (={config.accumulate})"
                + (" times the 2 images that `cutmix` mixes." if config.cutmix else ".")
            )
        self.batches = Batches(
            self.data.train,
            config,
            fabric.device,
            classes=len(self.data.classes),
            rank=self.fabric.global_rank,
            world=self.fabric.world_size,
            workers=workers,
        )
        self.steps_per_epoch = self.batches.steps_per_epoch
        self.total_steps = self.batches.total_steps
        self.steps_per_round = config.test_every * self.steps_per_epoch
        shown = console if fabric.is_global_zero else Console(quiet=True)
        self.progress = Progress(
            shown, self.total_steps, self.steps_per_epoch, config.batch, self.steps_per_round
        )
        self.journal: Journal | None = None

        torch.manual_seed(config.seed)
        model = self._new_model()
        self._set_scales(model)
        if config.weight_rms:
            set_weight_rms(model, config.weight_rms, config.weight_rms_in)
        model.to(memory_format=torch.channels_last)
        self.wrapped = fabric.setup_module(model)
        self.forward: Callable[[Tensor], Any] = self.wrapped
        if config.compile:
            self.forward = torch.compile(self.wrapped)
        optimiser = make_optimiser(config, model, fabric.device)
        self.stepper = fabric.setup_optimizers(optimiser)
        averaged = [p.detach().clone() for p in model.parameters()] if config.ema else []
        loss, correct = (torch.zeros((), device=fabric.device) for _ in range(2))
        scaler = getattr(fabric.strategy.precision, "scaler", None)
        self.state = TrainingState(model, optimiser, averaged, loss, correct, scaler)
        self.watch = Watch(model, fabric.device, config.precision)
        if fabric.device.type == "cuda" and config.precision != "16-mixed":
            optimiser.found_inf = self.watch.found  # type: ignore[attr-defined]
        self.update: Callable[[Tensor, Tensor], None] = self._update
        self.captured: torch.Size | None = None  # the shape of its images

    def _open_data(self, console: Console) -> Split:
        """The data; files that will be streamed are looked at first, in the first process."""
        c = self.config
        data = open_data(c.data, **c.reading)

        def checked(images: ImageSet, name: str) -> ImageSet:
            if isinstance(images, Images):
                return images.to(self.fabric.device)
            damaged = None
            if self.fabric.is_global_zero:
                console.print(f"checking {len(images)} images in {name}", highlight=False)
                damaged = find_damaged(images, self.out / f"checked-{name}.json", self.workers)
            return images.without(self.fabric.broadcast(damaged), c.bad)

        data = Split(checked(data.train, "train"), checked(data.test, "test"), data.classes)
        if data.skipped and self.fabric.is_global_zero:
            console.print(
                f"skipped {len(data.skipped)}, the first: {data.skipped[0]}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        return data

    def _new_model(self) -> BcosModel:
        c, device = self.config, self.fabric.device
        size = self.data.train.size
        if c.start_from:
            known = load(c.start_from)
            if known.in_channels != c.channels:
                raise ValueError(
                    f"`channels` (={c.channels}) must be {known.in_channels}, as the images of "
                    f"`start_from` (={c.start_from!r}) have."
                )
            model = with_new_head(known, self.data.classes, size).to(device).train()
            if c.head_only:
                freeze_all_but_the_head(model)
            return model
        grey = {"in_channels": c.channels} if c.channels != 3 else {}
        return create_model(
            c.arch,
            classes=self.data.classes,
            preset=c.preset or None,
            input_size=size,
            **{**c.options, **grey},
        ).to(device)

    def _set_scales(self, model: BcosModel) -> None:
        tuned = bool(self.config.start_from)  # then the preset was for another classifier
        if (tuned or not self.config.preset) and not isinstance(model, ConventionalModel):
            images = self.batches.at(0, whole=True)[0]  # the same in every process
            calibrate(model, images, only_temperature=tuned)

    def begin(self) -> None:
        """The last thing before the first step, when it is known which one that is."""
        if self.fabric.is_global_zero:
            self.journal = Journal(self.out, self.state.step)
        self.watch.step.fill_(self.state.step)

    def _capture(self, images: Tensor, labels: Tensor) -> None:
        """The step for images of this shape, in place of that for another."""
        self.captured, self.update = images.shape, self._update
        torch.cuda.empty_cache()  # the other's memory is free now
        self.update = capture(self._update, images, labels, self._changing(), self.state.optimiser)

    def _can_capture(self) -> bool:
        c = self.config
        return (
            c.cuda_graph
            and self.fabric.device.type == "cuda"
            and self.fabric.world_size == 1
            and c.optimiser != "sgd"
            and c.precision in ("32-true", "bf16-mixed")
        )

    def _changing(self) -> list[Tensor]:
        s = self.state
        model = [*s.model.parameters(), *s.model.buffers()]
        return [*model, *s.averaged, s.loss, s.correct, *self.watch.tensors()]

    # One step.

    def advance(self, images: Tensor, labels: Tensor) -> None:
        state = self.state
        set_rate(state.optimiser, self.config.lr_at(state.step / self.steps_per_epoch))
        if images.shape != self.captured and self._can_capture():
            self._capture(images, labels)
        torch.manual_seed(self._seed_of_dropout())
        self.update(images, labels)
        state.step += 1
        if images.is_cuda:
            self.watch.check(self.wrapped, state.model, images)
        self.progress.show(state, self.fabric.world_size)

    def _seed_of_dropout(self) -> int:
        """Each step and process has its own."""
        rank: int = self.fabric.global_rank
        own = rank * 0x9E3779B97F4A7C15  # far from any other's
        return ((self.config.seed << 32) + self.state.step + own) % 2**63

    def _update(self, images: Tensor, labels: Tensor) -> None:
        c, state = self.config, self.state
        pieces = list(zip(images.chunk(c.accumulate), labels.chunk(c.accumulate), strict=True))
        step_loss = torch.zeros_like(state.loss)
        for i, (part, its_labels) in enumerate(pieces):
            with self._backward_by(i == len(pieces) - 1), self._beside():
                outputs = self.forward(part)
                loss = bce(outputs, its_labels, c.label_smoothing, c.auxiliary_weight)
                loss = loss / c.accumulate
                self.fabric.backward(loss)
            main = (outputs[0] if isinstance(outputs, tuple) else outputs).detach()
            step_loss += loss.detach().float()
            best = its_labels.argmax(1) if its_labels.dim() == 2 else its_labels
            state.correct += (main.argmax(1) == best).sum()
        state.loss += step_loss
        self.watch.look(step_loss, main)
        if not images.is_cuda:
            self.watch.check(self.wrapped, state.model, images)
        if c.adaptive_clip:
            limit: float | Tensor = c.adaptive_clip
            if state.scaler:  # which has scaled the gradients, too
                limit = state.scaler.scale(torch.tensor(limit, device=images.device))
            clip_adaptively(state.model, limit)
        if c.clip:
            self.fabric.clip_gradients(self.wrapped, self.stepper, max_norm=c.clip)
        self.stepper.step()
        self.stepper.zero_grad()
        state.average(c.ema, self.watch.step)

    def _backward_by(self, last: bool) -> Any:
        """Several processes share their gradients once, with the last piece of a batch.

        A single one does all in this thread: layers with a backward pass in Python would fight for
        the interpreter's lock otherwise.
        """
        if self.fabric.world_size == 1:
            return torch.autograd.set_multithreading_enabled(False)
        return nullcontext() if last else self.fabric.no_backward_sync(self.wrapped)

    def _beside(self) -> Any:
        """Where launches cost nothing, gradients of weights are computed beside the others."""
        alone = self.fabric.world_size == self.config.accumulate == 1
        if alone and self.fabric.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return weight_gradients_aside()
        return nullcontext()

    def all_told(self, me: bool) -> bool:
        """Whether any process was told to end; several ask one another every ten steps."""
        if self.fabric.world_size == 1:
            return me
        if self.state.step % 10:
            return False
        asked = torch.tensor(float(me), device=self.fabric.device)
        return bool(self.fabric.all_reduce(asked, reduce_op="sum") > 0)

    # The end of an epoch.

    def close_epoch(self, pictures: int) -> None:
        state, c = self.state, self.config
        steps = (state.step - 1) % self.steps_per_round + 1
        with state.averaged_weights():
            share = tally(
                self.wrapped,
                self.data.test,
                rank=self.fabric.global_rank,
                world=self.fabric.world_size,
                workers=self.workers,
            )
            right, loss, count = self.fabric.all_reduce(share, reduce_op="sum").tolist()
        right_before = self.fabric.all_reduce(state.correct.clone(), reduce_op="sum").item()
        state.metrics = line = {
            "epoch": state.step / self.steps_per_epoch,
            "step": state.step,
            "lr": c.lr_at(state.step / self.steps_per_epoch),
            "train_loss": self.fabric.all_reduce(state.loss.clone()).item() / steps,
            "train_accuracy": right_before / (steps * c.batch),
            "test_loss": loss / count,
            "test_accuracy": right / count,
            "seconds": round(state.seconds, 1),
        }
        state.loss.zero_()
        state.correct.zero_()
        if self.journal is not None:
            self.journal.write(line)
        self.save_state()
        self.progress.line(
            f"epoch {line['epoch']:6.1f}  loss {line['train_loss']:.4f}  train "
            f"{line['train_accuracy']:.2%}  test {line['test_accuracy']:.2%}  "
            f"{line['seconds']:.0f} s"
        )
        epoch = round(state.step / self.steps_per_epoch)
        before = epoch - round(steps / self.steps_per_epoch)
        if pictures and epoch // pictures > before // pictures:
            with state.averaged_weights():
                model = self._whole_model()
                if self.fabric.is_global_zero:
                    draw(model, self.data.test, self.out / f"epoch-{epoch:03d}.png")

    # What is left on disk.

    def save_state(self) -> None:
        self.watch.wait()
        state = self.state  # the loss is a mean over processes, so that any number may resume
        state.loss.copy_(self.fabric.all_reduce(state.loss.clone()))
        state.correct.copy_(self.fabric.all_reduce(state.correct.clone(), reduce_op="sum"))
        self.state.save(
            self.out / STATE,
            self.config,
            len(self.data.train),
            write=self.fabric.is_global_zero,
        )
        state.correct /= self.fabric.world_size

    def load_state(self) -> None:
        path = self.out / STATE
        if path.exists():  # else nothing was finished yet, and this is the beginning
            self.state.load(path, self.config, len(self.data.train))
            self.state.correct /= self.fabric.world_size

    def finished_model(self) -> BcosModel:
        if self.state.averaged:
            self.state.put(self.state.averaged)
        model = self._whole_model().eval()
        model.requires_grad_(True)
        model.provenance = {"config": self.config.as_json(), "metrics": self.state.metrics}
        if self.fabric.is_global_zero:
            save(model, self.out / MODEL)
        return model

    def _whole_model(self) -> BcosModel:
        """The model, put together if each process holds only a part of its weights."""
        mine = self.state.model
        parts = mine.state_dict()
        tensors = {name: whole(value) for name, value in parts.items()}
        if all(tensors[name] is value for name, value in parts.items()):
            return mine
        model = self._new_model()
        model.load_state_dict(tensors)
        scales = {name: layer.scale for name, layer in mine.bcos_layers()}
        for name, layer in model.bcos_layers():
            layer.scale = scales[name]
        model.temperature, model.scaling = mine.temperature, mine.scaling
        return model
