"""The methods by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from torchbcos._arguments import missing_package
from torchbcos.baseline import to_explain
from torchbcos.models import BcosModel
from torchbcos.targets import Targets
from torchbcos.undisturbed import keeping_buffers

__all__ = ["METHODS", "Method", "choose_methods", "register"]

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
    twin: Callable[[nn.Module], str] = lambda _: ""  # the method that it equals on a model, or ""
    needs: tuple[str, ...] = ()  # packages of the extra `eval`

    def __call__(
        self, model: nn.Module, images: Tensor, targets: Targets = None, **options: Any
    ) -> Tensor:
        """[N, K, H, W], detached, on the images' device."""
        self.check(model)
        try:
            maps = self.compute(model, images, targets, **options).detach()
        except ModuleNotFoundError as error:
            raise ValueError(self._missing(error.name)) from error
        if maps.dim() != 4 or len(maps) != len(images) or maps.shape[2:] != images.shape[2:]:
            expected = f"[{len(images)}, K, {images.shape[-2]}, {images.shape[-1]}]"
            raise ValueError(
                f"the method {self.name!r} gave maps of shape {tuple(maps.shape)}, not {expected}."
            )
        return maps

    def check(self, model: nn.Module) -> None:
        """Raise what calling it would raise, before any work."""
        for package in self.needs:
            if find_spec(package) is None and not self.twin(model):
                raise ValueError(self._missing(package))
        if self.inherent and not isinstance(to_explain(model), BcosModel):
            raise ValueError(
                f"`model` (a {type(model).__name__}) must be a B-cos model for the method "
                f"{self.name!r}: its equivalent for other networks is 'ixg'."
            )

    def _missing(self, package: str | None) -> str:
        return missing_package(f"the method {self.name!r}", package, "eval")


def register(
    name: str,
    *,
    label: str | None = None,
    perturbs: bool = False,
    inherent: bool = False,
    twin: Callable[[nn.Module], str] = lambda _: "",
    needs: tuple[str, ...] = (),
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Make a function a method: `@register("mine")`. A name that is taken is an error."""

    def add(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if name in METHODS:
            raise ValueError(f"`name` (={name!r}) is taken by another method: choose another.")
        compute = keeping_buffers(function)
        METHODS[name] = Method(name, compute, label or name, perturbs, inherent, twin, needs)
        return compute

    return add


def choose_methods(names: Iterable[str], model: nn.Module) -> list[Method]:
    """Methods by name, "all" for every one that suits `model`, each once, in the given order."""
    chosen: dict[str, Method] = {}
    for name in names:
        if name == "all":
            inherent = isinstance(to_explain(model), BcosModel)
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
