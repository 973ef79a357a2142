"""Rules for products of two things that depend on the image: gates, lengths and attention.

One of the two stays a signal; the other is held constant in an explanation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from torchbcos import functional
from torchbcos.convert.rewriter import Kind, Rewriter, Value, name_of
from torchbcos.convert.twins import attention_twin

__all__ = [
    "attention",
    "attention_module",
    "matrix_product",
    "product",
    "product_by_indices",
    "quotient",
    "unit_length",
]


def product(r: Rewriter, node: fx.Node, _: Any) -> Value:
    a, b = node.args[0], node.args[1]
    kinds = (r.value(a).kind, r.value(b).kind)
    if Kind.CONSTANT in kinds:
        return r.keep(node)
    if Kind.SIGNAL not in kinds:
        return r.as_factor(node)
    if kinds[0] is Kind.FACTOR:
        a, b = b, a
    r.put_function(node, functional.gate, (a, b), "gate: second factor held constant")
    return r.value(a)


def quotient(r: Rewriter, node: fx.Node, _: Any) -> Value:
    a, b = node.args[0], node.args[1]
    if node.kwargs.get("rounding_mode") is not None:
        return r.as_factor(node)
    if r.value(b).kind is Kind.CONSTANT:
        return r.remove(node) if r.is_normalisation(node) else r.keep(node)
    if r.value(a).kind is not Kind.SIGNAL:
        return r.as_factor(node)
    inverse = r.insert(node, torch.reciprocal, b)
    r.put_function(node, functional.gate, (a, inverse), "gate: divisor held constant")
    return r.value(a)


def unit_length(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """F.normalize: the length is a divisor like any other."""
    given = dict(zip(("input", "p", "dim", "eps"), node.args, strict=False)) | dict(node.kwargs)
    x = given["input"]
    if given.pop("out", None) is not None or r.value(x).kind is not Kind.SIGNAL:
        return r.as_factor(node)
    order, dim, eps = given.get("p", 2.0), given.get("dim", 1), given.get("eps", 1e-12)
    length = r.insert(node, torch.linalg.vector_norm, x, order, dim, True)
    inverse = r.insert(node, torch.reciprocal, r.insert(node, torch.clamp_min, length, eps))
    r.put_function(node, functional.gate, (x, inverse), "gate: length held constant")
    return r.value(x)


def matrix_product(r: Rewriter, node: fx.Node, _: Any) -> Value:
    a, b = node.args[0], node.args[1]
    if r.are_images(a, [-1]) or r.are_images(b, [-2]):
        return r.as_factor(node)
    kinds = (r.value(a).kind, r.value(b).kind)
    if Kind.CONSTANT in kinds:
        return r.keep(node)
    if Kind.SIGNAL not in kinds:
        return r.as_factor(node)
    args: list[Any] = [a, b]
    kept = 1 if kinds[1] is Kind.SIGNAL else 0
    args[1 - kept] = r.insert(node, functional.hold, args[1 - kept])
    r.put_function(node, torch.matmul, tuple(args), "one side held constant")
    return r.value(args[kept])


def product_by_indices(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """einsum of two tensors."""
    if len(node.args) != 3 or not isinstance(node.args[0], str):
        return r.as_factor(node)
    if _sums_images(r, node.args[0], node.args[1:]):
        return r.as_factor(node)
    kinds = [r.value(a).kind for a in node.args[1:]]
    if Kind.CONSTANT in kinds:
        return r.keep(node)
    if Kind.SIGNAL not in kinds:
        return r.as_factor(node)
    args: list[Any] = list(node.args)
    kept = 2 if kinds[1] is Kind.SIGNAL else 1
    args[3 - kept] = r.insert(node, functional.hold, args[3 - kept])
    r.put_function(node, torch.einsum, tuple(args), "one side held constant")
    return r.value(args[kept])


def _sums_images(r: Rewriter, equation: str, factors: Sequence[Any]) -> bool:
    terms, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        result = "".join(letter for letter in terms if terms.count(letter) == 1)
    return any(
        r.are_images(x, [i - len(term) for i, name in enumerate(term) if name not in result])
        for x, term in zip(factors, terms.split(","), strict=True)
    )


def attention(r: Rewriter, node: fx.Node, _: Any) -> Value:
    q, k, v = node.args[:3]
    if r.value(v).kind is not Kind.SIGNAL or r.are_images(v, [-2]):
        return r.as_factor(node)
    r.note(node, "attention weights held constant")

    def hold(value: Any) -> Any:  # a mask may depend on the image as well
        held = r.value(value).kind is not Kind.CONSTANT
        return r.insert(node, functional.hold, value) if held else value

    node.args = (hold(q), hold(k), v, *map(hold, node.args[3:]))
    node.kwargs = {name: hold(value) for name, value in node.kwargs.items()}
    return r.value(v)


def attention_module(r: Rewriter, node: fx.Node, module: Any) -> Value:
    """Linear in what is attended to; all else is in the attention weights, which are held.

    What is attended to must be places, and not the images of a batch.
    """
    is_plain = isinstance(module, nn.MultiheadAttention)
    names = _ATTENTION_ARGUMENTS if is_plain else ("src",)  # encoders attend to what they are given
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    attended = given.get("value" if is_plain else "src")
    value = r.value(attended)
    twin = attention_twin(module, r.options.b, r.options.max_out, bool(r.options.norm))
    if twin is None or value.kind is not Kind.SIGNAL or value.raw:
        return r.as_factor(node)
    layers = [m for m in module.modules() if isinstance(m, nn.MultiheadAttention)]
    if r.are_images(attended, [-2] if all(m.batch_first for m in layers) else [0]):
        return r.as_factor(node)
    if is_plain:
        if not all(name_of(u) == "getitem" and (u.args[1] == 0 or not u.users) for u in node.users):
            return r.as_factor(node)  # attention weights are no signal
        node.args, node.kwargs = (), {**given, "need_weights": False}
    r.put_module(node, twin)
    return value


_ATTENTION_ARGUMENTS = (
    "query", "key", "value", "key_padding_mask", "need_weights", "attn_mask",
    "average_attn_weights", "is_causal",
)  # fmt: skip
