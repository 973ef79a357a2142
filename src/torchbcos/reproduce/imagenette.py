"""The experiments on Imagenette: the paper's large networks, and what it reports on ImageNet."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchbcos.reproduce.experiments import Experiment

__all__ = ["ARCHITECTURES", "EXPERIMENTS", "UNITS_OF"]

#: By name: what it is called, and Tab. 2's accuracies of the conventional and the B-cos version.
ARCHITECTURES = {
    "vgg11": ("VGG-11", 69.0, 69.6),
    "resnet34": ("ResNet-34", 73.3, 71.7),
    "densenet121": ("DenseNet-121", 74.4, 73.3),
    "inception_v3": ("Inception-v3", 77.3, 75.4),
}
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
