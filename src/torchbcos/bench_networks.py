"""The networks that `torchbcos bench` compares: one architecture, built in five ways.

- `conventional`: torchvision's network, with its norms and activations;
- `floor`: our network with plain convolutions for B-cos ones and torch's own pools and sums, so
  without norms and activations (two units: doubled channels and a plain maximum);
- `pooled-floor`: the floor with our average pools, which are faster than torch's;
- `peer`: our network with the layers of the package `bcos`, if it is installed;
- `ours`.
"""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from torchbcos import functional
from torchbcos.bench_cases import Case
from torchbcos.layers import AvgPool2d, BcosConv2d, BcosLinear
from torchbcos.models import BcosModel, create_model

__all__ = ["CLASSES", "build"]

CLASSES = 10  # of every network: the classifier's size is not what is measured


def build(case: Case) -> nn.Module:
    if case.way == "conventional":
        return _conventional(case.arch)
    options: dict[str, Any] = {"num_classes": CLASSES, "b": case.b, "max_out": case.units}
    if case.arch == "cifar9":
        options["preset"] = "paper" if case.b in (1, 1.25, 1.5, 1.75, 2, 2.25, 2.5) else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = create_model(case.arch, **options)
    model._values_checked = True  # nothing is asked about the images
    model.scaling = "custom"
    if case.way == "ours":
        return model
    if case.way == "peer":
        return _with_layers(model, _peer)
    model = _with_plain_sums(_with_layers(model, _plain))
    return model if case.way == "pooled-floor" else _with_plain_pools(model)


def _conventional(arch: str) -> nn.Module:
    if arch != "cifar9":
        network: nn.Module = getattr(torchvision.models, arch)(num_classes=CLASSES)
        return network
    widths, strides = (64, 64, 128, 128, 128, 256, 256, 256), (1, 1, 2, 1, 1, 2, 1, 1)
    layers: list[nn.Module] = []
    for i, (width, stride) in enumerate(zip(widths, strides, strict=True)):
        before = widths[i - 1] if i else 3
        layers += [nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)]
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers, nn.Conv2d(256, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _with_layers(model: BcosModel, layer: Callable[[BcosConv2d], nn.Module]) -> BcosModel:
    """A copy of the model with other layers."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BcosConv2d):
                setattr(parent, name, layer(child))
            elif isinstance(child, BcosLinear):
                raise ValueError(f"{name} is linear, and only convolutions are exchanged here.")
    return model


def _with_plain_pools(model: BcosModel) -> BcosModel:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, AvgPool2d):
                pool = (child.kernel_size, child.stride, child.padding, child.ceil_mode)
                setattr(parent, name, nn.AvgPool2d(*pool, child.count_include_pad))
    return model


def _with_plain_sums(model: BcosModel) -> BcosModel:
    graph = getattr(model.network, "graph", None)
    if graph is not None:
        for node in graph.nodes:
            if node.target is functional.add:
                node.target = operator.add
        model.network.recompile()  # type: ignore[operator]
    return model


class _PlainMaximum(nn.Module):
    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.conv(x).chunk(2, 1)
        return torch.maximum(first, second)


def _plain(layer: BcosConv2d) -> nn.Module:
    conv = nn.Conv2d(
        layer.in_channels,
        layer.out_channels * layer.max_out,
        layer.kernel_size,  # type: ignore[arg-type]
        layer.stride,  # type: ignore[arg-type]
        layer.padding,  # type: ignore[arg-type]
        layer.dilation,  # type: ignore[arg-type]
        layer.groups,
        bias=False,
    )
    return conv if layer.max_out == 1 else _PlainMaximum(conv)


def _peer(layer: BcosConv2d) -> nn.Module:
    from bcos.modules import BcosConv2d as Peer

    made: nn.Module = Peer(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,
        layer.stride,
        layer.padding,
        b=layer.b,
        max_out=layer.max_out,
    )
    return made
