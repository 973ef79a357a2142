"""The way for networks whose code cannot be traced: replace modules, then check the result."""

from __future__ import annotations

import copy
import math
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchbcos.convert.report import Change, Report
from torchbcos.convert.rewriter import Options, share_weight
from torchbcos.convert.rules import ACTIVATIONS, DROPOUTS, NORM_NAMES, NORMS
from torchbcos.convert.tracers import class_key, empty_image
from torchbcos.convert.twins import (
    attention_twin,
    average_pool,
    bcos_convolution,
    bcos_linear,
    bcos_upsampling,
    uncentred_norm,
)
from torchbcos.encoding import encode
from torchbcos.functional import collect_offsets
from torchbcos.layers import BcosLayer

__all__ = ["TOLERANCE", "check_weights", "completeness_error", "replace_modules"]

TOLERANCE = 1e-9  # of the output's scale, in float64


def replace_modules(
    module: nn.Module, options: Options, channels: int, size: tuple[int, int]
) -> tuple[nn.Module, Report, int | None]:
    """The B-cos twin of each submodule put in its place; functions in the code stay as they are.

    Also how many logits there are, where the output is [N, K].
    """
    check_weights(module)
    network = copy.deepcopy(module)
    changes: list[Change] = []
    widen = 2  # the first layer sees the encoded image
    twins: dict[nn.Module, nn.Module | None] = {}
    weights: dict[Tensor, Tensor] = {}
    whole: tuple[str, ...] = ()  # modules replaced with all that is in them
    for name, old in list(network.named_modules(remove_duplicate=False)):
        if name.startswith(whole):
            continue
        if old not in twins:
            twins[old] = _twin(old, widen, options)
        new = twins[old]
        if new is None or not name:
            continue
        if old._forward_hooks or old._forward_pre_hooks:
            raise ValueError(f"{name} has a hook, which its twin would not have: remove it")
        if isinstance(old, nn.modules.conv._ConvNd | nn.Linear):
            widen = 1
        if isinstance(new, BcosLayer):
            share_weight(weights, old, new)
        whole = (*whole, f"{name}.")
        parent, _, child = name.rpartition(".")
        setattr(network.get_submodule(parent), child, new)
        became = "removed" if isinstance(new, nn.Identity | nn.Dropout) else type(new).__name__
        changes.append(Change(name, type(old).__name__, became))
    error, outputs = _measured(network, channels, size)
    before = _outputs_of(module, channels, size)
    if None not in (before, outputs) and before != outputs:
        raise ValueError(
            f"it would give {outputs} outputs in place of {before}, as where its code uses the "
            "weight of a layer by itself: give the code a parameter of its own"
        )
    breaks: tuple[str, ...] = ()
    if not error <= TOLERANCE:
        breaks = (f"something in its code: W(x)·x + bias misses the output by {error:.1e}",)
    note = f"Modules replaced without tracing; completeness measured: {error:.1e} of the output."
    report = Report(type(module).__name__, tuple(changes), breaks, note)
    return network, report, outputs


@torch.no_grad()
def _outputs_of(module: nn.Module, channels: int, size: tuple[int, int]) -> int | None:
    """How many logits the conventional network gives; None for what is not [N, K]."""
    network = copy.deepcopy(module).eval()
    out = network(torch.ones_like(empty_image(network, (2, channels, *size))))
    out = out if isinstance(out, Tensor) else out[0]
    return out.shape[1] if out.dim() == 2 else None


def _twin(old: nn.Module, widen: int, options: Options) -> nn.Module | None:
    key = class_key(old)
    if widen > 1 and isinstance(old, nn.modules.conv._ConvNd) and old.groups > 1:
        raise ValueError("its first convolution has groups, which would part r from 1 - r")
    attention = attention_twin(old, options.b, options.max_out, bool(options.norm))
    if attention is not None:
        return attention
    if isinstance(old, nn.modules.conv._ConvTransposeNd):
        return bcos_upsampling(old, widen, options.b, options.max_out)
    if isinstance(old, nn.modules.conv._ConvNd):
        return bcos_convolution(old, widen, options.b, options.max_out)
    if isinstance(old, nn.Linear):
        return bcos_linear(old, widen, options.b, options.max_out)
    if isinstance(old, NORMS) or key in NORM_NAMES:
        return (uncentred_norm(old) if options.norm else None) or nn.Identity()
    if isinstance(old, nn.modules.dropout._DropoutNd):
        return nn.Dropout(0.0)  # the network's code may ask for its `p`
    if key in ACTIVATIONS | DROPOUTS:
        return nn.Identity()
    if isinstance(old, nn.modules.pooling._MaxPoolNd | nn.modules.pooling._AdaptiveMaxPoolNd):
        return average_pool(old)
    return None


def _set_scales(network: nn.Module, x: Tensor) -> None:
    """Give every B-cos layer an output of root mean square 1: a faded signal would hide errors."""

    def settle(layer: nn.Module, _: Any, out: Tensor) -> Tensor:
        gain = 1 / out.square().mean().sqrt().clamp(min=torch.finfo(out.dtype).tiny).item()
        layer.scale = float(layer.scale) * gain  # type: ignore[arg-type, assignment]
        return out * gain

    with torch.no_grad(), ExitStack() as hooks:
        for module in network.modules():
            if isinstance(module, BcosLayer):
                hooks.enter_context(module.register_forward_hook(settle))
        network(x)


def check_weights(module: nn.Module) -> None:
    if any(p.is_meta for p in module.parameters()):
        raise RuntimeError(
            f"`module` (a {type(module).__name__}) is on the meta device and must be checked by "
            "numbers: give it weights first, as by to_empty(device=…)."
        )


def completeness_error(network: nn.Module, channels: int, size: tuple[int, int]) -> float:
    """By how much W(x)·x + bias misses the outputs of random images, in float64, relatively.

    Each of three images is to have its own, so that none is missed that mixes them. Parameters
    other than B-cos weights are drawn anew: many begin at 0, where they hide what they do.
    """
    return _measured(network, channels, size)[0]


def _measured(network: nn.Module, channels: int, size: tuple[int, int]) -> tuple[float, int | None]:
    network = copy.deepcopy(network).double().eval()
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.rand, generator=generator, dtype=torch.float64, device="cpu")
    where = next((p.device for p in network.parameters()), torch.device("cpu"))
    own = {p for m in network.modules() if isinstance(m, BcosLayer) for p in m.parameters()}
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter not in own:
                parameter.copy_(2 * draw(parameter.shape) - 1)
    x = encode(draw(3, channels, *size).to(where)).requires_grad_()
    _set_scales(network, x)
    with torch.enable_grad(), collect_offsets() as offsets:
        out = network(x)
        out = out if isinstance(out, Tensor) else out[0]
        outputs = out.shape[1] if out.dim() == 2 else None
        out = out.flatten(1)
        mixed = out * (2 * draw(out.shape) - 1).to(where)
        parts = [x, *offsets]
        grads = torch.autograd.grad(mixed.sum(), parts, allow_unused=True)
    if any(len(v) % 3 for v in parts):
        return math.inf, outputs  # an offset that cannot be told apart by image
    linear = sum(
        (g * v).reshape(3, -1).sum(1) for g, v in zip(grads, parts, strict=True) if g is not None
    )
    scale = mixed.abs().sum(1).clamp(min=torch.finfo(out.dtype).tiny)
    return float(((mixed.sum(1) - linear).abs() / scale).max().detach()), outputs
