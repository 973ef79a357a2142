"""Conventional networks of our own, for small images; `models` converts them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

__all__ = ["cifar9", "cifar_resnet", "mini"]


def cifar9(num_classes: int = 10, in_channels: int = 3, batch_norm: bool = False) -> nn.Module:
    """The conventional network whose B-cos version is the paper's for CIFAR-10."""
    widths = [in_channels, 64, 64, 128, 128, 128, 256, 256, 256]
    strides = [1, 1, 2, 1, 1, 2, 1, 1]
    layers: list[nn.Module] = []
    for before, after, stride in zip(widths, widths[1:], strides, strict=False):
        layers.append(nn.Conv2d(before, after, 3, stride, padding=1))
        layers += [nn.BatchNorm2d(after), nn.ReLU()] if batch_norm else [nn.ReLU()]
    layers += [nn.Conv2d(widths[-1], num_classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers)


def mini(num_classes: int, in_channels: int = 3, width: int = 32) -> nn.Module:
    """Six layers and a classifier, quick enough for two cores of a CPU."""
    widths = [in_channels, width, width, 2 * width, 2 * width, 3 * width, 3 * width]
    layers: list[nn.Module] = []
    for i, (before, after) in enumerate(itertools.pairwise(widths)):
        kernel, stride = (5 if i == 0 else 3), 2 - i % 2
        convolution = nn.Conv2d(before, after, kernel, stride, padding=kernel // 2)
        layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
    layers += [nn.Conv2d(widths[-1], num_classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers)


def cifar_resnet(
    num_classes: int = 10, in_channels: int = 3, blocks: Sequence[int] = (3, 3, 3), width: int = 64
) -> nn.Module:
    """A residual network for small images: full resolution at first, halved before later stages."""
    from torchvision.models.resnet import BasicBlock

    layers: list[nn.Module] = [
        nn.Conv2d(in_channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    before = width
    for stage, count in enumerate(blocks):
        after = width << stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            shortcut: nn.Module | None = None
            if before != after:
                convolution = nn.Conv2d(before, after, 1, stride, bias=False)
                shortcut = nn.Sequential(convolution, nn.BatchNorm2d(after))
            layers.append(BasicBlock(before, after, stride, shortcut))
            before = after
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(*layers, *pool, nn.Linear(before, num_classes))
