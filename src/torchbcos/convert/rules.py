"""The rule table: what becomes of each operation of a conventional network.

Going through the graph in order, every value is one of three kinds:

- a *constant* does not depend on the image;
- a *signal* is dynamic-linear: W(x)·x, plus offsets that no pixel owns;
- a *factor* depends on the image in some other way. It may multiply a signal, because a factor can
  be held constant in explanation mode just as |cos|^(b-1) is; anything else it reaches becomes a
  factor too, and a network whose output is one does not decompose.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from torchbcos import functional
from torchbcos.convert.report import Change
from torchbcos.convert.trace import class_key, is_auxiliary, submodule
from torchbcos.convert.twins import average_pool, bcos_convolution, bcos_linear, uncentred_norm

__all__ = ["LEAF_NAMES", "Kind", "Options", "Rewriter", "name_of"]


class Kind(Enum):
    CONSTANT = "constant"
    SIGNAL = "signal"
    FACTOR = "factor"


@dataclass(frozen=True)
class Value:
    kind: Kind
    raw: bool = False  # still the image, encoded to twice its channels: no layer has seen it yet
    cause: str = ""  # for a factor: the operation that made it one


@dataclass(frozen=True)
class Options:
    b: float
    max_out: int
    norm: str | None  # None or "uncentred"


CONSTANT = Value(Kind.CONSTANT)
SIGNAL = Value(Kind.SIGNAL)

# Names are those of functions and methods, without a trailing or leading "i"/"_" for "in place",
# and those of module classes in lower case. ReLU-like activations only shape a signal: they go.
ACTIVATIONS = frozenset(
    "relu relu6 leakyrelu elu selu celu gelu silu mish hardswish prelu rrelu hardtanh softplus "
    "swish hardmish gelutanh quickgelu preluact swishjit hardswishjit mishjit threshold "
    "softsign hardshrink softshrink tanhshrink logsigmoid".split()
)
DROPOUTS = frozenset(
    "dropout dropout1d dropout2d dropout3d alphadropout featurealphadropout featuredropout "
    "droppath dropblock2d dropblock stochasticdepth".split()
)
LINEAR = frozenset(
    "avgpool1d avgpool2d avgpool3d adaptiveavgpool1d adaptiveavgpool2d adaptiveavgpool3d "
    "mean sum neg cat concat stack flatten unflatten view reshape permute transpose t squeeze "
    "unsqueeze contiguous chunk split tensorsplit unbind getitem narrow select roll flip expand "
    "expandas repeat clone to float half double typeas movedim swapaxes swapdims interpolate "
    "upsample pixelshuffle pixelunshuffle channelshuffle unfold fold identity cumsum "
    "zeropad1d zeropad2d zeropad3d reflectionpad1d reflectionpad2d reflectionpad3d "
    "replicationpad1d replicationpad2d replicationpad3d circularpad1d circularpad2d circularpad3d "
    "upsamplingnearest2d upsamplingbilinear2d".split()
)
NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)
NORM_NAMES = frozenset("frozenbatchnorm2d layernorm2d groupnorm1".split())
SIZES = frozenset("size dim numel ndimension getattr".split())
#: Modules of these names are not looked into, whichever library they come from.
LEAF_NAMES = ACTIVATIONS | DROPOUTS | NORM_NAMES


class Rewriter:
    """Applies the table to one graph, in place, and keeps book."""

    def __init__(
        self,
        gm: fx.GraphModule,
        options: Options,
        image: Value,
        convert_auxiliary: Callable[[nn.Module, tuple[int, ...]], nn.Module],
    ) -> None:
        self.gm = gm
        self.options = options
        self.changes: list[Change] = []
        self.breaks: list[str] = []
        self._image = image
        self.convert_auxiliary = convert_auxiliary
        self._values: dict[fx.Node, Value] = {}
        self._replaced: set[str] = set()

    def run(self) -> None:
        for node in list(self.gm.graph.nodes):
            self._values[node] = self._visit(node)
        self.gm.graph.eliminate_dead_code()
        self.gm.delete_all_unused_submodules()
        self.gm.recompile()

    def _visit(self, node: fx.Node) -> Value:
        if node.op == "placeholder":
            image, self._image = self._image, CONSTANT
            return image
        if node.op == "get_attr":
            return CONSTANT
        inputs = [self._values[n] for n in node.all_input_nodes]
        if node.op == "output":
            for value in inputs:
                if value.kind is Kind.FACTOR and value.cause not in self.breaks:
                    self.breaks.append(value.cause)
            return CONSTANT
        if all(value.kind is Kind.CONSTANT for value in inputs):
            return CONSTANT
        if node.op == "call_module":
            module = submodule(self.gm, node)
            rule = _module_rule(module)
            return rule(self, node, module)
        return _NAMED.get(name_of(node), _unknown)(self, node, None)

    # What rules are made of.

    def value(self, argument: Any) -> Value:
        return self._values[argument] if isinstance(argument, fx.Node) else CONSTANT

    def joined(self, node: fx.Node) -> Value:
        """The kind of a linear combination of the node's inputs."""
        values = [self._values[n] for n in node.all_input_nodes]
        for value in values:
            if value.kind is Kind.FACTOR:
                return value
        return next(value for value in values if value.kind is Kind.SIGNAL)

    def place(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return str(node.target)
        stack = node.meta.get("nn_module_stack") or {}
        inside = [key for key in stack if key]
        return f"{inside[-1]}: {name_of(node)}" if inside else name_of(node)

    def note(self, node: fx.Node, became: str) -> None:
        if node.op == "call_module":
            operation = type(submodule(self.gm, node)).__name__
        else:
            operation = name_of(node)
        self.changes.append(Change(self.place(node), operation, became))

    def remove(self, node: fx.Node) -> Value:
        self.note(node, "removed")
        source = node.all_input_nodes[0]
        node.replace_all_uses_with(source)
        self.gm.graph.erase_node(node)
        return self._values[source]

    def replaced(self, node: fx.Node) -> bool:
        """Whether this module was met before: one used twice is converted once."""
        return str(node.target) in self._replaced

    def put_module(self, node: fx.Node, module: nn.Module, became: str = "") -> None:
        self.note(node, became or type(module).__name__)
        self._replaced.add(str(node.target))
        self.gm.add_submodule(str(node.target), module)

    def put_function(
        self, node: fx.Node, function: Callable[..., Any], args: tuple[Any, ...], became: str
    ) -> None:
        self.note(node, became)
        node.op, node.target, node.args, node.kwargs = "call_function", function, args, {}

    def insert(self, before: fx.Node, function: Callable[..., Any], *args: Any) -> fx.Node:
        with self.gm.graph.inserting_before(before):
            new = self.gm.graph.call_function(function, args)
        self._values[new] = self.value(args[0])
        return new

    def factor(self, node: fx.Node) -> Value:
        """The kind of a value that is no longer linear in the image."""
        for n in node.all_input_nodes:
            if self._values[n].kind is Kind.FACTOR:
                return self._values[n]
        return Value(Kind.FACTOR, cause=f"`{_operation(self.gm, node)}` at {self.place(node)}")


Rule = Callable[[Rewriter, fx.Node, Any], Value]


def name_of(node: fx.Node) -> str:
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name in ("fn", "<lambda>", ""):  # torch's boolean-dispatched functions carry no name
        name = fx.node._get_qualified_name(target).rpartition(".")[2]
    name = name.lower().strip("_").replace("_", "")
    return {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "truediv": "div"}.get(
        name, name
    )


def _operation(gm: fx.GraphModule, node: fx.Node) -> str:
    return type(submodule(gm, node)).__name__ if node.op == "call_module" else name_of(node)


# The rules.


def _remove(r: Rewriter, node: fx.Node, _: Any) -> Value:
    return r.remove(node)


def _keep(r: Rewriter, node: fx.Node, _: Any) -> Value:
    r.note(node, "kept")
    return r.joined(node)


def _size(r: Rewriter, node: fx.Node, _: Any) -> Value:
    return CONSTANT


def _unknown(r: Rewriter, node: fx.Node, _: Any) -> Value:
    r.note(node, "kept, not linear")
    return r.factor(node)


def _layer(r: Rewriter, node: fx.Node, module: Any) -> Value:
    """A convolution or a linear layer."""
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return _unknown(r, node, module)
    value = r.joined(node)
    if not r.replaced(node):
        make = bcos_linear if isinstance(module, nn.Linear) else bcos_convolution
        new = make(module, 2 if value.raw else 1, r.options.b, r.options.max_out)
        r.put_module(node, new)
    return replace(value, raw=False)


def _functional_layer(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """F.conv2d and F.linear: a learned weight gets the transform, a fixed filter stays."""
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    if not isinstance(weight, fx.Node) or r.value(weight).kind is not Kind.CONSTANT:
        return _unknown(r, node, None)
    name = name_of(node)
    learned = weight.op == "get_attr" and isinstance(
        operator.attrgetter(str(weight.target))(r.gm), nn.Parameter
    )
    if not learned:
        return _keep(r, node, None)
    given = dict(zip(_CONV_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    given.pop("bias", None)
    function = getattr(functional, f"bcos_{name}")
    r.put_function(node, function, (), f"bcos_{name}")
    node.kwargs = {**given, "b": r.options.b}
    return replace(r.joined(node), raw=False)


_CONV_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def _norm(r: Rewriter, node: fx.Node, module: Any) -> Value:
    if not r.replaced(node):
        new = uncentred_norm(module) if r.options.norm else None
        if new is None:
            return r.remove(node)
        r.put_module(node, new)
    return r.joined(node)


def _max_pool(r: Rewriter, node: fx.Node, module: Any) -> Value:
    if module is not None:
        if not r.replaced(node):
            new = average_pool(module)
            if new is None:
                return _unknown(r, node, module)
            r.put_module(node, new)
        return r.joined(node)
    names = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.pop("dilation", 1) not in (1, [1, 1], (1, 1)) or given.pop("return_indices", False):
        return _unknown(r, node, module)
    average = getattr(F, f"avg_pool{name_of(node)[-2:]}")
    r.put_function(node, average, (given.pop("input"),), "average pool")
    node.kwargs = given
    return r.joined(node)


def _adaptive_max_pool(r: Rewriter, node: fx.Node, module: Any) -> Value:
    if module is not None:
        return _max_pool(r, node, module)
    average = getattr(F, f"adaptive_avg_pool{name_of(node)[-2:]}")
    r.put_function(node, average, (*node.args[:2], *node.kwargs.values()), "average pool")
    return r.joined(node)


def _product(r: Rewriter, node: fx.Node, _: Any) -> Value:
    a, b = node.args[0], node.args[1]
    kinds = (r.value(a).kind, r.value(b).kind)
    if Kind.CONSTANT in kinds:
        return _keep(r, node, None)
    if Kind.SIGNAL not in kinds:
        return _unknown(r, node, None)
    if kinds[0] is Kind.FACTOR:
        a, b = b, a
    r.put_function(node, functional.gate, (a, b), "gate: second factor held constant")
    return r.value(a)


def _quotient(r: Rewriter, node: fx.Node, _: Any) -> Value:
    a, b = node.args[0], node.args[1]
    if r.value(b).kind is Kind.CONSTANT:
        return _keep(r, node, None)
    if r.value(a).kind is not Kind.SIGNAL:
        return _unknown(r, node, None)
    inverse = r.insert(node, torch.reciprocal, b)
    r.put_function(node, functional.gate, (a, inverse), "gate: divisor held constant")
    return r.value(a)


def _matrix_product(r: Rewriter, node: fx.Node, _: Any) -> Value:
    a, b = node.args[0], node.args[1]
    kinds = (r.value(a).kind, r.value(b).kind)
    if Kind.CONSTANT in kinds:
        return _keep(r, node, None)
    if Kind.SIGNAL not in kinds:
        return _unknown(r, node, None)
    signal = b if kinds[1] is Kind.SIGNAL else a
    args = tuple(p if p is signal else r.insert(node, functional.hold, p) for p in (a, b))
    r.put_function(node, torch.matmul, args, "one side held constant")
    return r.value(signal)


def _attention(r: Rewriter, node: fx.Node, _: Any) -> Value:
    q, k, v = node.args[:3]
    if r.value(v).kind is not Kind.SIGNAL:
        return _unknown(r, node, None)
    held = (r.insert(node, functional.hold, q), r.insert(node, functional.hold, k))
    r.note(node, "attention weights held constant")
    node.args = (*held, v, *node.args[3:])
    return r.value(v)


def _sum(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """a + b and a - b, where either may be a constant: an offset."""
    if len(node.args) != 2 or node.kwargs:
        return _unknown(r, node, None)
    a, b = node.args
    minus = name_of(node) in ("sub", "rsub")
    if name_of(node) == "rsub":
        a, b = b, a
    if Kind.CONSTANT not in (r.value(a).kind, r.value(b).kind):
        return _keep(r, node, None)
    if r.value(a).kind is Kind.CONSTANT:
        a, b = (r.insert(node, torch.neg, b) if minus else b), a
    elif minus:
        b = r.insert(node, torch.neg, b) if isinstance(b, fx.Node) else -b  # type: ignore[operator]
    value = r.value(a)
    r.put_function(node, functional.add_offset, (a, b), "offset added")
    return value


def _scaled_sum(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """addcmul: a + b · c, taken apart."""
    if len(node.args) != 3 or node.kwargs:
        return _unknown(r, node, None)
    a, b, c = node.args
    product = r.insert(node, operator.mul, b, c)
    product.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
    r._values[product] = r._visit(product)
    node.target, node.args = operator.add, (a, product)
    return _sum(r, node, None)


def _joined_with_offsets(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """cat and stack, where a constant among the parts (a class token) is an offset."""
    parts = node.args[0]
    if isinstance(parts, list | tuple):
        marked = [
            r.insert(node, functional.offset, p) if r.value(p).kind is Kind.CONSTANT else p
            for p in parts
        ]
        node.args = (marked, *node.args[1:])
    return _keep(r, node, None)


def _pad(r: Rewriter, node: fx.Node, _: Any) -> Value:
    value = node.args[3] if len(node.args) > 3 else node.kwargs.get("value")
    return _keep(r, node, None) if not value else _unknown(r, node, None)


def _named_tuple(r: Rewriter, node: fx.Node, _: Any) -> Value:
    for user in list(node.users):
        user.args = (tuple(node.args),)
    value = r.joined(node)
    r.gm.graph.erase_node(node)
    return value


def _auxiliary(r: Rewriter, node: fx.Node, module: nn.Module) -> Value:
    shape = node.all_input_nodes[0].meta["shape"]
    r.put_module(node, r.convert_auxiliary(module, shape), "B-cos, runs in training only")
    return r.joined(node)


def _table(*entries: tuple[Iterable[str], Rule]) -> dict[str, Rule]:
    return {name: rule for names, rule in entries for name in names}


_NAMED: dict[str, Rule] = _table(
    (ACTIVATIONS | DROPOUTS, _remove),
    (LINEAR, _keep),
    (SIZES, _size),
    (["cat", "concat", "stack"], _joined_with_offsets),
    (["add", "sub", "rsub"], _sum),
    (["addcmul"], _scaled_sum),
    (["mul", "multiply"], _product),
    (["div", "divide"], _quotient),
    (["matmul", "bmm", "mm"], _matrix_product),
    (["scaleddotproductattention"], _attention),
    (["maxpool1d", "maxpool2d", "maxpool3d"], _max_pool),
    (["adaptivemaxpool1d", "adaptivemaxpool2d", "adaptivemaxpool3d"], _adaptive_max_pool),
    (["conv1d", "conv2d", "conv3d", "linear"], _functional_layer),
    (["pad"], _pad),
    (["inceptionoutputs", "googlenetoutputs"], _named_tuple),
)


def _module_rule(module: nn.Module) -> Rule:
    if isinstance(module, nn.modules.conv._ConvNd | nn.Linear):
        return _layer
    key = class_key(module)
    if isinstance(module, NORMS) or key in NORM_NAMES:
        return _norm
    if isinstance(module, nn.modules.dropout._DropoutNd) or key in ACTIVATIONS | DROPOUTS:
        return _remove
    if is_auxiliary(module):
        return _auxiliary
    if isinstance(module, nn.modules.pooling._MaxPoolNd):
        return _max_pool
    if isinstance(module, nn.modules.pooling._AdaptiveMaxPoolNd):
        return _adaptive_max_pool
    return _keep if key in LINEAR else _unknown
