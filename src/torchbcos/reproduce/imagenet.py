"""The paper's experiments on ImageNet, and what it reports of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchbcos.reproduce.experiments import Experiment

__all__ = ["ARCHITECTURES", "EXPERIMENTS", "PLUS", "TABLE_B1"]

#: By name: what it is called, and Tab. 2's accuracies of the conventional and the B-cos version.
ARCHITECTURES = {
    "vgg11": ("VGG-11", 69.0, 69.6),
    "resnet34": ("ResNet-34", 73.3, 71.7),
    "densenet121": ("DenseNet-121", 74.4, 73.3),
    "inception_v3": ("Inception-v3", 77.3, 75.4),
}
PLUS = ("densenet121-plus", "DenseNet-121, training⁺", 74.4, 74.4)  # Tab. 2's last row
#: Tab. B1 by experiment: units and growth, millions of parameters, accuracy.
TABLE_B1 = {
    "densenet121-one-unit": ("one unit, growth 32", 7.9, 72.6),
    "densenet121-growth20": ("2 units, growth 20", 6.8, 72.8),
    "densenet121-growth22": ("2 units, growth 22", 8.0, 73.2),
    "densenet121-growth24": ("2 units, growth 24", 9.4, 73.6),
    "densenet121-growth26": ("2 units, growth 26", 10.8, 73.7),
    "densenet121-growth28": ("2 units, growth 28", 12.4, 74.0),
    "densenet121-growth30": ("2 units, growth 30", 14.0, 73.9),
    "densenet121": ("2 units, growth 32", 15.8, 74.3),
    "densenet121-conventional": ("conventional, growth 32", 7.9, 74.4),
}


def _imagenet() -> Iterable[Experiment]:
    def experiment(name: str, what: str, **more: Any) -> Experiment:
        return Experiment(name, f"imagenet-{name}", what, **more)

    for arch, (title, conventional, bcos) in ARCHITECTURES.items():
        yield experiment(
            f"{arch}-conventional", f"{title}, conventional", compared=True, paper=conventional
        )
        yield experiment(arch, f"{title}, B-cos", compared=True, paper=bcos)
    name, title, _, bcos = PLUS
    yield experiment(f"{name}-conventional", f"{title}, conventional")  # the paper trained none
    yield experiment(name, f"{title}, B-cos", paper=bcos)
    for name, (what, _, accuracy) in TABLE_B1.items():
        if name not in ("densenet121", "densenet121-conventional"):
            yield experiment(name, f"DenseNet-121, B-cos, {what}", paper=accuracy)


#: By name, in the order of the page.
EXPERIMENTS = {e.name: e for e in _imagenet()}
