"""A model as the methods see it: what goes into its network, and the logits that come out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchbcos.baseline import Normalised, to_explain
from torchbcos.explain import logits_of, network_input
from torchbcos.models import BcosModel
from torchbcos.targets import Targets, check_indices, resolve_targets, targets_of_chunk
from torchbcos.wrappers import unwrapped

__all__ = ["Subject", "input_of", "network_of", "probabilities"]

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def network_of(model: nn.Module) -> nn.Module:
    """The network inside a model: after the encoding, or after the normalisation."""
    model = to_explain(model)
    return model.network if isinstance(model, BcosModel | Normalised) else model


def input_of(model: nn.Module, images: Tensor) -> Tensor:
    """What goes into the network: images encoded, normalised, or as they are."""
    model = to_explain(model)
    return (
        model.normalise(images) if isinstance(model, Normalised) else network_input(model, images)
    )


@dataclass(frozen=True)
class Subject:
    """A model with the inputs and targets that are to be explained.

    For a B-cos model the input is the encoded image, twice as many channels: a baseline of zeros is
    then the absence of any signal, not black. For a `Normalised` network the input is the
    normalised image, and zeros are the mean colour.
    """

    model: nn.Module
    x: Tensor  # [N, C, H, W]
    targets: Tensor  # [N, K]
    extremes: tuple[int, int] | None = None  # the lowest and highest of targets not yet checked

    @classmethod
    @torch.inference_mode(False)
    @torch.no_grad()
    def of(cls, model: nn.Module, images: Tensor, targets: Targets) -> Subject:
        classes = getattr(unwrapped(model), "classes", None)
        model = to_explain(model)
        if not isinstance(images, Tensor) or images.dim() != 4:
            shape = tuple(getattr(images, "shape", ()))
            raise ValueError(f"`images` (shape {shape}) must be a tensor [N, C, H, W].")
        x = input_of(model, images)
        given = targets_of_chunk(targets, 0, len(images), len(images))
        if isinstance(given, Tensor) and given.dim() > 0 and given.dtype in _INTEGERS:
            # No forward pass, and with targets from the CPU no waiting for the device.
            extremes = int(given.min()), int(given.max())
            return cls(model, x, given.to(x.device, torch.long).view(len(x), -1), extremes)
        logits = cls(model, x, x.new_empty(0)).logits(x)
        return cls(model, x, resolve_targets(given, logits, classes))

    def logits(self, x: Tensor) -> Tensor:
        """All logits of other inputs in place of `x`."""
        if isinstance(self.model, Normalised):
            logits = self.model.from_normalised(x)
        else:
            logits = logits_of(self.model, x)
        if self.extremes:
            check_indices(*self.extremes, tuple(self.targets.shape), logits.shape[1])
        return logits

    def outputs(self, x: Tensor) -> Tensor:
        """The targets' logits [N, K]."""
        return self.logits(x).gather(1, self.targets)


def probabilities(model: nn.Module, logits: Tensor) -> Tensor:
    """Of each class: our models learn them one by one, other classifiers against each other."""
    model = to_explain(model)
    if isinstance(model, Normalised):
        one_by_one = model.logit_bias is not None
    else:
        one_by_one = isinstance(model, BcosModel)
    return logits.sigmoid() if one_by_one else logits.softmax(-1)
