"""From a module's Python code to a graph: symbolically or, where the code asks for sizes, followed.

Code that decides by a size (`if h % 7:`), counts with one (`range(h)`) or unpacks them
(`x.view(*x.shape[:2], -1)`) cannot run on symbols alone. `FollowingTracer` computes beside every
symbol what it is for one example, without its values, and answers by that. Each answer is written
into the graph as a check, so that an input for which the code would have gone another way is an
error and never a wrong result.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import has_side_effect, map_aggregate, map_arg

__all__ = [
    "LEAVES",
    "PART_OF",
    "RETURNED_BY",
    "DependsOnValuesError",
    "FollowingTracer",
    "Tracer",
    "class_key",
    "empty_image",
    "goes_by_device",
    "is_auxiliary",
    "is_followed",
    "same_way",
    "sources",
]

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


def class_key(module: nn.Module) -> str:
    """The class name as the rule table spells it: lower case, no underscores."""
    return type(module).__name__.lower().replace("_", "")


def is_auxiliary(module: nn.Module) -> bool:
    """By its name, an extra classifier that runs in training only, as Inception's, GoogLeNet's."""
    return class_key(module).endswith("aux")


def empty_image(module: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """Of the type and on the device of the module's parameters."""
    first = next(p for p in module.parameters() if p.is_floating_point())
    return torch.empty(shape, device=first.device, dtype=first.dtype)


#: They take sizes and no tensor, so that torch would not ask a symbol among their arguments.
_NEW_TENSORS = (
    torch.arange,
    torch.empty,
    torch.eye,
    torch.full,
    torch.linspace,
    torch.ones,
    torch.zeros,
)


#: In a node's `meta`: the names of the blocks whose output it is, or one of whose outputs.
RETURNED_BY, PART_OF = "returned_by", "part_of"
#: In that of the first node: whether the code decided by facts that graphs need not be checked for.
BESIDE_THE_POINT = "beside_the_point"


class Tracer(fx.Tracer):
    """Of a module's first argument; all others have their defaults."""

    def __init__(self, leaf_names: frozenset[str], proxy_buffers: bool) -> None:
        super().__init__(autowrap_functions=_NEW_TENSORS)
        self._autowrap_search.append(torch)  # where these functions are looked up
        self._leaf_names = leaf_names
        self.proxy_buffer_attributes = proxy_buffers

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Symbol(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            isinstance(m, LEAVES)
            or class_key(m) in self._leaf_names
            or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """What a block returns is marked with its name, when it is called first."""
        name = self.path_of_module(m)
        is_first = name not in self.num_calls and not self.is_leaf_module(m, name)
        out = super().call_module(m, forward, args, kwargs)
        parts: list[fx.Proxy] = []
        if is_first:
            map_aggregate(out, lambda a: parts.append(a) if isinstance(a, fx.Proxy) else a)
        mark = RETURNED_BY if len(parts) == 1 else PART_OF
        for part in parts:
            part.node.meta[mark] = (*part.node.meta.get(mark, ()), name)
        return out

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        _, *names = inspect.signature(root_fn).parameters
        image = self.create_proxy("placeholder", names[0] if names else "x", (), {})
        return (lambda root, x: root_fn(root, x)), [self.root, image]


def _in_place(name: str) -> Callable[[Any, Any], fx.Proxy]:
    def change(self: fx.Proxy, other: Any) -> fx.Proxy:
        target = getattr(operator, name)
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return change


class _Symbol(fx.Proxy):
    """That `x += y` changes x, as torch's own symbols do not know, is part of the graph."""

    __iadd__, __isub__ = _in_place("iadd"), _in_place("isub")
    __imul__, __itruediv__ = _in_place("imul"), _in_place("itruediv")


class DependsOnValuesError(Exception):
    """No size of the image answers what the code asks."""


class FollowingTracer(Tracer):
    """Answers questions about sizes as they are for images of the shape `example`."""

    def __init__(self, leaf_names: frozenset[str], example: tuple[int, ...]) -> None:
        super().__init__(leaf_names, proxy_buffers=True)
        self._example = example
        self._values: dict[fx.Node, Any] = {}
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._computing = False  # a value, in which modules and parameters are to be themselves

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Followed(node, self)

    def create_proxy(self, *args: Any, **kwargs: Any) -> Any:
        proxy = super().create_proxy(*args, **kwargs)
        if proxy.node.op != "output":
            self._computing = True
            try:
                with torch.no_grad(), self._mode:
                    self._value(proxy.node)
            finally:
                self._computing = False
        return proxy

    def _value(self, node: fx.Node) -> Any:
        if node not in self._values:
            self._values[node] = self._compute(node)
        return self._values[node]

    def _compute(self, node: fx.Node) -> Any:
        target: Any = node.target
        if node.op == "placeholder":
            return empty_image(self.root, self._example)
        if node.op == "get_attr":
            found: Any = self.root
            for name in target.split("."):
                found = getattr(found, name)
            return found
        args, kwargs = map_arg((node.args, node.kwargs), self._value)
        if node.op == "call_module":
            return self.root.get_submodule(target)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if self._computing:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._computing:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def answer(self, proxy: fx.Proxy, question: str) -> Any:
        """What `proxy` is for the example, which the graph insists on from now on."""
        value = self._values[proxy.node]
        of_the_image = any(n.op == "placeholder" for n in sources(proxy.node))
        if of_the_image and isinstance(value, Tensor) and question != "len":
            raise DependsOnValuesError("its control flow depends on values computed from the image")
        answer = _QUESTIONS[question](value)
        asked = self._asked(proxy.node)
        if of_the_image and asked not in _BESIDE_THE_POINT:
            self.create_proxy("call_function", same_way, (proxy, question, answer, asked), {})
        elif of_the_image:
            next(iter(self.graph.nodes)).meta[BESIDE_THE_POINT] = True
        return answer

    def _asked(self, node: fx.Node) -> str:
        """The fact about a tensor that a question is about: "size", unless it is another one."""
        facts, waiting = set(), [node]
        while waiting:
            n = waiting.pop()
            if any(isinstance(self._values[i], Tensor) for i in n.all_input_nodes):
                facts.add(str(n.args[1]) if n.target is getattr else str(n.target))
            else:
                waiting.extend(n.all_input_nodes)
        for kind in (_BESIDE_THE_POINT, {"dtype", "is_floating_point"}):
            if facts and facts <= kind:
                return min(facts)
        return "size"

    def to_bool(self, obj: fx.Proxy) -> bool:
        return bool(self.answer(obj, "bool"))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        return iter([obj[i] for i in range(self.answer(obj, "len"))])  # type: ignore[index]


_QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "index": operator.index,
    "int": int,
    "float": float,
    "len": len,
}


#: Facts by which code chooses how to compute what it would compute anyway.
_BESIDE_THE_POINT = frozenset("device is_cuda requires_grad is_contiguous".split())


def sources(node: fx.Node) -> set[fx.Node]:
    """The node and all that it is computed from."""
    met: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        n = waiting.pop()
        if n not in met:
            met.add(n)
            waiting.extend(n.all_input_nodes)
    return met


@has_side_effect
def same_way(value: Any, question: str, answer: Any, asked: str) -> None:
    """Part of a graph: whether the code would have gone the same way for this input."""
    now = _QUESTIONS[question](value)
    if now != answer and asked != "size":
        raise ValueError(
            f"the network was converted as its code runs on inputs of another {asked}, and on this "
            f"one it runs differently (a {question} is {now} and was {answer}): use inputs as they "
            f"were then, or convert the network when it has the {asked} that it is to be used with."
        )
    if now != answer:
        raise ValueError(
            "the network was converted as its code runs on images of another size, and on this one "
            f"it runs differently (a {question} is {now} and was {answer}): use images of the size "
            "that it was converted for, or convert it with input_size=…"
        )


def is_followed(graph: fx.Graph) -> bool:
    """Whether it is checked that the code would have gone the same way."""
    return any(node.target is same_way for node in graph.nodes)


def goes_by_device(graph: fx.Graph) -> bool:
    """Whether the code asked where its tensors are, or the like."""
    return any(BESIDE_THE_POINT in node.meta for node in graph.nodes)


class _Followed(_Symbol):
    """A symbol whose value for the example is known."""

    tracer: FollowingTracer

    def __getattr__(self, k: str) -> Any:
        return _FollowedAttribute(self, k)

    def __setitem__(self, place: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, place, value), {})

    def __len__(self) -> int:
        return int(self.tracer.answer(self, "len"))

    def __index__(self) -> int:
        return int(self.tracer.answer(self, "index"))

    def __int__(self) -> int:
        return int(self.tracer.answer(self, "int"))

    def __float__(self) -> float:
        return float(self.tracer.answer(self, "float"))


class _FollowedAttribute(fx.proxy.Attribute, _Followed):
    pass
