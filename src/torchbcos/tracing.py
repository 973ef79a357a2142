"""Explanations as a graph of plain operations, for programs that know no backward pass.

In explanation mode a network is linear in its input, and the backward pass that gives a row of W(x)
is made of the same few operations as the forward pass: here both become one torch.fx graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import get_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
    is_concrete_int,
)
from torch.fx.node import map_arg
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

__all__ = ["trace"]

aten = torch.ops.aten


def trace(function: Callable[..., Any], example: Sequence[Tensor]) -> GraphModule:
    """What `function` does with tensors like these, which may call torch.autograd.grad.

    The first dimension of all is the batch, of at least 2 here; its length is left open.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())

    def open_batch(t: Tensor) -> Tensor:
        sizes = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (t.dim() - 1)
        return mode.from_tensor(t, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    table: dict[Any, Callable[..., Any]] = {**get_decompositions(_TORCHS_OWN), **_BACKWARDS}
    inputs = [open_batch(t) for t in example]
    with mode, enable_python_dispatcher(), _MeansForPools(), sdpa_kernel(SDPBackend.MATH):
        traced = make_fx(function, decomposition_table=table, _allow_non_fake_inputs=True)
        graph = traced(*inputs)
    if any(is_concrete_int(t.shape[0]) for t in inputs):
        raise ValueError(
            "a graph cannot be made of this network: it computes with the length of the batch."
        )
    _fold(graph)
    return graph


class _MeansForPools(TorchFunctionMode):
    """In channels last torch takes a pool of all pixels as a mean with rewritten strides."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.adaptive_avg_pool2d and args[1:] in ((1,), ((1, 1),)):
            return args[0].mean((-2, -1), keepdim=True)
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def _fold(module: GraphModule) -> None:
    """Compute now what depends on the weights alone."""
    known: dict[Node, Tensor] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            known[node] = getattr(module, node.target)
        elif (
            isinstance(node.target, torch._ops.OpOverload)
            and not node.target._schema.is_mutable
            and node.all_input_nodes
            and all(n in known for n in node.all_input_nodes)
        ):
            args, kwargs = map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = node.target(*args, **kwargs)
    for node in list(module.graph.nodes):
        if node.op != "get_attr" and node in known and any(n not in known for n in node.users):
            name = f"folded_{node.name}"
            module.register_buffer(name, known[node].detach().clone())
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.get_attr(name))
    module.graph.eliminate_dead_code()
    module.recompile()


# Backward passes of linear operations, made of forward ones.


def _convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    _bias: Any,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    _output_padding: Any,
    groups: int,
    wanted: list[bool],
) -> tuple[Tensor, None, None]:
    assert wanted == [True, False, False], "weights are constants here"
    cut = [0] * len(stride)
    if not transposed:  # what the strides left over at the end
        cut = [
            x.shape[2 + i]
            - ((grad.shape[2 + i] - 1) * s - 2 * p + d * (weight.shape[2 + i] - 1) + 1)
            for i, (s, p, d) in enumerate(zip(stride, padding, dilation, strict=True))
        ]
    geometry = (stride, padding, dilation, not transposed, cut, groups)
    return aten.convolution(grad, weight, None, *geometry), None, None


def _avg_pool2d_backward(
    grad: Tensor,
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    _ceil: bool,
    count_padding: bool,
    divisor: int | None,
) -> Tensor:
    shares = []
    for size, count, k, step, pad in zip(
        x.shape[-2:], grad.shape[-2:], kernel, stride or kernel, padding, strict=True
    ):
        share = np.zeros((count, size), np.float32)
        for i in range(count):
            start, end = i * step - pad, min(i * step - pad + k, size + pad)
            first, last = max(start, 0), min(end, size)
            over = end - start if count_padding else last - first
            share[i, first:last] = 1.0 if divisor else 1 / over
        shares.append(share)
    return _spread(grad / divisor if divisor else grad, shares)


def _adaptive_avg_pool2d_backward(grad: Tensor, x: Tensor) -> Tensor:
    shares = []
    for size, count in zip(x.shape[-2:], grad.shape[-2:], strict=True):
        share = np.zeros((count, size), np.float32)
        for i in range(count):
            first, last = i * size // count, -(-(i + 1) * size // count)
            share[i, first:last] = 1 / (last - first)
        shares.append(share)
    return _spread(grad, shares)


def _replication_pad2d_backward(grad: Tensor, x: Tensor, padding: list[int]) -> Tensor:
    left, _, top, _ = padding
    shares = []
    for size, count, before in zip(x.shape[-2:], grad.shape[-2:], (top, left), strict=True):
        nearest = np.clip(np.arange(count) - before, 0, size - 1)
        shares.append(np.eye(size, dtype=np.float32)[nearest])
    return _spread(grad, shares)


def _spread(grad: Tensor, shares: Sequence[np.ndarray]) -> Tensor:
    """The transpose of a map along rows and columns; shares[d][i, j]: of pixel j in output i."""
    rows, columns = map(torch.from_numpy, shares)
    return rows.t() @ grad @ columns


_TORCHS_OWN = (
    aten.max_pool2d_with_indices_backward,
    aten.reflection_pad2d_backward,
    aten.select_backward,
    aten.slice_backward,
)
_BACKWARDS: dict[Any, Callable[..., Any]] = {
    aten.convolution_backward.default: _convolution_backward,
    aten.avg_pool2d_backward.default: _avg_pool2d_backward,
    aten._adaptive_avg_pool2d_backward.default: _adaptive_avg_pool2d_backward,
    aten.replication_pad2d_backward.default: _replication_pad2d_backward,
}
