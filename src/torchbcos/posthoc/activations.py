"""A module of its own for each use of an activation: captum hangs its rules on modules."""

from __future__ import annotations

import copy
import weakref

import torch
import torch.nn.functional as F
from torch import fx, nn

__all__ = ["RESCALED", "separated"]

#: Modules that captum's DeepLIFT has rules for.
RESCALED = (
    nn.ReLU, nn.ELU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.MaxPool1d, nn.MaxPool2d,
    nn.MaxPool3d, nn.Softmax,
)  # fmt: skip

_known: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()


def separated(model: nn.Module) -> nn.Module:
    """The same network with a module for each use of an activation or max pool, none in place.

    Parameters stay those of `model`, unless it cannot be traced: then this is a copy as it is now.
    """
    if model not in _known:
        try:
            _known[model] = _traced(model)
        except Exception:  # tracing fails in as many ways as there are networks
            clone = copy.deepcopy(model)  # and not remembered
            for module in clone.modules():
                if getattr(module, "inplace", False):
                    module.inplace = False  # type: ignore[assignment]
            return clone
    return _known[model]


#: Activations called as functions or methods, and the modules that do the same.
_FUNCTIONS: dict[object, type[nn.Module]] = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"), nn.ReLU),
    **dict.fromkeys((F.sigmoid, torch.sigmoid, "sigmoid", "sigmoid_"), nn.Sigmoid),
    **dict.fromkeys((F.tanh, torch.tanh, "tanh", "tanh_"), nn.Tanh),
}


def _traced(model: nn.Module) -> nn.Module:
    if isinstance(model, fx.GraphModule):  # as converted networks are: no need to look into layers
        traced = fx.GraphModule(model, copy.deepcopy(model.graph))
    else:
        traced = fx.symbolic_trace(model)
    modules = dict(traced.named_modules())
    for i, node in enumerate(list(traced.graph.nodes)):
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if node.op in ("call_function", "call_method") and node.target in _FUNCTIONS:
            module = _FUNCTIONS[node.target]()
        if isinstance(module, RESCALED):
            own = copy.deepcopy(module)
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
