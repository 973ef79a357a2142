"""The classifier: from `pool → flatten → linear` to `1×1 convolutions → pool → flatten`.

Applied after the rule table. With the classifier before the pool every position votes for a class,
which is what the paper's authors trained, and the result takes images of any size.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from torchbcos import norms
from torchbcos.convert.rewriter import name_of
from torchbcos.convert.trace import submodule
from torchbcos.convert.tracers import class_key, same_way, sources
from torchbcos.convert.twins import device_and_dtype
from torchbcos.layers import BcosConv2d, BcosLinear

__all__ = ["move_heads"]

_SHAPE_OPERATIONS = {"flatten", "view", "reshape", "squeeze", "contiguous", "identity"}


def move_heads(gm: fx.GraphModule) -> set[str]:
    """Rewrite the chain before each output, where it is one; the names of the layers moved."""
    output = gm.graph.output_node()
    ends = output.args[0] if isinstance(output.args[0], tuple | list) else [output.args[0]]
    moved = {name for end in ends if isinstance(end, fx.Node) for name in _move(gm, end)}
    if moved:
        gm.graph.eliminate_dead_code()
        gm.delete_all_unused_submodules()
        gm.recompile()
    return moved


def _move(gm: fx.GraphModule, end: fx.Node) -> set[str]:
    chain = _chain(gm, end)
    if chain is None:
        return set()
    x, window, layers = chain
    if _are_used_elsewhere(gm, layers):
        return set()
    with gm.graph.inserting_before(end.next):
        for node in layers:
            name, old = str(node.target), submodule(gm, node)
            gm.add_submodule(name, _on_map(old, window))
            x = _copy_meta(gm.graph.call_module(name, (x,)), node)
            if isinstance(old, BcosLinear):
                window = (1, 1)
        x = gm.graph.call_function(F.adaptive_avg_pool2d, (x, 1))
        x = _copy_meta(gm.graph.call_function(torch.flatten, (x, 1)), end)
    end.replace_all_uses_with(x)
    for node in gm.graph.find_nodes(op="call_function", target=same_way):
        if not sources(node).isdisjoint(layers):  # of a vector, whose size no image changes
            gm.graph.erase_node(node)
    return {str(node.target) for node in layers}


def _are_used_elsewhere(gm: fx.GraphModule, layers: list[fx.Node]) -> bool:
    """Whether something outside of the chain calls one of its layers or has one of its weights."""
    names = {node.target for node in layers}
    weights = {weight for node in layers for weight in _weights(gm, node)}
    return any(
        (n.op == "call_module" and n.target in names) or not weights.isdisjoint(_weights(gm, n))
        for n in gm.graph.nodes
        if n not in layers
    )


def _weights(gm: fx.GraphModule, node: fx.Node) -> Iterable[Tensor]:
    if node.op == "get_attr":
        return [attrgetter(str(node.target))(gm)]
    return submodule(gm, node).parameters() if node.op == "call_module" else ()


def _copy_meta(new: fx.Node, old: fx.Node) -> fx.Node:
    new.meta = dict(old.meta)
    return new


def _chain(
    gm: fx.GraphModule, end: fx.Node
) -> tuple[fx.Node, tuple[int, int], list[fx.Node]] | None:
    """(the map before the pool, the window one linear layer sees of it, the layers in order)."""
    layers: list[fx.Node] = []
    node = end
    while _is_used_once(node) and len(node.all_input_nodes) >= 1:
        source = node.all_input_nodes[0]
        kind, module = _kind(gm, node)
        shape, before = node.meta.get("shape", ()), source.meta.get("shape", ())
        if isinstance(module, BcosLinear) or _works_on_maps(module, before):
            layers.insert(0, node)
        elif kind in _SHAPE_OPERATIONS:
            if len(before) == 4 and len(shape) == 2 and before[2:] != (1, 1):
                if shape[0] != before[0] or not _channels_come_second(gm, source):
                    return None
                pooled = _kind(gm, source)[0] == "adaptiveavgpool2d" and _is_used_once(source)
                origin = source.all_input_nodes[0] if pooled else source
                if origin.op == "placeholder":  # the image itself: this is the first layer
                    return None
                return _found(origin, before[2:], layers, gm)
        elif len(before) == 4 and shape[2:] in ((), (1, 1)) and _is_global_pool(kind, node):
            return _found(source, (1, 1), layers, gm)
        else:
            return None
        node = source
    return None


def _is_used_once(node: fx.Node) -> bool:
    """But for questions about its shape."""
    return sum(name_of(user) not in ("size", "getattr", "dim") for user in node.users) == 1


def _channels_come_second(gm: fx.GraphModule, node: fx.Node) -> bool:
    """Whether a map is [N, C, H, W], as convolutions make it, and not rearranged since."""
    while node.op not in ("placeholder", "get_attr"):
        kind, module = _kind(gm, node)
        if kind in _REARRANGEMENTS or isinstance(module, BcosLinear | norms.UncentredLayerNorm):
            return False
        if isinstance(module, BcosConv2d):
            return True
        node = node.all_input_nodes[0]
    return True


_REARRANGEMENTS = {"permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims"}


def _is_global_pool(kind: str, node: fx.Node) -> bool:
    if kind == "mean":
        dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
        return isinstance(dims, list | tuple) and sorted(int(d) % 4 for d in dims) == [2, 3]
    return kind in ("adaptiveavgpool2d", "avgpool2d")


def _found(
    source: fx.Node, window: Any, layers: list[fx.Node], gm: fx.GraphModule
) -> tuple[fx.Node, tuple[int, int], list[fx.Node]] | None:
    if not any(isinstance(submodule(gm, n), BcosLinear | BcosConv2d) for n in layers):
        return None
    if window != (1, 1) and not isinstance(submodule(gm, layers[0]), BcosLinear):
        return None  # a norm over a flattened map has no counterpart on the map
    return source, window, layers


def _kind(gm: fx.GraphModule, node: fx.Node) -> tuple[str, nn.Module | None]:
    if node.op == "call_module":
        module = submodule(gm, node)
        return class_key(module), module
    return (name_of(node) if node.op.startswith("call") else node.op), None


def _works_on_maps(module: nn.Module | None, shape: tuple[int, ...]) -> bool:
    """Whether the layer treats each position alike, and so may stand before the pool as well."""
    if isinstance(module, BcosConv2d):
        return module.kernel_size == (1, 1) and module.stride == (1, 1) and shape[2:] == (1, 1)
    return isinstance(
        module,
        norms.UncentredPositionNorm
        | norms.UncentredLayerNorm
        | norms.UncentredBatchNorm1d
        | norms.UncentredBatchNorm2d,
    )


def _on_map(layer: nn.Module, window: tuple[int, int]) -> nn.Module:
    """The layer of one vector as a layer of a map of vectors."""
    if isinstance(layer, BcosLinear):
        return BcosConv2d(
            layer.in_features // (window[0] * window[1]),
            layer.out_features,
            window,
            padding=(window[0] // 2, window[1] // 2),
            device=layer.weight.device,
            dtype=layer.weight.dtype,
            b=layer.b,
            max_out=layer.max_out,
            scale=layer.scale,
        )
    if isinstance(layer, norms.UncentredLayerNorm):
        channels, affine = layer.normalized_shape[0], layer.elementwise_affine
        own = device_and_dtype(layer)
        return norms.UncentredPositionNorm(channels, layer.eps, affine, bias=False, **own)
    if isinstance(layer, norms.UncentredBatchNorm1d):
        how = (layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
        own = device_and_dtype(layer)
        return norms.UncentredBatchNorm2d(layer.num_features, *how, bias=False, **own)
    return layer
