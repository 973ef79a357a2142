"""B-cos models for methods that derive by colours, as the authors' first program has it."""

from __future__ import annotations

from torch import Tensor, nn

from torchbcos.baseline import Normalised, to_explain
from torchbcos.encoding import encode
from torchbcos.explain import logits_of
from torchbcos.models import BcosModel

__all__ = ["FromColours", "by_colours"]


class FromColours(nn.Module):
    """A B-cos model's network with the encoding before it and the temperature behind."""

    def __init__(self, network: nn.Module, temperature: float) -> None:
        super().__init__()
        self.network = network
        self.temperature = temperature

    def forward(self, images: Tensor) -> Tensor:
        images = images.to(next(self.parameters()).dtype)
        return logits_of(self.network, encode(images)) / self.temperature


def by_colours(model: nn.Module) -> nn.Module:
    """The model whose input, for every method, is the image and not its encoding.

    So a pair (r, 1 - r) has one derivative, by r, and zeros are black. Models that are not B-cos
    are as they were.

    >>> import torch, torchbcos as tb
    >>> from torchbcos import posthoc
    >>> model, images = tb.load("cifar10"), torch.rand(1, 3, 32, 32)
    >>> logits = model(images)
    >>> seen = posthoc.by_colours(model)
    >>> torch.allclose(seen(images), logits, rtol=1e-4), posthoc.grad(seen, images).shape
    (True, torch.Size([1, 1, 32, 32]))
    """
    inner = to_explain(model)
    if not isinstance(inner, BcosModel):
        return inner
    network = FromColours(inner.network, inner.temperature)
    seen = Normalised(network, (0.0,), (1.0,), logit_bias=inner.logit_bias)
    seen.training = network.training = inner.training
    return seen.to(next(inner.parameters()).device)
