"""The methods by name, and what every one of them starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchbcos.explain import logits_of, network_input, unwrapped
from torchbcos.models import BcosModel
from torchbcos.targets import Targets, check_class, resolve_targets, targets_of_chunk

__all__ = ["METHODS", "Method", "Subject", "choose_methods", "probabilities", "register"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

#: Every method by its name.
METHODS: dict[str, Method] = {}


@dataclass(frozen=True)
class Method:
    """A method of explanation; call it."""

    name: str
    compute: Callable[..., Tensor]
    label: str  # in plots and tables
    perturbs: bool = False  # it looks at outputs alone: slow, and scored unsmoothed
    inherent: bool = False  # it needs a B-cos model

    def __call__(
        self, model: nn.Module, images: Tensor, targets: Targets = None, **options: Any
    ) -> Tensor:
        """[N, K, H, W], detached, on the images' device."""
        if self.inherent and not isinstance(unwrapped(model), BcosModel):
            raise ValueError(
                f"`model` (a {type(model).__name__}) must be a BcosModel for the method "
                f"{self.name!r}: its equivalent for other networks is 'ixg'."
            )
        try:
            maps = self.compute(model, images, targets, **options).detach()
        except ModuleNotFoundError as error:
            raise ValueError(
                f"the method {self.name!r} needs the package {error.name}: install it with "
                "pip install 'torchbcos[eval]'."
            ) from error
        if maps.dim() != 4 or len(maps) != len(images) or maps.shape[2:] != images.shape[2:]:
            expected = f"[{len(images)}, K, {images.shape[-2]}, {images.shape[-1]}]"
            raise ValueError(
                f"the method {self.name!r} gave maps of shape {tuple(maps.shape)}, not {expected}."
            )
        return maps


def register(
    name: str, *, label: str | None = None, perturbs: bool = False, inherent: bool = False
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Make a function a method: `@register("mine")`. A name that is taken is an error."""

    def add(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if name in METHODS:
            raise ValueError(f"`name` (={name!r}) is taken by another method: choose another.")
        METHODS[name] = Method(name, function, label or name, perturbs, inherent)
        return function

    return add


def choose_methods(names: Iterable[str], model: nn.Module) -> list[Method]:
    """Methods by name, "all" for every one that suits `model`, each once, in the given order."""
    chosen: dict[str, Method] = {}
    for name in names:
        if name == "all":
            inherent = isinstance(unwrapped(model), BcosModel)
            chosen.update({k: m for k, m in METHODS.items() if inherent or not m.inherent})
        elif name in METHODS:
            chosen[name] = METHODS[name]
        else:
            raise ValueError(
                f"`methods` (={name!r}) must be 'all' or of: {', '.join(sorted(METHODS))}."
            )
    if not chosen:
        raise ValueError("`methods` (=[]) must name at least one method.")
    return list(chosen.values())


@dataclass(frozen=True)
class Subject:
    """A model as the methods see it: what goes into its network, and the logits that come out.

    For a B-cos model the input is the encoded image, six channels, as in the paper: a baseline of
    zeros is then the absence of any signal, not black.
    """

    model: nn.Module
    x: Tensor  # [N, C, H, W]
    targets: Tensor  # [N, K]
    extremes: tuple[int, ...] = ()  # the lowest and highest of targets not yet checked

    @classmethod
    @torch.no_grad()
    def of(cls, model: nn.Module, images: Tensor, targets: Targets) -> Subject:
        model = unwrapped(model)
        if not isinstance(images, Tensor) or images.dim() != 4:
            shape = tuple(getattr(images, "shape", ()))
            raise ValueError(f"`images` (shape {shape}) must be a tensor [N, C, H, W].")
        x = network_input(model, images)
        given = targets_of_chunk(targets, 0, len(images), len(images))
        if isinstance(given, Tensor) and given.dim() > 0 and given.dtype in _INTEGERS:
            # No forward pass, and with targets from the CPU no waiting for the device.
            extremes = int(given.min()), int(given.max())
            return cls(model, x, given.to(x.device, torch.long).view(len(x), -1), extremes)
        logits = logits_of(model, x)
        return cls(model, x, resolve_targets(given, logits, getattr(model, "classes", None)))

    def logits(self, x: Tensor) -> Tensor:
        """All logits of other inputs in place of `x`."""
        logits = logits_of(self.model, x)
        for value in self.extremes:
            check_class(value, logits.shape[1])
        return logits

    def outputs(self, x: Tensor) -> Tensor:
        """The targets' logits [N, K]."""
        return self.logits(x).gather(1, self.targets)


def probabilities(model: nn.Module, logits: Tensor) -> Tensor:
    """Of each class: a B-cos model learns them one by one, other classifiers against each other."""
    return logits.sigmoid() if isinstance(unwrapped(model), BcosModel) else logits.softmax(-1)
