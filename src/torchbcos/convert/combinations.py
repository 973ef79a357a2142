"""Rules for linear combinations: sums with offsets, parts, selections, and what mixes images.

An explanation takes the images of a batch one by one, so none of these may combine two of them, and
constants that are added must be told apart by image.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from torchbcos import functional
from torchbcos.convert.rewriter import Kind, Rewriter, Value, name_of
from torchbcos.convert.trace import BATCH

__all__ = [
    "along_dimensions",
    "assignment",
    "item",
    "joined",
    "parts_of",
    "scaled_sum",
    "selection",
    "sum_of_two",
    "with_zeros",
]


def sum_of_two(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """a + b and a - b, where either may be a constant: an offset."""
    known = () if name_of(node) == "rsub" else ("alpha",)
    if len(node.args) != 2 or node.kwargs.keys() - known:
        return r.as_factor(node)
    a, b = node.args
    if "alpha" in node.kwargs:
        b = _times(r, node, b, node.kwargs["alpha"])
        node.args, node.kwargs = (a, b), {}
    minus = name_of(node) in ("sub", "rsub")
    if name_of(node) == "rsub":
        a, b = b, a
    if Kind.CONSTANT not in (r.value(a).kind, r.value(b).kind):
        if not minus:
            node.op, node.target = "call_function", functional.add
        return r.keep(node)
    if Kind.FACTOR in (r.value(a).kind, r.value(b).kind):
        return r.keep(node)
    if name_of(node) == "sub" and r.is_normalisation(node):
        return r.remove(node)
    if not _images_come_first(r, node):
        return r.as_factor(node)
    if r.value(a).kind is Kind.CONSTANT:
        a, b = (r.insert(node, torch.neg, b) if minus else b), a
    elif minus:
        b = _times(r, node, b, -1)
    value = r.value(a)
    r.put_function(node, functional.add_offset, (a, b), "offset added")
    return value


def _times(r: Rewriter, node: fx.Node, b: Any, number: Any) -> Any:
    """number · b, where bytes do not go round, which torch has in a sum with a signal."""
    if not isinstance(b, fx.Node):
        return b * number
    kind = b.meta.get("dtype", torch.float32)
    if not (kind.is_floating_point or kind.is_complex):
        b = r.insert(node, torch.Tensor.to, b, torch.get_default_dtype())
    return r.insert(node, operator.mul, b, number)


def scaled_sum(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """addcmul: a + b · c, taken apart."""
    if len(node.args) != 3 or node.kwargs:
        return r.as_factor(node)
    a, b, c = node.args
    product = r.insert(node, operator.mul, b, c)
    product.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
    r.values[product] = r.visit(product)
    node.target, node.args = operator.add, (a, product)
    return sum_of_two(r, node, None)


def joined(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """cat and stack, where a constant among the parts (a class token) is an offset."""
    parts: Any = node.args[0] if isinstance(node.args[0], list | tuple) else ()
    if any(r.value(part).kind is Kind.CONSTANT for part in parts):
        if not _images_come_first(r, node):
            return r.as_factor(node)
        marked = [
            r.insert(node, functional.offset, p) if r.value(p).kind is Kind.CONSTANT else p
            for p in parts
        ]
        node.args = (marked, *node.args[1:])
    return r.keep(node)


def assignment(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """x[place] = value; what is there already or what is put there may be an offset."""
    x, place, value = node.args
    kinds = [r.value(a).kind for a in (x, value)]
    is_fixed = not any(
        isinstance(n, fx.Node) and r.value(n).kind is not Kind.CONSTANT for n in parts_of(place)
    )
    if not is_fixed or Kind.FACTOR in kinds or not _images_come_first(r, node):
        return r.as_factor(node)
    if kinds[0] is Kind.CONSTANT:
        node.args = (r.insert(node, functional.offset, x), place, value)
    elif kinds[1] is Kind.CONSTANT and value != 0:
        return r.as_factor(node)
    return r.keep(node)


def with_zeros(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """masked_fill, which is linear where zeros are filled in at fixed places."""
    is_zero = node.args[2:] == (0,) and not node.kwargs
    fixed = is_zero and r.value(node.args[1]).kind is Kind.CONSTANT
    return r.keep(node) if fixed else r.as_factor(node)


def along_dimensions(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """Means, rolls, pieces and the like: linear, but images must not mix."""
    name = name_of(node)
    x = node.args[0]
    at = 2 if name in _DIMENSION_LAST else 1
    named = [node.kwargs[n] for n in ("dim", "dims", "axis") if n in node.kwargs]
    given: Any = node.args[at] if len(node.args) > at else named[0] if named else None
    if name == "flip" and isinstance(given, int):
        given = node.args[at:]
    if given is None and name in ("chunk", "split", "tensorsplit", "unbind"):
        given = 0
    dims = [given] if isinstance(given, int) else given
    if dims is None or (not isinstance(dims, fx.Node) and r.are_images(x, dims)):
        return r.as_factor(node)
    if r.value(x).raw and not isinstance(dims, fx.Node) and name not in ("roll", "flip", "rot90"):
        _refuse_colours(r, node, dims)
    return r.keep(node)


_DIMENSION_LAST = frozenset("roll rot90 chunk split tensorsplit repeatinterleave".split())


def _refuse_colours(r: Rewriter, node: fx.Node, dims: Iterable[Any]) -> None:
    """The encoding has each colour twice, so that parts and sums of channels mean other things."""
    x: Any = node.args[0]
    count = len(x.meta.get("shape", ()))
    if any(isinstance(d, int) and d % max(count, 1) == count - 3 for d in dims):
        raise ValueError(
            f"{r.gm._get_name()} cannot be converted: `{name_of(node)}` at {r.place(node)} takes "
            "the channels of the image apart or together, and the encoded image has other ones, "
            "[r, g, b, 1-r, 1-g, 1-b]: let a layer of its own do that."
        )


def selection(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """|x| and maxima over channels or positions: what they pick is linear in what it is picked
    from, and they are homogeneous.
    """
    x, *others = node.args
    kinds = {r.value(x).kind}
    if name_of(node) in ("maximum", "minimum"):
        kinds |= {r.value(other).kind for other in others}
    elif name_of(node) not in ("abs", "absolute"):
        given: Any = others[0] if others else node.kwargs.get("dim", ())
        dims = [given] if isinstance(given, int) else given
        if isinstance(dims, fx.Node) or not dims or r.are_images(x, dims):
            return r.as_factor(node)
        if r.value(x).raw:
            _refuse_colours(r, node, dims)
    if kinds != {Kind.SIGNAL}:
        return r.as_factor(node)
    r.note(node, "kept")
    return r.value(x)


def item(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """A part of a tensor or of a tuple; the places of maxima and single images are no signal."""
    of, which = node.args
    first = which[0] if isinstance(which, tuple) and which else which
    places = isinstance(of, fx.Node) and name_of(of) in ("max", "min") and which == 1
    r.is_doubtful |= isinstance(first, fx.Node) and r.are_images(of, [0])  # in any order
    found = r.image_dims(of)
    some_images = len(r.image_dims(node)) < len(found)
    r.is_doubtful |= some_images and len(found) > 1
    return r.as_factor(node) if places or (some_images and len(found) == 1) else r.keep(node)


def _images_come_first(r: Rewriter, node: fx.Node) -> bool:
    """Offsets are kept apart image by image along the first dimension, so it must be theirs.

    A multiple of their number may be their windows, image after image, or not: numbers tell.
    """
    shape = node.meta.get("shape", ())
    if not shape:
        return True
    found = r.image_dims(node)
    r.is_doubtful |= 0 in found and (shape[0] != BATCH or len(found) > 1)
    return 0 in found


def parts_of(place: Any) -> Iterable[Any]:
    """What an index is made of."""
    if isinstance(place, tuple | list):
        return [inner for part in place for inner in parts_of(part)]
    return [place.start, place.stop, place.step] if isinstance(place, slice) else [place]
