"""The paper's hand-tuned γ, T and logit bias (supplement C)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Scales", "paper_preset"]


@dataclass(frozen=True)
class Scales:
    gamma: dict[str, float]  # for each layer
    temperature: float
    logit_bias: float


#: CIFAR-10: log10 T for each B.
_CIFAR_LOG_T = {1.0: -3, 1.25: -3, 1.5: -2, 1.75: 1, 2.0: 2, 2.25: 2, 2.5: 3}
#: ImageNet: s, where γ = s/√d, and log10 T.
_IMAGENET = {
    "densenet121": (100, -3),
    "resnet34": (100, 1),
    "inception_v3": (200, 0),
    "vgg11": (1000, -1),
}


def paper_preset(name: str, fan_in: Mapping[str, int], b: float) -> Scales:
    """The constants for the architecture `name`, whose layers see `fan_in` inputs each."""
    if name == "cifar9":
        if b not in _CIFAR_LOG_T:
            known = ", ".join(f"{value:g}" for value in _CIFAR_LOG_T)
            raise ValueError(
                f"`preset` (='paper') has no temperature for `b` (={b:g}): use one of {known}, or "
                "torchbcos.calibrate."
            )
        gamma = 10 ** (1.5 * b - 1.75)
        return Scales(dict.fromkeys(fan_in, gamma), 10.0 ** _CIFAR_LOG_T[b], math.log(0.1 / 0.9))
    if name not in _IMAGENET:
        raise ValueError(
            f"`preset` (='paper') exists for cifar9, {', '.join(sorted(_IMAGENET))}, not for "
            f"{name or 'a converted module'}: use torchbcos.calibrate."
        )
    s, log_t = _IMAGENET[name]
    gammas = {layer: s / math.sqrt(d) for layer, d in fan_in.items()}
    return Scales(gammas, 10.0**log_t, math.log(0.01 / 0.99))
