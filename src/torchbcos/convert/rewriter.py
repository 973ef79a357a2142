"""Goes through a network's graph, applies a rule to each operation and keeps book.

Every value in the graph is one of three kinds:

- a *constant* does not depend on the image;
- a *signal* is dynamic-linear: W(x)·x, plus offsets that no pixel owns;
- a *factor* depends on the image in some other way. It may multiply a signal, because a factor can
  be held constant in explanation mode just as |cos|^(b-1) is; anything else it reaches becomes a
  factor too, and a network whose output is one does not decompose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch import Tensor, fx, nn

from torchbcos.convert.report import Change
from torchbcos.convert.trace import BATCH, submodule
from torchbcos.convert.tracers import PART_OF, RETURNED_BY

__all__ = [
    "CONSTANT",
    "FACTOR",
    "SIGNAL",
    "Kind",
    "Options",
    "Rewriter",
    "Rule",
    "Value",
    "hand_on",
    "name_of",
    "share_weight",
]


class Kind(Enum):
    CONSTANT = "constant"
    SIGNAL = "signal"
    FACTOR = "factor"


@dataclass(frozen=True)
class Value:
    kind: Kind
    raw: bool = False  # still the image, encoded to twice its channels: no layer has seen it yet
    cause: str = ""  # for a factor: the operation that made it one
    maker: str = ""  # and its name in the graph


@dataclass(frozen=True)
class Options:
    b: float
    max_out: int
    norm: str | None  # None or "uncentred"


#: In a node's `meta`: by what its value became a factor.
FACTOR = "factor"

CONSTANT = Value(Kind.CONSTANT)
SIGNAL = Value(Kind.SIGNAL)


def name_of(node: fx.Node) -> str:
    """The function's or method's; modules and attributes have the names that somebody gave them."""
    if node.op not in ("call_function", "call_method"):
        return ""
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name in ("fn", "<lambda>", "") and target != name:
        # torch's boolean-dispatched functions carry no name
        name = fx.node._get_qualified_name(target).rpartition(".")[2]
    name = name.lower().strip("_").replace("_", "")
    return {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div", "truediv": "div"}.get(
        name, name
    )


class Rewriter:
    """Applies the table to one graph, in place, and keeps book."""

    def __init__(
        self,
        gm: fx.GraphModule,
        options: Options,
        image: Value,
        rule_for: Callable[[fx.Node, nn.Module | None], Rule],
        convert_auxiliary: Callable[[str, nn.Module, tuple[int, ...]], nn.Module],
        prefix: str = "",
        unwanted: frozenset[str] = frozenset(),  # operations to remove, by their names in the graph
    ) -> None:
        self.gm = gm
        self.options = options
        self.changes: list[Change] = []
        self.breaks: list[str] = []
        self.breaking: set[str] = set()  # the operations behind `breaks`, by their names
        self.is_doubtful = False  # whether images could mix, so that numbers must tell
        self._unwanted = unwanted
        self._image = image
        self._rule_for = rule_for
        self.convert_auxiliary = convert_auxiliary
        self._prefix = prefix
        self.values: dict[fx.Node, Value] = {}
        self.learned = {name for name, _ in gm.named_parameters(remove_duplicate=False)}
        self._originals: dict[str, nn.Module] = {}  # of the modules replaced, by their names
        self._weights: dict[Tensor, Tensor] = {}  # of the layers replaced, and of their twins

    def run(self) -> None:
        for node in list(self.gm.graph.nodes):
            value = self.values[node] = self.visit(node)
            if value.kind is Kind.FACTOR:
                node.meta[FACTOR] = value.cause
        self._erase_dead_code()
        self.gm.delete_all_unused_submodules()
        self.gm.recompile()

    def _erase_dead_code(self) -> None:
        """What is alive must not read a parameter that is gone with its layer."""
        for node in reversed(self.gm.graph.nodes):
            if not node.users and not node.is_impure():
                self.gm.graph.erase_node(node)
            elif node.op == "get_attr":
                found: Any = self.gm
                for name in str(node.target).split("."):
                    found = getattr(found, name, None)
                if found is None:
                    raise ValueError(
                        f"{self.gm._get_name()} cannot be converted, because its code uses "
                        f"`{node.target}`, which is gone with the layer that it is of: give the "
                        "code a parameter of its own."
                    )

    def last_on_image(self) -> fx.Node | None:
        """The last operation that sees the image itself, however reshaped."""
        nodes = reversed(list(self.gm.graph.nodes))
        return next((n for n in nodes if any(self.value(i).raw for i in n.all_input_nodes)), None)

    def visit(self, node: fx.Node) -> Value:
        if node.op == "placeholder":
            image, self._image = self._image, CONSTANT
            return image
        if node.op == "get_attr":
            return CONSTANT
        inputs = [self.values[n] for n in node.all_input_nodes]
        if node.op == "output":
            for value in inputs:
                if value.kind is Kind.FACTOR and value.cause not in self.breaks:
                    self.breaks.append(value.cause)
                    self.breaking.add(value.maker)
            if all(value.kind is Kind.CONSTANT for value in inputs):
                self.breaks.append("an output that no signal reaches")
            return CONSTANT
        if node.name in self._unwanted:
            return self.remove(node)
        if all(value.kind is Kind.CONSTANT for value in inputs):
            return CONSTANT
        module = self._original(node)
        if module is None:
            _by_position(node)
        kind = node.meta.get("dtype")
        if kind is not None and not (kind.is_floating_point or kind.is_complex):
            return self.as_factor(node)  # places, comparisons, and what is rounded
        self.is_doubtful |= self._moves_images(node)
        return self._rule_for(node, module)(self, node, module)

    # What rules are made of.

    def value(self, argument: Any) -> Value:
        return self.values.get(argument, CONSTANT) if isinstance(argument, fx.Node) else CONSTANT

    def joined(self, node: fx.Node) -> Value:
        """The kind of a linear combination of the node's inputs."""
        values = [self.values[n] for n in node.all_input_nodes]
        kinds = [value.kind for value in values]
        first = values[kinds.index(Kind.FACTOR if Kind.FACTOR in kinds else Kind.SIGNAL)]
        return replace(first, raw=any(value.raw for value in values))

    def image_dims(self, x: Any) -> list[int]:
        """The dimension of x that is, or contains, that of the images, or all that it could be."""
        shape = x.meta.get("shape", ()) if isinstance(x, fx.Node) else ()
        return [dim for dim, size in enumerate(shape) if size % BATCH == 0]

    def are_images(self, x: Any, dims: Iterable[Any]) -> bool:
        """Whether one of these dimensions of x is that of the images."""
        found = [] if self.value(x).kind is Kind.CONSTANT else self.image_dims(x)
        named = {d % len(x.meta["shape"]) for d in dims if isinstance(d, int) and found}
        self.is_doubtful |= len(found) > 1 and not named.isdisjoint(found)
        return not named.isdisjoint(found[:1])

    def doubt_unless_images_lead(self, x: Any) -> None:
        """For what combines other dimensions than the first: numbers must tell if it mixes."""
        found = self.image_dims(x)
        self.is_doubtful |= bool(found) and found[0] != 0

    def _moves_images(self, node: fx.Node) -> bool:
        """Whether they are elsewhere afterwards, though nothing permutes: numbers must tell."""
        before, after = self.image_dims(node.all_input_nodes[0]), self.image_dims(node)
        if not before or "shape" not in node.meta or node.op == "call_module":
            return False
        return not after or (name_of(node) in _RESHAPES and after[0] != before[0])

    def is_normalisation(self, node: fx.Node) -> bool:
        """Whether constants of its own normalise each channel of the image: the encoding's part."""
        x, constant = node.args[:2]
        if not isinstance(constant, fx.Node) or self.value(constant).kind is not Kind.CONSTANT:
            return False
        return self.value(x).raw and constant.meta.get("shape", ())[-2:] == (1, 1)

    def place(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return f"{self._prefix}{node.target}"
        stack = node.meta.get("nn_module_stack") or {}
        inside = [self._prefix + key for key in stack if key] or [self._prefix.rstrip(".")]
        return f"{inside[-1]}: {name_of(node)}".removeprefix(": ")

    def _original(self, node: fx.Node) -> nn.Module | None:
        """The network's own module that is called, if one is."""
        if node.op != "call_module":
            return None
        return self._originals.get(str(node.target), submodule(self.gm, node))

    def operation(self, node: fx.Node) -> str:
        module = self._original(node)
        return name_of(node) if module is None else type(module).__name__

    def note(self, node: fx.Node, became: str) -> None:
        self.changes.append(Change(self.place(node), self.operation(node), became))

    def keep(self, node: fx.Node) -> Value:
        """For an operation that is linear in all its inputs."""
        self.note(node, "kept")
        return self.joined(node)

    def keep_over_places(self, node: fx.Node) -> Value:
        """For one that combines places: images must not be among them."""
        self.doubt_unless_images_lead(node.all_input_nodes[0])
        return self.keep(node)

    def as_factor(self, node: fx.Node) -> Value:
        """For an operation that is not, or is not known."""
        self.note(node, "kept as a factor")
        return self.factor(node)

    def remove(self, node: fx.Node, became: str = "removed") -> Value:
        self.note(node, became)
        source = node.all_input_nodes[0]
        hand_on(node, source)
        node.replace_all_uses_with(source)
        self.gm.graph.erase_node(node)
        return self.values[source]

    def put_module(self, node: fx.Node, module: nn.Module, became: str = "") -> None:
        name = str(node.target)
        if name in self._originals:  # used twice, converted once
            return
        self.note(node, became or type(module).__name__)
        self._originals[name] = self.gm.get_submodule(name)
        self.gm.add_submodule(name, module)

    def put_layer(self, node: fx.Node, old: Any, new: Any) -> None:
        self.put_module(node, new)
        share_weight(self._weights, old, new)

    def put_function(
        self, node: fx.Node, function: Callable[..., Any], args: tuple[Any, ...], became: str
    ) -> None:
        self.note(node, became)
        node.op, node.target, node.args, node.kwargs = "call_function", function, args, {}

    def insert(
        self, before: fx.Node, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> fx.Node:
        with self.gm.graph.inserting_before(before):
            new = self.gm.graph.call_function(function, args, kwargs)
        self.values[new] = self.value(args[0])
        return new

    def factor(self, node: fx.Node) -> Value:
        """The kind of a value that is no longer linear in the image."""
        value = self.joined(node)
        if value.kind is Kind.FACTOR:
            return value
        cause = f"`{self.operation(node)}` at {self.place(node)}"
        return Value(Kind.FACTOR, value.raw, cause, node.name)


_RESHAPES = frozenset("view reshape flatten unflatten".split())
_PAIRS = "add sub rsub mul multiply div divide matmul maximum minimum"
_OF_ONE = (
    "mean sum cumsum roll flip rot90 chunk unbind narrow select indexselect repeatinterleave "
    "tensorsplit abs absolute max min amax amin clamp clip clampmin clampmax"
)
#: For calls by keyword, the order of the arguments that the rules read.
_ORDER: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_PAIRS.split(), ("input", "other")),
    **dict.fromkeys(_OF_ONE.split(), ("input",)),
    **dict.fromkeys(["bmm", "mm"], ("input", "mat2")),
    **dict.fromkeys(["cat", "concat", "concatenate", "stack"], ("tensors", "dim")),
    "addcmul": ("input", "tensor1", "tensor2"),
    "maskedfill": ("input", "mask", "value"),
    "split": ("tensor",),
    "scaleddotproductattention": ("query", "key", "value"),
}


def _by_position(node: fx.Node) -> None:
    args, kwargs = list(node.args), dict(node.kwargs)
    for name in _ORDER.get(name_of(node), ())[len(args) :]:
        if name not in kwargs:
            break
        args.append(kwargs.pop(name))
    node.args, node.kwargs = tuple(args), kwargs


def hand_on(old: fx.Node, new: fx.Node, within: tuple[str, ...] | None = None) -> None:
    """Another value is now what blocks return: all of them, or those that it is computed in."""
    for mark in (RETURNED_BY, PART_OF):
        names = old.meta.get(mark, ())
        moved = tuple(name for name in names if within is None or name in within)
        if moved:
            old.meta[mark] = tuple(name for name in names if name not in moved)
            new.meta[mark] = (*new.meta.get(mark, ()), *moved)


def share_weight(weights: dict[Tensor, Tensor], old: Any, new: Any) -> None:
    """Layers that shared a weight share that of their twins, if it has one shape."""
    shared = weights.setdefault(old.weight, new.weight)
    if shared.shape == new.weight.shape:
        new.weight = shared


#: What a rule is: it may change the graph around a node, and says what kind its value is.
Rule = Callable[[Rewriter, fx.Node, Any], Value]
