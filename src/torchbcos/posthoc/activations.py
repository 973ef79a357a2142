"""A module of its own for each use of an activation: captum hangs its rules on modules."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import fx, nn

from torchbcos.posthoc.colours import FromColours

__all__ = ["RESCALED", "separated"]

#: Modules that captum's DeepLIFT has rules for.
RESCALED = (
    nn.ReLU, nn.ELU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.MaxPool1d, nn.MaxPool2d,
    nn.MaxPool3d, nn.Softmax,
)  # fmt: skip

_POOL = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
#: The same as functions, with what they take beside the input.
_FUNCTIONS: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "relu": (nn.ReLU, ()),
    "elu": (nn.ELU, ("alpha",)),
    "leaky_relu": (nn.LeakyReLU, ("negative_slope",)),
    "sigmoid": (nn.Sigmoid, ()),
    "tanh": (nn.Tanh, ()),
    "softplus": (nn.Softplus, ("beta", "threshold")),
    "max_pool1d": (nn.MaxPool1d, _POOL),
    "max_pool2d": (nn.MaxPool2d, _POOL),
    "max_pool3d": (nn.MaxPool3d, _POOL),
    "softmax": (nn.Softmax, ("dim",)),
}


def separated(model: nn.Module) -> nn.Module:
    """The same network with a module for each use of an activation or max pool, none in place.

    Parameters stay those of `model`, unless it cannot be traced: then this is a copy as it is now.
    """
    if isinstance(model, FromColours):
        return FromColours(separated(model.network), model.temperature)
    try:
        return _traced(model)
    except Exception:  # tracing fails in as many ways as there are networks
        clone = copy.deepcopy(model)
        for module in clone.modules():
            if getattr(module, "inplace", False):
                module.inplace = False  # type: ignore[assignment]
        return clone


def _traced(model: nn.Module) -> nn.Module:
    if isinstance(model, fx.GraphModule):  # as converted networks are: no need to look into layers
        traced = fx.GraphModule(model, copy.deepcopy(model.graph))
    else:
        traced = fx.symbolic_trace(model)
    modules = dict(traced.named_modules())
    for i, node in enumerate(list(traced.graph.nodes)):
        found = modules[node.target] if node.op == "call_module" else _as_module(node)
        if isinstance(found, RESCALED):
            own = copy.deepcopy(found)
            if hasattr(own, "inplace"):
                own.inplace = False
            name = f"apart_{i}"
            traced.add_submodule(name, own)
            with traced.graph.inserting_after(node):
                fresh = traced.graph.call_module(name, (node.args[0],))
            node.replace_all_uses_with(fresh)
            traced.graph.erase_node(node)
    traced.recompile()
    return traced


def _as_module(node: fx.Node) -> nn.Module | None:
    """For a function or method that captum has a rule for as a module."""
    if node.op not in ("call_function", "call_method") or not node.args:
        return None
    name = str(getattr(node.target, "__name__", node.target))
    if node.op == "call_function" and not any(
        node.target is getattr(place, name, None) for place in (F, torch)
    ):
        return None
    kind, names = _FUNCTIONS.get(name.removesuffix("_"), (None, ()))
    if kind is None:
        return None
    given = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
    settings = {key: given.pop(key) for key in names if key in given}
    for ignored in ("inplace", "_stacklevel"):
        given.pop(ignored, None)
    if any(given.values()) or any(isinstance(value, fx.Node) for value in settings.values()):
        return None  # such as indices of a pool, or what another layer computes
    return kind(**settings)
