"""Conventional networks by name: ours, torchvision's classifiers and timm's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchbcos.networks import cifar9, cifar_resnet, mini

__all__ = ["OURS", "SIZES", "builder", "list_models"]

OURS: dict[str, Callable[..., nn.Module]] = {
    "cifar9": cifar9,
    "cifar_resnet": cifar_resnet,
    "mini": mini,
}
#: Pixels of the images that they are for; of others 224, or as found.
SIZES = {"cifar9": 32, "cifar_resnet": 32, "mini": 48}


def list_models() -> list[str]:
    """Names for `create_model`: ours and torchvision's; it takes `timm/NAME` and `v2/NAME`, too.

    >>> "densenet121" in list_models()
    True
    """
    import torchvision.models  # not above: that would double the time that `import torchbcos` takes

    return [*OURS, *torchvision.models.list_models(module=torchvision.models)]


def builder(name: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    """What makes the network of this name, with new weights."""
    build = _builder(name, options)

    def made() -> nn.Module:
        try:
            return build()
        except (TypeError, ValueError, RuntimeError) as error:
            wants_values = isinstance(error, RuntimeError) and torch.empty(0).is_meta
            own_words = str(error).startswith("`")
            if wants_values or own_words or isinstance(error, torch.OutOfMemoryError):
                raise
            given = ", ".join(f"{key}={value!r}" for key, value in options.items())
            words = f"`options` ({given}) must suit {name}: {error}."
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(words) from error

    return made


def _builder(name: str, options: dict[str, Any]) -> Callable[[], nn.Module]:
    for pretrained in ("weights", "pretrained"):
        if options.get(pretrained):
            raise ValueError(
                f"`{pretrained}` (={options[pretrained]!r}) must be left out: conventional weights "
                "are of no use to a B-cos network, which is trained anew."
            )
    if name in OURS:
        return lambda: OURS[name](**options)
    if name.startswith("timm/"):
        return lambda: _timm_model(name.removeprefix("timm/"), options)
    import torchvision.models

    if name not in list_models():
        import difflib

        close = difflib.get_close_matches(name, list_models(), 3) or ["cifar9", "resnet34"]
        raise ValueError(
            f"`name` (={name!r}) is no known model: did you mean {' or '.join(close)}? "
            "torchbcos.list_models() lists all; timm/NAME takes timm's."
        )
    if "in_channels" in options:
        rest = {key: value for key, value in options.items() if key != "in_channels"}
        build = _builder(name, rest)
        return lambda: _with_channels(build(), options["in_channels"])
    if name in ("inception_v3", "googlenet"):
        options = {"aux_logits": True, "init_weights": False, **options}
    if name in _DENSENETS and "growth_rate" in options:
        blocks, features = _DENSENETS[name]
        options = {"block_config": blocks, "num_init_features": features, **options}
        return lambda: torchvision.models.DenseNet(**options)
    return lambda: torchvision.models.get_model(name, weights=None, **options)


def _with_channels(network: nn.Module, channels: int) -> nn.Module:
    """The network with its first convolution for so many channels; outputs keep their variance."""
    first = next(m for m in network.modules() if isinstance(m, nn.Conv2d))
    kept = first.weight.detach()[:, torch.arange(channels) % first.in_channels]
    first.weight = nn.Parameter(kept * math.sqrt(first.in_channels / channels))
    first.in_channels = channels
    return network


#: (block_config, num_init_features); torchvision's own functions do not take another growth rate.
_DENSENETS = {
    "densenet121": ((6, 12, 24, 16), 64),
    "densenet161": ((6, 12, 36, 24), 96),
    "densenet169": ((6, 12, 32, 32), 64),
    "densenet201": ((6, 12, 48, 32), 64),
}


def _timm_model(name: str, options: dict[str, Any]) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise ValueError(
            f"`name` (='timm/{name}') needs the package timm: install it with pip install timm."
        ) from error
    if not timm.is_model(name):
        raise ValueError(f"`name` (='timm/{name}') is no model of timm {timm.__version__}.")
    named = {"in_chans" if key == "in_channels" else key: value for key, value in options.items()}
    model: nn.Module = timm.create_model(name, pretrained=False, **named)
    return model
