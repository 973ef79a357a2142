"""Conventional networks to compare with, with their usual normalisation inside."""

from __future__ import annotations

import re
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from torchbcos._arguments import check_device
from torchbcos.explain import logits_of
from torchbcos.models import DEVIATION, MEAN, ConventionalModel
from torchbcos.wrappers import unwrapped

__all__ = ["Normalised", "how_tested", "load_baseline", "to_explain"]

IMAGENET = 1000  # classes
_OTHERWISE_NORMALISED = ("googlenet", "inception_v3")
_OLD_NAME = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\.")  # in torchvision's DenseNets


class Normalised(nn.Module):
    """A network for images in 0..1 that subtracts mean and deviation itself.

    One that learned each class by itself has a `logit_bias`, which is added to its outputs; others
    learned classes against each other.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        network: nn.Module,
        mean: Tensor | tuple[float, ...] = MEAN,
        deviation: Tensor | tuple[float, ...] = DEVIATION,
        logit_bias: float | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.logit_bias = logit_bias
        for name, value in (("mean", mean), ("deviation", deviation)):
            self.register_buffer(name, torch.as_tensor(value).view(-1, 1, 1), persistent=False)

    def normalise(self, images: Tensor) -> Tensor:
        return (images - self.mean) / self.deviation

    def around(self, network: nn.Module) -> Normalised:
        """Another network in place of this one."""
        return Normalised(network, self.mean, self.deviation, self.logit_bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.from_normalised(self.normalise(images))

    def from_normalised(self, x: Tensor) -> Tensor:
        return logits_of(self.network, x) + (self.logit_bias or 0.0)


def to_explain(model: nn.Module) -> nn.Module:
    """The model itself or, if it is a `ConventionalModel`, its network after the normalisation.

    So post-hoc methods see what that network sees: normalised colours, and zeros are their mean.
    """
    inner = unwrapped(model)
    if not isinstance(inner, ConventionalModel):
        return inner
    normalised = Normalised(inner.network, inner.mean, inner.deviation, inner.logit_bias)
    normalised.training = inner.training
    return normalised


def load_baseline(name: str, device: torch.device | str = "cpu") -> nn.Module:
    """`NAME=FILE`: a torchvision network with a state dict (.pth or .safetensors) of any classes.

    `NAME` alone, or `NAME=DEFAULT`, takes torchvision's own weights, which it may have to fetch.
    """
    import torchvision.models

    device = check_device(device)
    arch, _, weights = name.partition("=")
    if arch not in torchvision.models.list_models(module=torchvision.models):
        raise ValueError(f"`--baseline` (=torchvision/{name}): {arch!r} is no torchvision network.")
    if not weights or weights.isupper():
        try:
            network = torchvision.models.get_model(arch, weights=weights or "DEFAULT")
        except OSError as error:  # URLError is one
            raise ValueError(
                f"`--baseline` (=torchvision/{name}): torchvision's weights cannot be fetched "
                f"({' '.join(str(error).split())}): give them as torchvision/{arch}=FILE."
            ) from error
        return Normalised(network).to(device).eval()
    path = Path(weights)
    if not path.is_file():
        raise ValueError(f"`--baseline` (=torchvision/{name}): {path} does not exist.")
    try:
        if path.suffix == ".safetensors":
            state = safetensors.torch.load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
        outputs = len([v for v in state.values() if v.dim() > 0][-1])  # the classifier is last
        more = {}
        if arch in _OTHERWISE_NORMALISED:  # by torchvision's own weights, so by thousand classes
            more = {"transform_input": outputs == IMAGENET, "init_weights": False}
        network = torchvision.models.get_model(arch, weights=None, num_classes=outputs, **more)
        network.load_state_dict({_OLD_NAME.sub(r"\1\2.", name): v for name, v in state.items()})
    except Exception as error:  # damaged files and pickles raise nearly anything
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"`--baseline` (=torchvision/{name}): {path} is no state dict of {arch}: {reason}"
        ) from error
    return Normalised(network).to(device).eval()


def how_tested(name: str, network: nn.Module) -> tuple[int, float]:
    """The size of the images that a baseline is tested with, and how much of each is seen.

    For weights of ImageNet as torchvision tests them; others are shown all of each image.

    >>> import torchvision
    >>> how_tested("resnet18=mine.pth", torchvision.models.resnet18(num_classes=1000))
    (224, 0.875)
    """
    import torchvision.models

    arch, _, weights = name.partition("=")
    known = torchvision.models.get_model_weights(arch)
    chosen = known[weights] if weights in known.__members__ else known.DEFAULT
    how = chosen.transforms()
    size, resized = how.crop_size[0], how.resize_size[0]
    outputs = len(list(network.parameters())[-1])  # the classifier is last
    return size, size / resized if outputs == IMAGENET else 1.0
