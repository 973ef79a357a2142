"""Any torch module → a B-cos network: by rules over its graph, with a report."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Never

import torch
from torch import fx, nn
from torch.fx.graph import CodeGen

from torchbcos._arguments import check_transform
from torchbcos.convert.head import move_heads
from torchbcos.convert.in_place import make_out_of_place
from torchbcos.convert.modules import (
    TOLERANCE,
    check_weights,
    completeness_error,
    replace_modules,
)
from torchbcos.convert.report import Change, Report
from torchbcos.convert.rewriter import SIGNAL, Options, Rewriter, Value, name_of
from torchbcos.convert.rules import LEAF_NAMES, activations_among, rule_for
from torchbcos.convert.trace import (
    ShapeError,
    TraceError,
    UndecidableError,
    as_pair,
    computes_the_same,
    likely_channels,
    shapes,
    trace,
)
from torchbcos.convert.tracers import goes_by_device, is_auxiliary, is_followed

__all__ = ["Change", "Conversion", "Report", "convert_lazily", "convert_network"]


@dataclass(frozen=True)
class Conversion:
    network: nn.Module  # takes encoded images [N, 2C, H, W]
    report: Report
    channels: int  # C, of the image before the encoding
    size: tuple[int, int]  # the image size at which the conversion was checked
    outputs: int | None  # how many logits, where the output is [N, K]


def convert_network(
    module: nn.Module,
    *,
    b: float = 2.0,
    max_out: int = 2,
    norm: str | None = None,
    head: str = "conv",
    size: int | Sequence[int] | None = None,
    strict: bool = True,
) -> Conversion:
    """`module` as a network of B-cos layers, initialised anew; `module` itself is not touched."""
    check_transform(b, max_out, 1.0)
    if norm not in (None, "uncentred"):
        raise ValueError(f"`norm` (={norm!r}) must be None, to remove norms, or 'uncentred'.")
    if head not in ("conv", "pool"):
        raise ValueError(
            f"`head` (={head!r}) must be 'conv', to classify before pooling, or 'pool', to "
            "keep the order."
        )
    options = Options(b, max_out, norm)
    module = getattr(module, "_orig_mod", module)  # of what torch.compile made
    likely = likely_channels(module)
    try:
        network: Any
        network, channels, used_size, report = _traced(module, options, head, likely, size)
        outputs = _outputs(network)
    except TraceError as error:
        check_weights(module)
        channels, used_size = likely[0], as_pair(224 if size is None else size)
        try:
            network, report, outputs = replace_modules(module, options, channels, used_size)
        except Exception as failure:  # the module's own code may fail in any way
            raise ValueError(
                f"{type(module).__name__} cannot be converted: its code cannot be traced "
                f"({error}), and with its modules replaced it does not run "
                f"({type(failure).__name__}: {' '.join(str(failure).split())})."
            ) from failure
        reason = f"its code cannot be traced ({error})"
        report = replace(
            report,
            breaks=tuple(f"{b}; {reason}" for b in report.breaks),
            note=f"{report.note} Not traceable: {error}.",
        )
    if strict and report.breaks:
        raise ValueError(
            f"{report.architecture} cannot become dynamic-linear because of "
            f"{'; '.join(report.breaks)}: replace that operation, or pass strict=False to keep it "
            "and have `residual` say by how much W(x)·x misses."
        )
    return Conversion(network, report, channels, used_size, outputs)


def convert_lazily(build: Callable[[], nn.Module], options: dict[str, Any]) -> Conversion:
    """Convert without ever giving the conventional network weights, where nothing of it stays."""
    try:
        with torch.device("meta"):
            conversion = convert_network(build(), **options)
    except (NotImplementedError, RuntimeError):  # its constructor computes with tensors
        return convert_network(build(), **options)
    network = conversion.network
    graphs = [m.graph for m in network.modules() if isinstance(m, fx.GraphModule)]
    every = len(list(network.named_parameters(remove_duplicate=False)))
    shares = every > len(list(network.parameters()))
    if (
        shares
        or any(map(goes_by_device, graphs))
        or not all(map(_remakes_itself, network.modules()))
    ):
        return convert_network(build(), **options)
    network.to_empty(device=torch.get_default_device())
    for module in network.modules():
        reset = getattr(module, "reset_parameters", None)
        if reset is not None:
            reset()
    return conversion


def _remakes_itself(module: nn.Module) -> bool:
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return not own or hasattr(module, "reset_parameters")


def _traced(
    module: nn.Module,
    options: Options,
    head: str,
    likely_channels: Sequence[int],
    size: int | Sequence[int] | None,
) -> tuple[nn.Module, int, tuple[int, int], Report]:
    failure: TraceError | None = None
    for channels in likely_channels:
        try:
            network, used_size, rewriter = _by_graph(module, options, head, channels, size)
        except UndecidableError:
            raise
        except TraceError as error:
            failure = failure or error
            continue
        note = ""
        if is_followed(network.graph):
            note = (
                "Where its code decides by sizes, this is what it does on images of "
                f"{used_size[0]}×{used_size[1]} px; sizes for which it would do otherwise are "
                "refused."
            )
        changes, breaks = tuple(rewriter.changes), tuple(rewriter.breaks)
        if rewriter.is_doubtful and not breaks:
            check_weights(module)
            missed = completeness_error(network, channels, used_size)
            if not missed <= TOLERANCE:
                breaks = (
                    "what combines images, or adds constants where they follow each other in "
                    f"another order: W(x)·x + bias misses the output by {missed:.1e}",
                )
        return network, channels, used_size, Report(type(module).__name__, changes, breaks, note)
    assert failure is not None
    raise failure


def _outputs(network: fx.GraphModule) -> int | None:
    """K, where the network's graph ends in logits [N, K]."""
    end: Any = network.graph.output_node().args[0]
    first = end[0] if isinstance(end, tuple | list) else end
    shape: tuple[int, ...] = first.meta.get("shape", ()) if isinstance(first, fx.Node) else ()
    return shape[1] if len(shape) == 2 else None


def _by_graph(
    module: nn.Module,
    options: Options,
    head: str,
    channels: int,
    size: int | Sequence[int] | None,
    image: Value = Value(SIGNAL.kind, raw=True),  # noqa: B008 (frozen)
    prefix: str = "",  # "aux." for the auxiliary classifier of that name
    unwanted: frozenset[str] = frozenset(),  # activations that were met as something else
) -> tuple[fx.GraphModule, tuple[int, int], Rewriter]:
    gm, used_size = trace(module, LEAF_NAMES, channels, size)
    _check_outputs(gm, type(module).__name__)
    before = {node.name: node.meta.get("shape") for node in gm.graph.nodes}

    def convert_auxiliary(name: str, part: nn.Module, shape: tuple[int, ...]) -> nn.Module:
        inner, _, inner_rewriter = _by_graph(
            part, options, head, shape[1], shape[2:], SIGNAL, f"{prefix}{name}."
        )
        rewriter.changes.extend(inner_rewriter.changes)
        rewriter.breaks.extend(inner_rewriter.breaks)
        inner.graph.set_codegen(_TrainingOnly())
        inner.recompile()
        return inner

    through_views = make_out_of_place(gm)
    if not through_views and not computes_the_same(gm, module, channels, used_size):
        raise TraceError("what is traced of it computes something else")
    rewriter = Rewriter(gm, options, image, rule_for, convert_auxiliary, prefix, unwanted)
    for node in through_views:
        rewriter.breaks.append(f"a change of a view in place at {rewriter.place(node)}")
    rewriter.run()
    more = activations_among(gm, rewriter.breaking)
    if more:
        return _by_graph(module, options, head, channels, used_size, image, prefix, unwanted | more)
    if head == "conv":
        moved = {prefix + n: type(gm.get_submodule(n)).__name__ for n in move_heads(gm)}
        rewriter.changes = [
            replace(c, became=f"{moved[c.place]}, before the pool") if c.place in moved else c
            for c in rewriter.changes
        ]
    gm.graph.lint()
    if image.raw:
        try:
            shapes(gm, 2 * channels, used_size, rewriter.last_on_image())
        except ShapeError as error:
            raise ValueError(
                f"{type(module).__name__} cannot take the encoded image, which has {2 * channels} "
                f"channels: {error}. Whatever comes before the first layer must not depend on the "
                "number of channels, and all layers that see the image get twice as many."
            ) from error
    _check_shapes(gm, rewriter, before, channels * (2 if image.raw else 1), used_size)
    gm = _Network(gm, gm.graph, class_name=type(module).__name__)  # without unused parameters
    return copy.deepcopy(gm), used_size, rewriter  # shares nothing with `module`


def _check_outputs(gm: fx.GraphModule, name: str) -> None:
    """One tensor, beside which there may be those of auxiliary classifiers."""
    end: Any = gm.graph.output_node().args[0]
    while isinstance(end, fx.Node) and name_of(end) in ("inceptionoutputs", "googlenetoutputs"):
        end = end.args
    first, *others = end if isinstance(end, tuple | list) else [end]
    more = [o for o in others if o is not None and not _is_auxiliary(gm, o)]
    if not isinstance(first, fx.Node) or more:
        kind = f"{1 + len(others)} outputs" if isinstance(end, tuple | list) else "a dict"
        raise ValueError(
            f"{name} cannot be converted, because it returns {kind}: wrap it in a module that "
            "returns the one tensor to be explained."
        )


def _is_auxiliary(gm: fx.GraphModule, node: Any) -> bool:
    """Whether it is what an auxiliary classifier returned."""
    return (
        isinstance(node, fx.Node)
        and node.op == "call_module"
        and is_auxiliary(gm.get_submodule(str(node.target)))
    )


def _check_shapes(
    gm: fx.GraphModule,
    rewriter: Rewriter,
    before: dict[str, tuple[int, ...] | None],
    channels: int,
    size: tuple[int, int],
) -> None:
    """Run all of the converted graph: what stays of the network has the shapes it had."""
    name = gm._get_name()
    try:
        shapes(gm, channels, size)
    except ShapeError as error:
        raise ValueError(
            f"{name} cannot be converted, because what would become of it does not run: {error}."
        ) from error
    for node in gm.graph.nodes:
        if node.op == "get_attr":  # a weight that a function shares with a layer has more rows
            continue
        was, now = before.get(node.name), node.meta.get("shape")
        known = node in rewriter.values and not rewriter.values[node].raw
        if known and was and now and was != now:
            if node.op == "output" and len(was) == 1:
                raise ValueError(
                    f"{name} cannot be converted: it returns [N], and a model returns [N, K]: "
                    "leave out what removes the last dimension, such as squeeze or flatten."
                )
            raise ValueError(
                f"{name} cannot be converted: {rewriter.place(node)} would give {list(now[1:])} in "
                f"place of {list(was[1:])}, so it does more than others of its kind: replace it."
            )


class _Network(fx.GraphModule):
    def __reduce__(self) -> Never:
        """From a pickle torch would trace it anew, and lose what is held in explanations."""
        raise TypeError(
            "a converted network cannot be pickled: write the model with torchbcos.save and read "
            "it with torchbcos.load, or copy it with copy.deepcopy."
        )


class _TrainingOnly(CodeGen):
    """Generated code that answers None outside of training."""

    def gen_fn_def(self, *args: object, **kwargs: object) -> str:
        define: str = super().gen_fn_def(*args, **kwargs)  # type: ignore[arg-type]
        return define + "\n    if not self.training:\n        return None"
