"""What turns the weights: the optimiser, its rate, and how far it may turn them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from torchbcos.layers import BcosLayer
from torchbcos.models import BcosModel
from torchbcos.training_config import TrainConfig

__all__ = ["clip_adaptively", "make_optimiser", "set_rate", "set_weight_rms"]


def make_optimiser(c: TrainConfig, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    cuda = device.type == "cuda"
    scaled = c.precision == "16-mixed" and c.clip > 0  # clipped when unscaled; fused ones do that
    fused = True if cuda and not scaled else None
    common: dict[str, Any] = {"weight_decay": c.weight_decay, "fused": fused}
    if c.optimiser == "sgd":
        nesterov = c.momentum > 0
        return torch.optim.SGD(parameters, c.lr, momentum=c.momentum, nesterov=nesterov, **common)
    kind = torch.optim.Adam if c.optimiser == "adam" else torch.optim.AdamW
    rate = torch.tensor(c.lr, device=device) if cuda else c.lr  # a captured graph reads a tensor
    return kind(parameters, rate, capturable=cuda, **common)


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def set_weight_rms(model: BcosModel, rms: float, within: str = "") -> None:
    """Lengthen the weights of B-cos layers to this root mean square; of those below the module
    `within` alone, if it is named.

    Only their directions matter for what a layer computes, so this decides how fast they turn: a
    step of Adam moves each entry by about lr, that is a weight by an angle of about lr / rms. The
    cosines of a new layer with d inputs are about 1 / √d. Where a step changes them by as much, in
    every layer of a deep network without norms, its logits grow without bound.
    """
    if not isinstance(model, BcosModel):
        raise TypeError(
            f"`model` (a {type(model).__name__}) must be a B-cos model, of create_model or convert."
        )
    if not 0 < rms < math.inf:
        raise ValueError(
            f"`rms` (={rms}) must be a number above 0: 0.3 suits deep networks without norms; the "
            "weights that layers begin with need no call."
        )
    layers = dict(model.bcos_layers())
    chosen = [
        layer for name, layer in layers.items() if not within or f"{name}.".startswith(f"{within}.")
    ]
    if layers and not chosen:
        raise ValueError(
            f"`weight_rms_in` (={within!r}) must be a module with B-cos layers, such as "
            f"{next(reversed(layers))!r}."
        )
    with torch.no_grad():
        for layer in chosen:
            layer.weight.mul_(rms / layer.weight.square().mean().sqrt().clamp(min=1e-30))


def clip_adaptively(model: nn.Module, limit: float | Tensor) -> None:
    """Shrink the gradient of each weight row to at most `limit` times the row's norm."""
    for layer in model.modules():
        if isinstance(layer, BcosLayer) and layer.weight.grad is not None:
            dims = list(range(1, layer.weight.dim()))
            weight = torch.linalg.vector_norm(layer.weight.detach(), dim=dims, keepdim=True)
            grad = torch.linalg.vector_norm(layer.weight.grad, dim=dims, keepdim=True)
            layer.weight.grad.mul_((limit * weight / grad.clamp(min=1e-12)).clamp(max=1))
