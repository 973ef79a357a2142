"""Train a B-cos model: one loop on Lightning Fabric, one frozen config."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Generator, Tensor, nn

from torchbcos.augment import AUGMENTATIONS, Draws
from torchbcos.calibrate import calibrate, first_broken_layer
from torchbcos.checkpoint import save, write_atomically
from torchbcos.data import Split, open_data
from torchbcos.evaluate import evaluate
from torchbcos.interrupt import told_to_end
from torchbcos.layers import BcosLayer
from torchbcos.models import BcosModel, create_model
from torchbcos.training_config import TrainConfig

__all__ = ["TrainConfig", "TrainError", "train"]


STATE = "state.safetensors"


class TrainError(RuntimeError):
    """Training cannot go on; the message names the step, the layer and the remedy."""


def train(
    config: TrainConfig,
    out: Path | str,
    *,
    fabric: Any = None,
    console: Console | None = None,
    resume: bool = False,
    pictures: int = 0,
) -> BcosModel:
    """Train as `config` says; `out` receives model.safetensors, metrics.jsonl and the state.

    The state is written after every epoch and when the process is told to end; `resume` goes on
    from it, to the same result as if nothing had happened. `pictures` = k draws explanations of
    the same test images every k epochs.
    """
    try:
        import lightning
    except ImportError as error:
        raise ValueError("training needs more packages: pip install 'torchbcos[train]'.") from error
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    fabric = fabric or lightning.Fabric(devices=1, precision=config.precision)  # type: ignore[arg-type]
    fabric.launch()
    run = _Run(config, out, fabric, console or Console(stderr=True))
    if resume:
        run.load_state()
    with told_to_end() as ending:
        while run.step < run.total_steps:
            run.advance()
            if run.step % run.steps_per_epoch == 0 or run.step == run.total_steps:
                run.close_epoch(pictures)
            if ending():
                run.save_state()
                raise KeyboardInterrupt(
                    f"stopped after step {run.step}; resuming goes on from there."
                )
    return run.finished_model()


class _Run:
    """The state of one training and the things done with it."""

    def __init__(self, config: TrainConfig, out: Path, fabric: Any, console: Console) -> None:
        self.config, self.out, self.fabric, self.console = config, out, fabric, console
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
        data = open_data(config.data, config.size)
        self.data = Split(data.train.to(fabric.device), data.test.to(fabric.device), data.classes)
        if len(data.train) < config.batch:
            raise ValueError(
                f"`batch` (={config.batch}) must be at most the {len(data.train)} images."
            )
        self.steps_per_epoch = len(data.train) // config.batch
        self.total_steps = max(1, round(config.epochs * self.steps_per_epoch))
        self.step = 0
        self._order: tuple[int, Tensor] | None = None  # (epoch, its shuffled indices)
        self.metrics: dict[str, float] = {}
        self.started = time.monotonic()

        torch.manual_seed(config.seed)
        self.model = create_model(
            config.arch,
            classes=data.classes,
            preset=config.preset,
            input_size=tuple(data.train.pixels.shape[2:]),
            **config.options,
        ).to(fabric.device)
        if config.preset is None:
            calibrate(self.model, self._batch(0, whole=True)[0])  # the same in every process
        self.model.to(memory_format=torch.channels_last)
        self.averaged = [p.detach().clone() for p in self.model.parameters()] if config.ema else []
        self.optimiser = self._make_optimiser()
        self.wrapped, self.stepper = fabric.setup(self.model, self.optimiser)
        self.forward: Callable[[Tensor], Any] = self.wrapped
        if config.compile:
            self.forward = torch.compile(self.wrapped)
        self.loss = torch.zeros((), device=fabric.device)  # sums over the epoch, on the device
        self.correct = torch.zeros((), device=fabric.device)
        self.replay = self._capture() if self._can_capture() else None

    def _make_optimiser(self) -> torch.optim.Optimizer:
        c, parameters = self.config, list(self.model.parameters())
        if c.optimiser == "sgd":
            return torch.optim.SGD(
                parameters, c.lr, momentum=c.momentum, weight_decay=c.weight_decay, nesterov=True
            )
        kind = torch.optim.Adam if c.optimiser == "adam" else torch.optim.AdamW
        if self.fabric.device.type == "cuda":
            rate = torch.tensor(c.lr, device=self.fabric.device)
            return kind(parameters, rate, weight_decay=c.weight_decay, fused=True, capturable=True)
        return kind(parameters, c.lr, weight_decay=c.weight_decay)

    # One step.

    def advance(self) -> None:
        images, labels = self._batch(self.step)
        rate = self.config.lr_at(self.step / self.steps_per_epoch)
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.replay is not None:
            self.replay(images, labels)
        else:
            self._update(images, labels)
        self.step += 1
        if self.fabric.device.type == "cpu" or self.step % 50 == 0:
            self._check_finite(images)

    def _batch(self, step: int, whole: bool = False) -> tuple[Tensor, Tensor]:
        """This process's share of the step's batch: order and augmentation depend on it alone."""
        c, device = self.config, self.fabric.device
        epoch, within = divmod(step, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            order = Generator().manual_seed(c.seed * 1_000_003 + epoch)
            shuffled = torch.randperm(len(self.data.train), generator=order).to(device)
            self._order = (epoch, shuffled)
        world, rank = (1, 0) if whole else (self.fabric.world_size, self.fabric.global_rank)
        share = slice(rank * c.batch // world, (rank + 1) * c.batch // world)
        indices = self._order[1][within * c.batch : (within + 1) * c.batch][share]
        images, labels = self.data.train.batch(indices)
        draws = Draws(Generator(device).manual_seed(c.seed * 7919 + step), c.batch, share)
        for name in c.augment:
            images = AUGMENTATIONS[name](images, draws)
        return images.contiguous(memory_format=torch.channels_last), labels

    def _update(self, images: Tensor, labels: Tensor) -> None:
        c = self.config
        pieces = zip(images.chunk(c.accumulate), labels.chunk(c.accumulate), strict=True)
        for part, its_labels in pieces:
            outputs = self.forward(part)
            loss = self._criterion(outputs, its_labels) / c.accumulate
            self.fabric.backward(loss)
            main = outputs[0] if isinstance(outputs, tuple) else outputs
            self.loss += loss.detach().float()
            self.correct += (main.detach().argmax(1) == its_labels).sum()
        if c.adaptive_clip:
            clip_adaptively(self.model, c.adaptive_clip)
        if c.clip:
            self.fabric.clip_gradients(self.wrapped, self.stepper, max_norm=c.clip)
        self.stepper.step()
        self.stepper.zero_grad()
        if self.averaged:
            torch._foreach_lerp_(self.averaged, list(self.model.parameters()), 1 - c.ema)

    def _criterion(self, outputs: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
        main, *others = outputs if isinstance(outputs, tuple) else (outputs,)
        target = F.one_hot(labels, main.shape[1]).to(main.dtype)
        if self.config.label_smoothing:
            target = target + self.config.label_smoothing * (1 / main.shape[1] - target)
        loss = F.binary_cross_entropy_with_logits(main, target)
        for other in others:
            extra = F.binary_cross_entropy_with_logits(other, target)
            loss = loss + self.config.auxiliary_weight * extra
        return loss

    # A captured step: the same work as `_update`, launched at once.

    def _can_capture(self) -> bool:
        c = self.config
        return (
            c.cuda_graph
            and self.fabric.device.type == "cuda"
            and self.fabric.world_size == 1
            and c.optimiser != "sgd"
            and c.precision in ("32-true", "bf16-mixed")
        )

    def _capture(self) -> Callable[[Tensor, Tensor], None]:
        images, labels = self._batch(0)
        kept = [t.detach().clone() for t in self._tensors()]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._update(images, labels)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._update(images, labels)
        for tensor, value in zip(self._tensors(), kept, strict=True):  # as if nothing had happened
            tensor.detach().copy_(value)
        for state in self.optimiser.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()

        def replay(new_images: Tensor, new_labels: Tensor) -> None:
            images.copy_(new_images)
            labels.copy_(new_labels)
            graph.replay()

        return replay

    def _tensors(self) -> list[Tensor]:
        model = [*self.model.parameters(), *self.model.buffers()]
        return [*model, *self.averaged, self.loss, self.correct]

    def _check_finite(self, images: Tensor) -> None:
        if torch.isfinite(self.loss):
            return
        raise TrainError(
            f"the loss is not finite at step {self.step}: "
            f"{first_broken_layer(self.model, images)}; "
            "lower `lr`, set `clip`, or recalibrate; bf16 has more range than fp16."
        )

    # The end of an epoch.

    def close_epoch(self, pictures: int) -> None:
        steps = (self.step - 1) % self.steps_per_epoch + 1
        accuracy, loss = self._with_average(lambda: evaluate(self.model, self.data.test))
        seen = steps * self.config.batch
        line = {
            "epoch": self.step / self.steps_per_epoch,
            "step": self.step,
            "lr": self.config.lr_at(self.step / self.steps_per_epoch),
            "train_loss": (self.fabric.all_reduce(self.loss) / steps).item(),
            "train_accuracy": (self.fabric.all_reduce(self.correct, reduce_op="sum") / seen).item(),
            "test_loss": loss,
            "test_accuracy": accuracy,
            "seconds": round(time.monotonic() - self.started, 1),
        }
        self.loss.zero_()
        self.correct.zero_()
        self.metrics = line
        if self.fabric.is_global_zero:
            with (self.out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")
            self.console.print(
                f"epoch {line['epoch']:6.1f}  loss {line['train_loss']:.4f}  train "
                f"{line['train_accuracy']:.2%}  test {accuracy:.2%}  {line['seconds']:.0f} s",
                highlight=False,
            )
            epoch = round(self.step / self.steps_per_epoch)
            if pictures and epoch % pictures == 0:
                self._with_average(lambda: self._draw(epoch))
        self.save_state()

    def _draw(self, epoch: int) -> None:
        from torchbcos.explain import explain
        from torchbcos.render import figure

        images, labels = self.data.test.batch(
            torch.arange(0, len(self.data.test), len(self.data.test) // 6)[:6]
        )
        self.model.eval()
        drawn = figure(images, explain(self.model, images, labels))
        drawn.savefig(self.out / f"epoch-{epoch:03d}.png", dpi=80)

    def _with_average(self, do: Callable[[], Any]) -> Any:
        """Do something with the averaged weights in the model, if there are any."""
        if not self.averaged:
            return do()
        own = [p.detach().clone() for p in self.model.parameters()]
        try:
            self._put(self.averaged)
            return do()
        finally:
            self._put(own)

    def _put(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.parameters()), values)

    # State on disk.

    def save_state(self) -> None:
        """Everything that a later process needs to go on as if this one had not ended."""
        if not self.fabric.is_global_zero:
            return
        layers = {name: layer.scale for name, layer in self.model.bcos_layers()}
        about = {
            "step": self.step,
            "seconds": time.monotonic() - self.started,
            "config": self.config.as_json(),
            "scales": layers,
            "temperature": self.model.temperature,
            "scaling": self.model.scaling,
        }
        tensors = {name: t.detach().cpu().contiguous() for name, t in self._state().items()}
        content = safetensors.torch.save(tensors, metadata={"state": json.dumps(about)})
        write_atomically(self.out / STATE, content)

    def load_state(self) -> None:
        path = self.out / STATE
        if not path.exists():
            return  # nothing was finished yet: begin
        try:
            with safetensors.safe_open(path, "pt") as file:
                about = json.loads(file.metadata()["state"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: remove it to begin anew.") from error
        mine = self.config.as_json()
        for name, value in about["config"].items():
            if mine[name] != value:
                raise ValueError(
                    f"`{name}` (={mine[name]!r}) must be {value!r}, as in the run to be resumed in "
                    f"{self.out}: change it back, or choose another folder."
                )
        self._create_optimiser_state()
        own = self._state()
        with torch.no_grad():
            for name, value in tensors.items():
                own[name].copy_(value)
        for name, layer in self.model.bcos_layers():
            layer.scale = about["scales"][name]
        self.model.temperature, self.model.scaling = about["temperature"], about["scaling"]
        self.step = about["step"]
        self.started = time.monotonic() - about["seconds"]
        self._drop_later_metrics()

    def _state(self) -> dict[str, Tensor]:
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
        kept = [p.detach().clone() for p in self.model.parameters()]
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self._put(kept)

    def _drop_later_metrics(self) -> None:
        """Lines of epochs that were measured but not kept would stand twice."""
        path = self.out / "metrics.jsonl"
        if self.fabric.is_global_zero and path.exists():
            lines = [line for line in path.read_text().splitlines() if line.strip()]
            kept = [line for line in lines if json.loads(line)["step"] <= self.step]
            write_atomically(path, "".join(line + "\n" for line in kept).encode())

    def finished_model(self) -> BcosModel:
        if self.averaged:
            self._put(self.averaged)
        self.model.eval()
        self.model.provenance = {"config": self.config.as_json(), "metrics": self.metrics}
        if self.fabric.is_global_zero:
            save(self.model, self.out / "model.safetensors", provenance=self.model.provenance)
        return self.model


def clip_adaptively(model: nn.Module, limit: float) -> None:
    """Shrink the gradient of each weight row to at most `limit` times the row's norm."""
    for layer in model.modules():
        if isinstance(layer, BcosLayer) and layer.weight.grad is not None:
            dims = list(range(1, layer.weight.dim()))
            weight = torch.linalg.vector_norm(layer.weight.detach(), dim=dims, keepdim=True)
            grad = torch.linalg.vector_norm(layer.weight.grad, dim=dims, keepdim=True)
            layer.weight.grad.mul_((limit * weight / grad.clamp(min=1e-12)).clamp(max=1))
