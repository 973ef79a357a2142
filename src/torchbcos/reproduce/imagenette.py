"""The experiments on Imagenette: the paper's large networks, and what it reports on ImageNet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchbcos.reproduce.experiments import Experiment
from torchbcos.reproduce.imagenet import ARCHITECTURES

__all__ = ["EXPERIMENTS", "UNITS_OF"]

UNITS_OF = "resnet34-norm"
_LAYERS = ("layer1.2.conv2", "layer2.3.conv2", "layer4.2.conv2")  # early, middle, late


def _imagenette() -> Iterable[Experiment]:
    def experiment(name: str, what: str, **more: Any) -> Experiment:
        return Experiment(name, f"imagenette-{name}", what, **more)

    for arch, (title, conventional, bcos) in ARCHITECTURES.items():
        yield experiment(
            f"{arch}-conventional", f"{title}, conventional", compared=True, paper=conventional
        )
        yield experiment(arch, f"{title}, B-cos without norms", compared=True, paper=bcos)
        name = f"{arch}-norm"
        layers = _LAYERS if name == UNITS_OF else ()
        what = f"{title}, B-cos with uncentred batch norms"
        yield experiment(name, what, compared=True, units=layers)
    yield experiment("vgg11_bn-conventional", "VGG-11, conventional with batch norm")
    yield experiment("densenet121-one-unit", "DenseNet-121, B-cos, one unit", paper=72.6)
    yield experiment("densenet121-growth22", "DenseNet-121, B-cos, growth 22", paper=73.2)
    what = "DenseNet-121, B-cos, one unit, uncentred batch norms (the bundled model)"
    yield experiment("small", what, bundle="imagenette")


#: By name, in the order of the page.
EXPERIMENTS = {e.name: e for e in _imagenette()}
