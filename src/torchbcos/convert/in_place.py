"""Operations in place become ones that make a new tensor.

Once an activation is removed, others that read its input would see that changed as well.
"""

from __future__ import annotations

import operator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from torchbcos.convert.rewriter import hand_on, name_of
from torchbcos.convert.rules import ACTIVATIONS, DROPOUTS
from torchbcos.convert.trace import submodule
from torchbcos.convert.tracers import class_key

__all__ = ["make_out_of_place"]


def make_out_of_place(gm: fx.GraphModule) -> list[fx.Node]:
    """x.add_(y) as x = x.add(y).

    Returned are those that change a view of a value which is used again, and that value with it.
    """
    met: set[fx.Node] = set()
    through_views: list[fx.Node] = []
    for node in gm.graph.nodes:
        met.add(node)
        kind = class_key(submodule(gm, node)) if node.op == "call_module" else name_of(node)
        changed = _now_new(gm, node)
        if not isinstance(changed, fx.Node):
            continue
        if kind == "setitem":
            node.meta["shape"] = changed.meta.get("shape", ())
        used_again = any(user not in met for user in _viewed(changed).users)
        if used_again and _is_view(changed) and kind not in ACTIVATIONS | DROPOUTS:
            through_views.append(node)
        hand_on(changed, node, tuple(node.meta.get("nn_module_stack") or ()))
        changed.replace_all_uses_with(node, lambda user: user not in met)
    for module in gm.modules():
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]
    gm.recompile()
    return through_views


def _now_new(gm: fx.GraphModule, node: fx.Node) -> Any:
    """What the operation changed, of which it makes a new value now; None if it changes nothing."""
    target: Any = node.target
    first: Any = next(iter(node.args), None)
    if node.op == "call_module":
        return first if getattr(submodule(gm, node), "inplace", False) else None
    if node.op == "call_method":
        if not _ends_as_in_place(target):
            return None
        node.target = target.removesuffix("_")
        return first
    if node.op != "call_function":
        return None
    if target in _OPERATORS:
        node.target = _OPERATORS[target]
        is_number = isinstance(first, fx.Node) and "shape" not in first.meta
        return None if is_number else first
    name = getattr(target, "__name__", "")
    if _ends_as_in_place(name):  # torch.neg_
        other = getattr(torch, name[:-1], None) or getattr(F, name[:-1], None)
        node.target = other or target
        return first
    names: tuple[str, ...] = getattr(getattr(target, "__code__", None), "co_varnames", ())
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    if "inplace" in names and given.pop("inplace", False):  # F.hardsigmoid(x, inplace=True)
        first = given.pop(names[0])
        node.args, node.kwargs = (first,), given
        return first
    return None


def _ends_as_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def assigned(x: Tensor, place: Any, value: Any) -> Tensor:
    """`x` with `value` at `place`, as a new tensor."""
    x = x.clone()
    x[place] = value
    return x


_OPERATORS: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.imatmul: operator.matmul,
    operator.setitem: assigned,
}

_VIEWS = frozenset(
    "getitem view reshape permute transpose t squeeze unsqueeze expand flatten unflatten chunk "
    "split unbind narrow select getattr".split()
)


def _is_view(node: fx.Node) -> bool:
    return name_of(node) in _VIEWS and isinstance(node.args[0], fx.Node)


def _viewed(node: fx.Node) -> fx.Node:
    """What a view, or a view of a view, is one of."""
    while _is_view(node):
        node = cast(fx.Node, node.args[0])
    return node
