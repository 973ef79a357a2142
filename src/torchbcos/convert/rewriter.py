"""Goes through a network's graph, applies a rule to each operation and keeps book.

Every value in the graph is one of three kinds:

- a *constant* does not depend on the image;
- a *signal* is dynamic-linear: W(x)·x, plus offsets that no pixel owns;
- a *factor* depends on the image in some other way. It may multiply a signal, because a factor can
  be held constant in explanation mode just as |cos|^(b-1) is; anything else it reaches becomes a
  factor too, and a network whose output is one does not decompose.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import fx, nn

from torchbcos.convert.report import Change
from torchbcos.convert.trace import submodule

__all__ = ["CONSTANT", "SIGNAL", "Kind", "Options", "Rewriter", "Rule", "Value", "name_of"]


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


def name_of(node: fx.Node) -> str:
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name in ("fn", "<lambda>", ""):  # torch's boolean-dispatched functions carry no name
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
        convert_auxiliary: Callable[[nn.Module, tuple[int, ...]], nn.Module],
    ) -> None:
        self.gm = gm
        self.options = options
        self.changes: list[Change] = []
        self.breaks: list[str] = []
        self._image = image
        self._rule_for = rule_for
        self.convert_auxiliary = convert_auxiliary
        self.values: dict[fx.Node, Value] = {}
        self._replaced: set[str] = set()

    def run(self) -> None:
        for node in list(self.gm.graph.nodes):
            self.values[node] = self.visit(node)
        self.gm.graph.eliminate_dead_code()
        self.gm.delete_all_unused_submodules()
        self.gm.recompile()

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
            return CONSTANT
        if all(value.kind is Kind.CONSTANT for value in inputs):
            return CONSTANT
        module = submodule(self.gm, node) if node.op == "call_module" else None
        return self._rule_for(node, module)(self, node, module)

    # What rules are made of.

    def value(self, argument: Any) -> Value:
        return self.values[argument] if isinstance(argument, fx.Node) else CONSTANT

    def joined(self, node: fx.Node) -> Value:
        """The kind of a linear combination of the node's inputs."""
        values = [self.values[n] for n in node.all_input_nodes]
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

    def operation(self, node: fx.Node) -> str:
        module = submodule(self.gm, node) if node.op == "call_module" else None
        return name_of(node) if module is None else type(module).__name__

    def note(self, node: fx.Node, became: str) -> None:
        self.changes.append(Change(self.place(node), self.operation(node), became))

    def remove(self, node: fx.Node) -> Value:
        self.note(node, "removed")
        source = node.all_input_nodes[0]
        node.replace_all_uses_with(source)
        self.gm.graph.erase_node(node)
        return self.values[source]

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
        self.values[new] = self.value(args[0])
        return new

    def factor(self, node: fx.Node) -> Value:
        """The kind of a value that is no longer linear in the image."""
        for n in node.all_input_nodes:
            if self.values[n].kind is Kind.FACTOR:
                return self.values[n]
        return Value(Kind.FACTOR, cause=f"`{self.operation(node)}` at {self.place(node)}")


#: What a rule is: it may change the graph around a node, and says what kind its value is.
Rule = Callable[[Rewriter, fx.Node, Any], Value]
