"""The studies, by name."""

from __future__ import annotations

from torchbcos.reproduce import (
    cifar10,
    cifar10_page,
    imagenet,
    imagenet_page,
    imagenette,
    imagenette_page,
)
from torchbcos.reproduce.experiments import Study

__all__ = ["STUDIES", "choose_study"]

STUDIES = {
    "cifar10": Study("cifar10", "CIFAR-10", cifar10.EXPERIMENTS, cifar10_page.write_page),
    "imagenette": Study(
        "imagenette",
        "Imagenette",
        imagenette.EXPERIMENTS,
        imagenette_page.write_page,
        reported="paper, ImageNet",
        smooth=15,
        grids=250,  # 500 would need more images than it has
        slow_grids=20,
        slow=("intgrad", "smoothgrad"),
    ),
    "imagenet": Study(
        "imagenet", "ImageNet", imagenet.EXPERIMENTS, imagenet_page.write_page, smooth=15
    ),
}


def choose_study(name: str) -> Study:
    """
    >>> [e.recipe for e in choose_study("cifar10").choose(["plain-b2", "maxout-b1.25"])]
    ['cifar10-plain', 'cifar10-b1.25']
    """
    if name not in STUDIES:
        raise ValueError(f"`study` (={name!r}) must be of: {', '.join(STUDIES)}.")
    return STUDIES[name]
