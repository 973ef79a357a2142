"""Which dimension of a layer's output holds its channels: [N, C, H, W], [N, H, W, C], [N, L, C].

Some layers know: a convolution's units are in dimension 1, a linear layer's in the last. In the
graph of a converted network this is followed from there through sums, gates and rearrangements. A
network that is no graph is watched while it runs; what its own code rearranges stays hidden, so
that an answer is given only where all its layers agree.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchbcos import attention, norms
from torchbcos.convert.rewriter import name_of
from torchbcos.convert.tracers import class_key
from torchbcos.functional import explanation_mode
from torchbcos.layers import BcosConv1d, BcosConv2d, BcosConv3d, BcosLinear
from torchbcos.tap import UpTo, is_in_graph, name_within, node_of, one_tensor, tap

__all__ = ["channel_axes", "channel_axis", "tap_with_axis"]

_SECOND = (
    BcosConv1d,
    BcosConv2d,
    BcosConv3d,
    norms.UncentredPositionNorm,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
)
_LAST = (
    BcosLinear,
    attention.BcosMultiheadAttention,
    attention.BcosShiftedWindowAttention,
    attention.BcosTransformerEncoder,
    attention.BcosTransformerEncoderLayer,
    nn.Linear,
    nn.LayerNorm,
    nn.RMSNorm,
)
_MOVES = frozenset("permute transpose swapaxes swapdims movedim moveaxis t adjoint".split())
_RESHAPES = frozenset("view reshape flatten unflatten squeeze unsqueeze".split())

Axes = frozenset[int]
UNKNOWN: Axes = frozenset()


def tap_with_axis(network: nn.Module, layer: str, x: Tensor) -> tuple[Tensor, int | None]:
    """As `tap`, and which dimension of it is that of the channels; None where it is not known."""
    if isinstance(network, fx.GraphModule) and is_in_graph(network, layer):
        node = node_of(network, layer)
        run = _Following(network, {node: layer})
        return run.run(x), run.axis(node)
    out, axis = _watched(network, layer, x)
    if out.dim() == 2:
        axis = 1
    return out, axis or None  # 0 is where the images should be


def channel_axis(network: nn.Module, layer: str, x: Tensor) -> int | None:
    """Of the output of `layer` for inputs as `x`."""
    return channel_axes(network, [layer], x)[layer]


def channel_axes(network: nn.Module, layers: Iterable[str], x: Tensor) -> dict[str, int | None]:
    """Of the output of each of `layers`; for all that are in its graph a network runs once."""
    modules = dict(network.named_modules())
    found: dict[str, int | None] = {}
    nodes: dict[str, fx.Node] = {}
    with torch.no_grad(), explanation_mode():
        for layer in layers:
            if isinstance(modules.get(name_within(network, layer)), _SECOND):
                found[layer] = 1  # known without running it
            elif isinstance(network, fx.GraphModule) and is_in_graph(network, layer):
                nodes[layer] = node_of(network, layer)
            else:
                found[layer] = tap_with_axis(network, layer, x[:1].detach())[1]
        if isinstance(network, fx.GraphModule) and nodes:
            run = _Following(network, {node: layer for layer, node in nodes.items()})
            run.run(x[:1].detach())
            found.update({layer: run.axis(node) for layer, node in nodes.items()})
    return found


def _of_layer(module: nn.Module) -> int | None:
    """1 or, for the last, -1; None for a module that does not tell."""
    return 1 if isinstance(module, _SECOND) else -1 if isinstance(module, _LAST) else None


def _watched(network: nn.Module, layer: str, x: Tensor) -> tuple[Tensor, int | None]:
    """Of the layer itself or, if it does not tell, what all others say that run before."""
    said: dict[int, set[int]] = {}  # by the number of dimensions
    thread = threading.get_ident()

    def listen(axis: int, out: Any) -> None:
        if isinstance(out, Tensor) and threading.get_ident() == thread:
            said.setdefault(out.dim(), set()).add(axis % out.dim())

    with ExitStack() as hooks:
        for module in network.modules():
            axis = _of_layer(module)
            if axis is not None:
                hook = module.register_forward_hook(lambda _, __, out, axis=axis: listen(axis, out))
                hooks.enter_context(hook)
        out = tap(network, layer, x)
    own = _of_layer(network.get_submodule(name_within(network, layer)))
    found = said.get(out.dim(), set()) if own is None else {own % out.dim()}
    return out, found.pop() if len(found) == 1 else None


class _Following(UpTo):
    """Runs a graph and notes for each of its tensors in which dimensions the channels are.

    They are several where channels were taken apart, into heads or groups. It runs as far as the
    last of `layers`, which are to return one tensor each.
    """

    def __init__(self, network: fx.GraphModule, layers: Mapping[fx.Node, str]) -> None:
        super().__init__(network, max(layers))  # nodes are ordered as they run
        self._layers = layers
        self._axes: dict[fx.Node, Axes] = {}
        self._shapes: dict[fx.Node, torch.Size] = {}

    def axis(self, node: fx.Node) -> int | None:
        shape = self._shapes[node]
        if len(shape) == 2:
            return 1
        axes = [axis for axis in self._axes[node] if shape[axis] > 1] or self._axes[node]
        found = next(iter(axes)) if len(axes) == 1 else None
        return found or None  # 0 is where the images should be

    def run_node(self, n: fx.Node) -> Any:
        out = super().run_node(n)
        if n in self._layers:
            one_tensor(out, self._layers[n])
        first = out[0] if isinstance(out, tuple | list) and out else out
        self._shapes[n] = first.shape if isinstance(first, Tensor) else torch.Size()
        self._axes[n] = self._found(n, len(self._shapes[n])) if self._shapes[n] else UNKNOWN
        return out

    def _found(self, node: fx.Node, dims: int) -> Axes:
        if node.op in ("placeholder", "get_attr"):
            return frozenset({1}) if node.op == "placeholder" else UNKNOWN
        name = name_of(node)
        known = _FUNCTIONS.get(name)
        if node.op == "call_module":
            module = self.module.get_submodule(str(node.target))
            name, known = class_key(module), _of_layer(module)
            if isinstance(module, nn.Sequential):  # a convolution that upsamples
                known = _of_layer(module[0])
        if known is not None:
            return frozenset({known % dims})
        found = {self._after(node, name, source) for source in node.all_input_nodes} - {UNKNOWN}
        return found.pop() if len(found) == 1 else UNKNOWN

    def _after(self, node: fx.Node, name: str, source: fx.Node) -> Axes:
        """Where an operation leaves the channels of something that it is given."""
        axes, before, after = self._axes[source], self._shapes[source], self._shapes[node]
        if not axes:
            return UNKNOWN
        transposed = name == "getattr" and node.args[1] in ("T", "mT", "H", "mH")
        if name in _MOVES or transposed:
            sizes = self._moved(node, len(before))
            return frozenset(sizes.index(2 + axis) for axis in axes)
        if name in _RESHAPES:
            return _reshaped(before, after, axes)
        return axes if name != "einsum" and len(before) == len(after) else UNKNOWN

    def _moved(self, node: fx.Node, dims: int) -> list[int]:
        """The sizes of what the operation makes of a tensor of the sizes 2, 3, 4, …"""
        probe = torch.empty([2 + i for i in range(dims)], device="meta")
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        args = tuple(probe if isinstance(a, Tensor) else a for a in args)
        kwargs = {k: probe if isinstance(a, Tensor) else a for k, a in kwargs.items()}
        out: Tensor = getattr(self, node.op)(node.target, args, kwargs)
        return list(out.shape)


_FUNCTIONS = {
    **dict.fromkeys("conv1d conv2d conv3d bcosconv1d bcosconv2d bcosconv3d".split(), 1),
    **dict.fromkeys(["linear", "bcoslinear"], -1),
}


def _reshaped(before: torch.Size, after: torch.Size, axes: Axes) -> Axes:
    """Dimensions that become others among themselves; unknown if channels mix with the rest."""
    found: set[int] = set()
    i = j = 0
    while i < len(before) and j < len(after):
        start, new, here, there = i, j, before[i], after[j]
        i, j = i + 1, j + 1
        while here != there:
            if here < there:
                here, i = here * before[i], i + 1
            else:
                there, j = there * after[j], j + 1
        old = {d for d in range(start, i) if before[d] > 1}
        if old & axes:
            if not old <= axes:
                return UNKNOWN
            found.update(range(new, j))
    return frozenset(found)
