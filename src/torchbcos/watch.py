"""Look at every step of a training for a signal that is no number any more, or has stalled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["TrainError", "Watch"]

_LOSS, _GRADIENT, _CONSTANT, _STALLED = 1, 2, 4, 8
FAINT = 1e-10  # gradients whose root mean square is below vanish beside the 1e-8 of Adam
LEARNED = 1e-4  # below this loss a gradient may well be zero


class TrainError(RuntimeError):
    """Training cannot go on; the message names the step, the layer and the remedy."""


class Watch:
    """Finds the first step whose loss or gradients are not finite, or that teaches nothing.

    `look` runs on the device, so that a GPU never waits; it may be part of a captured graph. From
    the step on at which it finds something, `found` is 1, and an optimiser that knows it as
    `found_inf` leaves the weights as they were.
    """

    def __init__(self, model: nn.Module, device: torch.device, precision: str = "32-true") -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.dim() > 1]
        self.names = [_short(n.removesuffix(".weight")) for n, _ in named]
        self.weights = [p for _, p in named]
        self.gradients = precision != "16-mixed"  # there a scaler handles infinite ones
        self.constants = precision == "32-true"  # bf16 rounds small differences away
        self.roots = torch.tensor([p.numel() ** 0.5 for p in self.weights], device=device)
        self.step = torch.zeros((), dtype=torch.int64, device=device)
        self.first = torch.zeros((), dtype=torch.int64, device=device)  # 0: nothing yet
        self.code = torch.zeros((), dtype=torch.int64, device=device)
        self.sizes = torch.zeros(len(named), device=device)  # of the gradients then
        self.found = torch.zeros((), device=device)
        self._seen = torch.zeros((), dtype=torch.int64, pin_memory=device.type == "cuda")

    def tensors(self) -> list[Tensor]:
        return [self.step, self.first, self.code, self.sizes, self.found]

    @torch.no_grad()
    def look(self, loss: Tensor, logits: Tensor) -> None:
        """At a step, after its backward pass and before the optimiser."""
        self.step += 1
        code = ~torch.isfinite(loss) * _LOSS
        sizes = self.sizes
        if self.gradients:
            grads = [w.grad if w.grad is not None else torch.ones_like(w) for w in self.weights]
            norms = torch.stack([_whole(n) for n in torch._foreach_norm(grads)])
            sizes = norms / self.roots
            dead = (norms == 0).any() | (sizes < FAINT).all()
            code = code + ~torch.isfinite(norms).all() * _GRADIENT
            code = code + (dead & (loss > LEARNED)) * _STALLED
        if self.constants and len(logits) > 1:
            code = code + (logits.amax(0) == logits.amin(0)).all() * _CONSTANT
        new = (self.first == 0) & (code > 0)
        self.first.copy_(torch.where(new, self.step, self.first))
        self.code.copy_(torch.where(new, code, self.code))
        self.sizes.copy_(torch.where(new, sizes, self.sizes))
        self.found.copy_(self.first > 0)

    def check(self, forward: Callable[[Tensor], Any], model: nn.Module, images: Tensor) -> None:
        """Raise if something was found; on a GPU that may come some steps later."""
        self._seen.copy_(self.first, non_blocking=True)
        if int(self._seen) == 0:
            return
        code, sizes = int(self.code), self.sizes.tolist()
        if code & (_LOSS | _GRADIENT):
            what = "the loss is" if code & _LOSS else "gradients are"
            raise TrainError(
                f"{what} not finite at step {int(self.first)}: "
                f"{_where_not_finite(forward, model, images)}; lower `lr`, set `clip`, or "
                "recalibrate with preset=''; bf16 has more range than fp16."
            )
        still = _where_zero(forward, model, images)
        if not still and code & _STALLED:
            name, size = min(zip(self.names, sizes, strict=True), key=lambda pair: pair[1])
            still = f"the gradient of {name} is {size:.1g} in root mean square"
        still = still or "the logits are the same for all images of the batch"
        raise TrainError(
            f"the signal has stalled at step {int(self.first)}: {still}; calibrate with preset='', "
            "or, if it once was there, lower `lr` or set `weight_rms` to 1; torchbcos.signal shows "
            "every layer."
        )

    def wait(self) -> None:
        """Have the next `check` know all steps so far."""
        self._seen.copy_(self.first)


def _short(name: str) -> str:
    return name.removeprefix("network.")


def _whole(value: Tensor) -> Tensor:
    """A norm over all shards, if the gradient is sharded."""
    full = getattr(value, "full_tensor", None)
    return value if full is None else full()


def _weighted(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and weight.dim() > 1:
            yield _short(name), module


@torch.no_grad()
def _first_output(
    forward: Callable[[Tensor], Any],
    model: nn.Module,
    images: Tensor,
    test: Callable[[Tensor], Tensor],
) -> str | None:
    """The first layer whose output passes the test."""
    found: list[str] = []

    def look(name: str, out: Tensor) -> None:
        if not found and bool(test(out)):
            found.append(name)

    with ExitStack() as hooks:
        for name, module in _weighted(model):
            hook = module.register_forward_hook(lambda _, __, out, name=name: look(name, out))
            hooks.enter_context(hook)
        forward(images)
    return found[0] if found else None


def _where_not_finite(forward: Callable[[Tensor], Any], model: nn.Module, images: Tensor) -> str:
    for name, module in _weighted(model):
        assert isinstance(module.weight, Tensor)
        if not _whole(torch.isfinite(module.weight.detach()).all()):
            return f"the weights of {name} are not finite"
    broken = _first_output(forward, model, images, lambda out: ~torch.isfinite(out).all())
    return f"the output of {broken} is not finite" if broken else "it begins in the loss itself"


def _where_zero(forward: Callable[[Tensor], Any], model: nn.Module, images: Tensor) -> str:
    name = _first_output(forward, model, images, lambda out: out.abs().amax() < 1e-30)
    return f"the output of {name} is zero for every image" if name else ""
