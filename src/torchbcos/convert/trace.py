"""From a torch module to its graph of operations, with the shape of every value."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

__all__ = [
    "BATCH",
    "LEAVES",
    "ShapeError",
    "TraceError",
    "as_pair",
    "class_key",
    "first_channels",
    "shapes",
    "trace",
]

#: Images in the batch that shapes are computed for: a number that no other dimension has.
BATCH = 31
#: Modules kept whole, subclasses too: a library's own convolution is still a convolution.
LEAVES = (
    nn.modules.conv._ConvNd,
    nn.Linear,
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.modules.dropout._DropoutNd,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerEncoder,
)
_COMMON_SIZES = (224, 299, 256, 32, 64, 28, 96, 128, 160, 192, 240, 288, 320, 384)


class TraceError(Exception):
    """The module's Python code cannot be followed symbolically."""


def class_key(module: nn.Module) -> str:
    """The class name as the rule table spells it: lower case, no underscores."""
    return type(module).__name__.lower().replace("_", "")


class _Tracer(fx.Tracer):
    def __init__(self, leaf_names: frozenset[str], proxy_buffers: bool) -> None:
        super().__init__()
        self._leaf_names = leaf_names
        self.proxy_buffer_attributes = proxy_buffers

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            isinstance(m, LEAVES)
            or class_key(m) in self._leaf_names
            or is_auxiliary(m)
            or super().is_leaf_module(m, module_qualified_name)
        )


def is_auxiliary(module: nn.Module) -> bool:
    """An extra classifier that runs in training only, as Inception's and GoogLeNet's."""
    return class_key(module).endswith("aux")


def trace(
    module: nn.Module,
    leaf_names: frozenset[str],
    channels: int,
    size: int | Sequence[int] | None,
) -> tuple[fx.GraphModule, tuple[int, int]]:
    """The module's graph, `meta["shape"]` on each node, and the image size the shapes are for.

    The module is traced as in training where it has auxiliary classifiers, else as in evaluation.
    """
    training = {m: m.training for m in module.modules()}
    try:
        module.train(any(is_auxiliary(m) for m in module.modules()))
        try:
            graph = _Tracer(leaf_names, proxy_buffers=False).trace(module)
        except Exception:  # a buffer may be given a size of the image
            graph = _Tracer(leaf_names, proxy_buffers=True).trace(module)
        gm = fx.GraphModule(module, graph, class_name=type(module).__name__)
        sizes = _COMMON_SIZES if size is None else (size,)
        return gm, _shapes_at_first(gm, channels, [as_pair(s) for s in sizes])
    except TraceError:
        raise
    except Exception as error:  # tracing runs arbitrary code, which fails in arbitrary ways
        raise TraceError(f"{type(error).__name__}: {error}".split("\n")[0]) from error
    finally:
        for m, was in training.items():
            m.training = was


def as_pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _shapes_at_first(
    gm: fx.GraphModule, channels: int, sizes: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    failure: Exception | None = None
    for size in sizes:
        try:
            shapes(gm, channels, size)
            return size
        except ShapeError as error:
            failure = failure or error
    raise TraceError(f"no image of {sizes[0][0]}×{sizes[0][1]} px passes: {failure}")


class ShapeError(Exception):
    """The graph does not run on images of some shape."""


def shapes(
    gm: fx.GraphModule, channels: int, size: tuple[int, int], last: fx.Node | None = None
) -> None:
    """Set `meta["shape"]` on each node (until `last`), for a batch of such images."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    interpreter = _ShapeInterpreter(gm, last)
    try:
        log.setLevel(logging.CRITICAL)  # it prints a traceback for each size that does not pass
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            device = next(gm.parameters()).device
            interpreter.run(torch.empty(BATCH, channels, *size, device=device))
    except _Reached:
        return
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        at = str(interpreter.current.target if interpreter.current else "its start")
        raise ShapeError(f"{reason} (at {at})") from error
    finally:
        log.setLevel(level)


class _Reached(Exception):  # noqa: N818 (no error: it ends the run)
    pass


class _ShapeInterpreter(fx.Interpreter):
    current: fx.Node | None = None

    def __init__(self, gm: fx.GraphModule, last: fx.Node | None) -> None:
        super().__init__(gm)
        self.extra_traceback = False
        self._last = last

    def run_node(self, n: fx.Node) -> Any:
        self.current = n
        value = super().run_node(n)
        if isinstance(value, Tensor):
            n.meta["shape"] = tuple(value.shape)
        if n is self._last:
            raise _Reached
        return value


def first_channels(module: nn.Module) -> int:
    """How many channels the module takes, from its first convolution or linear layer."""
    for m in module.modules():
        if isinstance(m, nn.modules.conv._ConvNd):
            return m.in_channels
        if isinstance(m, nn.Linear):
            return 3
    raise ValueError(
        f"`module` (a {type(module).__name__}) has no convolution and no linear layer to convert."
    )


def submodule(gm: fx.GraphModule, node: fx.Node) -> nn.Module:
    return gm.get_submodule(cast(str, node.target))
