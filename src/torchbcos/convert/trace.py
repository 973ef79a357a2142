"""From a torch module to its graph of operations, with the shape of every value."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from torchbcos._arguments import is_int
from torchbcos._cuda import cuda_settings
from torchbcos.convert.tracers import (
    DependsOnValuesError,
    FollowingTracer,
    Tracer,
    class_key,
    empty_image,
    is_auxiliary,
    sources,
)
from torchbcos.undisturbed import generators_as_before

__all__ = [
    "BATCH",
    "ShapeError",
    "TraceError",
    "UndecidableError",
    "as_pair",
    "computes_the_same",
    "likely_channels",
    "shapes",
    "submodule",
    "trace",
]

#: Images in the batch that shapes are computed for: a prime that no other dimension is likely to
#: have or to be a multiple of, as channels are of small numbers and tables of 2n - 1.
BATCH = 137
_COMMON_SIZES = (224, 299, 256, 32, 64, 28, 96, 128, 160, 192, 240, 288, 320, 384)


class TraceError(Exception):
    """The module's Python code cannot be followed."""


class UndecidableError(TraceError):
    """Nor could it be for images of another size."""


def trace(
    module: nn.Module,
    leaf_names: frozenset[str],
    channels: int,
    size: int | Sequence[int] | None,
) -> tuple[fx.GraphModule, tuple[int, int]]:
    """The module's graph, `meta["shape"]` on each node, and the image size the shapes are for.

    The module is traced as in training where it has auxiliary classifiers, else as in evaluation.
    """
    # Of its own, because code that runs may change it; only the tensors are the same.
    tensors = itertools.chain(module.parameters(), module.buffers())
    module = copy.deepcopy(module, {id(t): t for t in tensors})
    auxiliary = frozenset(class_key(m) for m in module.modules() if is_auxiliary(m))
    sizes = [as_pair(s) for s in (_sizes(module) if size is None else (size,))]
    with _quietly():
        while True:
            module.train(bool(auxiliary))
            try:
                gm, used_size = _symbolically(module, leaf_names | auxiliary, channels, sizes)
            except TraceError:
                gm, used_size = _followed(module, leaf_names | auxiliary, channels, sizes)
            only_by_name = auxiliary & _no_auxiliary(gm)
            if not only_by_name:
                return gm, used_size
            auxiliary -= only_by_name


def _no_auxiliary(gm: fx.GraphModule) -> set[str]:
    """The classes of the modules that the first output comes from, or that see no map."""
    end: Any = gm.graph.output_node().args[0]
    while isinstance(end, fx.Node) and isinstance(end.target, type):  # a named tuple
        end = end.args
    main = end[0] if isinstance(end, tuple | list) else end
    nodes = sources(main) if isinstance(main, fx.Node) else set()
    return {
        class_key(submodule(gm, n))
        for n in gm.graph.find_nodes(op="call_module")
        if n in nodes or any(len(i.meta.get("shape", ())) != 4 for i in n.all_input_nodes)
    }


def _sizes(module: nn.Module) -> tuple[int | Sequence[int], ...]:
    """The size that a network of timm says it is for, and common ones."""
    told = getattr(module, "pretrained_cfg", None)
    shape = told.get("input_size", ()) if isinstance(told, dict) else ()
    return (shape[1:], *_COMMON_SIZES) if len(shape) == 3 else _COMMON_SIZES


def as_pair(size: int | Sequence[int]) -> tuple[int, int]:
    pair: tuple[Any, ...] = (size, size) if is_int(size) else ()
    if isinstance(size, Sequence):
        pair = tuple(size)
    if len(pair) != 2 or not all(is_int(n) and n > 0 for n in pair):
        raise ValueError(
            f"`input_size` (={size!r}) must be a number of pixels, or two: height and width."
        )
    return int(pair[0]), int(pair[1])


def _symbolically(
    module: nn.Module, leaf_names: frozenset[str], channels: int, sizes: Sequence[tuple[int, int]]
) -> tuple[fx.GraphModule, tuple[int, int]]:
    """A graph for images of any size, and the first of `sizes` that passes it."""
    try:
        gm = _graph(module, Tracer(leaf_names, proxy_buffers=False))
    except TraceError:  # a buffer may be given a size of the image
        gm = _graph(module, Tracer(leaf_names, proxy_buffers=True))
    return gm, _first(sizes, lambda size: shapes(gm, channels, size))[0]


def _followed(
    module: nn.Module, leaf_names: frozenset[str], channels: int, sizes: Sequence[tuple[int, int]]
) -> tuple[fx.GraphModule, tuple[int, int]]:
    """A graph of what the code does for the first of `sizes` that passes it."""

    def follow(size: tuple[int, int]) -> fx.GraphModule:
        gm = _graph(module, FollowingTracer(leaf_names, (BATCH, channels, *size)))
        shapes(gm, channels, size)
        try:
            shapes(gm, channels, size, batch=2)
        except ShapeError as error:
            raise TraceError("its code decides by how many images there are") from error
        shapes(gm, channels, size)
        return gm

    size, gm = _first(sizes, follow)
    return gm, size


def _graph(module: nn.Module, tracer: Tracer) -> fx.GraphModule:
    try:
        graph = tracer.trace(module)
        for node in graph.nodes:
            node.meta.pop("is_wrapped", None)  # or the graph's code would wrap it for all tracers
        return fx.GraphModule(module, graph, class_name=type(module).__name__)
    except DependsOnValuesError as error:
        raise UndecidableError(str(error)) from error
    except Exception as error:  # tracing runs arbitrary code, which fails in arbitrary ways
        raise TraceError(f"{type(error).__name__}: {error}".split("\n")[0]) from error


T = TypeVar("T")


def _first(
    sizes: Sequence[tuple[int, int]], attempt: Callable[[tuple[int, int]], T]
) -> tuple[tuple[int, int], T]:
    failure: Exception | None = None
    for size in sizes:
        try:
            return size, attempt(size)
        except UndecidableError:
            raise
        except (ShapeError, TraceError) as error:
            failure = failure or error
    tried = f"{sizes[0][0]}×{sizes[0][1]} px"
    if len(sizes) > 1:
        tried += f" or of {len(sizes) - 1} other sizes, of which input_size=… can name another,"
    raise TraceError(f"no image of {tried} passes: {failure}")


class ShapeError(Exception):
    """The graph does not run on images of some shape."""


def shapes(
    gm: fx.GraphModule,
    channels: int,
    size: tuple[int, int],
    last: fx.Node | None = None,
    batch: int = BATCH,
) -> None:
    """Set `meta["shape"]` on each node (until `last`), for a batch of such images; on nodes that
    are no tensors but numbers, `meta["size"]`.
    """
    interpreter = _ShapeInterpreter(gm, last)
    try:
        with _quietly(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
            interpreter.run(empty_image(gm, (batch, channels, *size)))
    except _Reached:
        return
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        at = str(interpreter.current.target if interpreter.current else "its start")
        raise ShapeError(f"{reason} (at {at})") from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the tracebacks that torch prints for each size that does not pass."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
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
            n.meta["dtype"] = value.dtype
        elif isinstance(value, int | torch.Size):
            n.meta["size"] = value
        if n is self._last:
            raise _Reached
        return value


@torch.no_grad()
def computes_the_same(
    gm: fx.GraphModule, module: nn.Module, channels: int, size: tuple[int, int]
) -> bool:
    """Whether the graph gives what the module's own code gives for two random images.

    A symbol is no tensor, and code may ask for that: by `isinstance`, by `try`, or where it looks
    something up by a size. Nor do views in the graph know what they are views of. Where weights
    have no values this is not known, and taken for true.
    """
    if any(t.is_meta for t in itertools.chain(module.parameters(), module.buffers())):
        return True
    like = empty_image(module, (2, channels, *size))
    images = torch.rand(like.shape, generator=torch.Generator().manual_seed(0), device="cpu")
    own, graph = copy.deepcopy(module).train(gm.training), copy.deepcopy(gm)
    for part in graph.modules():  # hooks of layers go with them, and must make no difference
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
    outputs: list[list[Tensor]] = []
    for network in (own, graph):
        with generators_as_before(like.device), cuda_settings(tf32=False, benchmark=False):
            torch.manual_seed(0)
            try:
                found = network(images.to(like))
            except Exception:  # where its own code does not run there is nothing to compare
                return not outputs
        outputs.append([t for t in tree_leaves(found) if isinstance(t, Tensor)])
    return len(outputs[0]) == len(outputs[1]) and all(
        a.shape == b.shape
        and torch.allclose(a, b, 0, 1e-4 * float(a.nan_to_num().abs().max()), equal_nan=True)
        for a, b in zip(*outputs, strict=True)
    )


def likely_channels(module: nn.Module) -> list[int]:
    """How many channels its images may have: those of the first convolution, or usual ones, which
    a rearrangement of pixels may make more of before it.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"`module` (a {type(module).__name__}) is compiled by torch.jit, so that its code is "
            "gone: convert the module it was made from."
        )
    for m in module.modules():
        if isinstance(m, nn.modules.lazy.LazyModuleMixin):
            raise ValueError(
                f"`module` (a {type(module).__name__}) has a {type(m).__name__}, whose size is not "
                "known yet: call the module once on an image, then convert it."
            )
        for name, value in vars(m).items():
            if isinstance(value, Tensor) and not value.is_leaf:
                raise ValueError(
                    f"`module` (a {type(module).__name__}) has a {type(m).__name__} whose `{name}` "
                    "is computed from parameters before each call: make it a parameter again with "
                    "torch.nn.utils.remove_weight_norm(layer), or prune.remove(layer, "
                    f"{name!r}) if it was pruned, then convert the module."
                )
    for m in module.modules():
        if isinstance(m, nn.modules.conv._ConvNd):
            return list(dict.fromkeys([m.in_channels, 3, 1]))
        if isinstance(m, nn.Linear):
            return [3, 1]
    raise ValueError(
        f"`module` (a {type(module).__name__}) has no convolution and no linear layer to convert."
    )


def submodule(gm: fx.GraphModule, node: fx.Node) -> nn.Module:
    return gm.get_submodule(cast(str, node.target))
