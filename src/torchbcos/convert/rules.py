"""The rule table: what becomes of each operation of a conventional network."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from torchbcos import functional
from torchbcos.convert.rewriter import CONSTANT, Kind, Rewriter, Rule, Value, name_of
from torchbcos.convert.trace import BATCH, class_key, is_auxiliary
from torchbcos.convert.twins import (
    ATTENTION,
    SHIFTED_WINDOWS,
    attention_twin,
    average_pool,
    bcos_convolution,
    bcos_linear,
    uncentred_norm,
)

__all__ = ["LEAF_NAMES", "rule_for"]

# Names are those of functions and methods, without a trailing or leading "i"/"_" for "in place",
# and those of module classes in lower case. ReLU-like activations only shape a signal: they go.
ACTIVATIONS = frozenset(
    "relu relu6 leakyrelu elu selu celu gelu silu mish hardswish prelu rrelu hardtanh softplus "
    "swish hardmish gelutanh quickgelu preluact swishjit hardswishjit mishjit threshold "
    "starrelu softsign hardshrink softshrink tanhshrink logsigmoid".split()
)
DROPOUTS = frozenset(
    "dropout dropout1d dropout2d dropout3d alphadropout featurealphadropout featuredropout "
    "droppath dropblock2d dropblock stochasticdepth".split()
)
LINEAR = frozenset(
    "avgpool1d avgpool2d avgpool3d adaptiveavgpool1d adaptiveavgpool2d adaptiveavgpool3d "
    "mean sum neg cat concat stack flatten unflatten view reshape permute transpose t squeeze "
    "unsqueeze contiguous chunk split tensorsplit unbind getitem narrow select roll flip expand "
    "repeat clone to float half double movedim swapaxes swapdims interpolate "
    "upsample pixelshuffle pixelunshuffle channelshuffle unfold fold identity cumsum "
    "zeropad1d zeropad2d zeropad3d reflectionpad1d reflectionpad2d reflectionpad3d "
    "replicationpad1d replicationpad2d replicationpad3d circularpad1d circularpad2d circularpad3d "
    "upsamplingnearest2d upsamplingbilinear2d patchmergingpad".split()
)
NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)
NORM_NAMES = frozenset("frozenbatchnorm2d layernorm2d groupnorm1".split())
SIZES = frozenset("size dim numel ndimension".split())
FUNCTIONAL_NORMS = frozenset(
    "batchnorm layernorm groupnorm instancenorm localresponsenorm rmsnorm".split()
)
#: Modules of these names are not looked into, whichever library they come from.
LEAF_NAMES = ACTIVATIONS | DROPOUTS | NORM_NAMES | SHIFTED_WINDOWS


# The rules.


def _remove(r: Rewriter, node: fx.Node, _: Any) -> Value:
    return r.remove(node)


def _keep(r: Rewriter, node: fx.Node, _: Any) -> Value:
    r.note(node, "kept")
    return r.joined(node)


def _size(r: Rewriter, node: fx.Node, _: Any) -> Value:
    return CONSTANT


def _attribute(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """x.shape and the like are no signal; x.mT is one."""
    if node.args[1] in ("T", "mT", "H", "mH", "data"):
        return _keep(r, node, None)
    return CONSTANT


def _like_another(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """a.expand_as(b): only the shape of b matters."""
    r.note(node, "kept")
    return r.value(node.args[0])


def _unknown(r: Rewriter, node: fx.Node, _: Any) -> Value:
    r.note(node, "kept as a factor")
    return r.factor(node)


def _layer(r: Rewriter, node: fx.Node, module: Any) -> Value:
    """A convolution or a linear layer."""
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return _unknown(r, node, module)
    value = r.joined(node)
    make = bcos_linear if isinstance(module, nn.Linear) else bcos_convolution
    r.put_module(node, make(module, 2 if value.raw else 1, r.options.b, r.options.max_out))
    return replace(value, raw=False)


def _functional_layer(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """F.conv2d and F.linear: a learned weight gets the transform, a fixed filter stays."""
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    if not isinstance(weight, fx.Node) or r.value(weight).kind is not Kind.CONSTANT:
        return _unknown(r, node, None)
    name = name_of(node)
    given = dict(zip(_CONV_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    given.pop("bias", None)
    if not _is_learned(r.gm, weight):
        node.args, node.kwargs = (), given
        return _keep(r, node, None)
    function = getattr(functional, f"bcos_{name}")
    r.put_function(node, function, (), f"bcos_{name}")
    node.kwargs = {**given, "b": r.options.b}
    return replace(r.joined(node), raw=False)


def _is_learned(gm: fx.GraphModule, weight: fx.Node) -> bool:
    """Whether a parameter is among what the weight is made of."""
    if weight.op == "get_attr":
        return isinstance(operator.attrgetter(str(weight.target))(gm), nn.Parameter)
    return any(_is_learned(gm, source) for source in weight.all_input_nodes)


_CONV_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def _norm(r: Rewriter, node: fx.Node, module: Any) -> Value:
    new = uncentred_norm(module) if r.options.norm else None
    if new is None:
        return r.remove(node)
    r.put_module(node, new)
    return r.joined(node)


def _max_pool(r: Rewriter, node: fx.Node, module: Any) -> Value:
    if module is not None:
        new = average_pool(module)
        if new is None:
            return _unknown(r, node, module)
        r.put_module(node, new)
        return r.joined(node)
    names = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.pop("dilation", 1) not in (1, [1, 1], (1, 1)) or given.pop("return_indices", False):
        return _unknown(r, node, module)
    name = f"avg_pool{name_of(node)[-2:]}"
    average = getattr(functional, name, None) or getattr(F, name)
    r.put_function(node, average, (given.pop("input"),), "average pool")
    node.kwargs = given
    return r.joined(node)


def _adaptive_max_pool(r: Rewriter, node: fx.Node, module: Any) -> Value:
    if module is not None:
        return _max_pool(r, node, module)
    names = ("input", "output_size", "return_indices")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.get("return_indices"):
        return _unknown(r, node, module)
    average = getattr(F, f"adaptive_avg_pool{name_of(node)[-2:]}")
    r.put_function(node, average, (given["input"], given["output_size"]), "average pool")
    return r.joined(node)


def _average_pool(r: Rewriter, node: fx.Node, module: Any) -> Value:
    if type(module) is not nn.AvgPool2d:
        return _keep(r, node, module)
    new = average_pool(module)
    assert new is not None
    r.put_module(node, new, "kept")
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
    if node.kwargs.get("rounding_mode") is not None:
        return _unknown(r, node, None)
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
    args: list[Any] = [a, b]
    kept = 1 if kinds[1] is Kind.SIGNAL else 0
    args[1 - kept] = r.insert(node, functional.hold, args[1 - kept])
    r.put_function(node, torch.matmul, tuple(args), "one side held constant")
    return r.value(args[kept])


def _attention(r: Rewriter, node: fx.Node, _: Any) -> Value:
    q, k, v = node.args[:3]
    if r.value(v).kind is not Kind.SIGNAL:
        return _unknown(r, node, None)
    r.note(node, "attention weights held constant")

    def hold(value: Any) -> Any:  # a mask may depend on the image as well
        held = r.value(value).kind is not Kind.CONSTANT
        return r.insert(node, functional.hold, value) if held else value

    node.args = (hold(q), hold(k), v, *map(hold, node.args[3:]))
    node.kwargs = {name: hold(value) for name, value in node.kwargs.items()}
    return r.value(v)


def _attention_module(r: Rewriter, node: fx.Node, module: Any) -> Value:
    """Linear in what is attended to; all else is in the attention weights, which are held."""
    is_plain = isinstance(module, nn.MultiheadAttention)
    names = _ATTENTION_ARGUMENTS if is_plain else ("src",)  # encoders attend to what they are given
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    value = r.value(given.get("value" if is_plain else "src"))
    twin = attention_twin(module, r.options.b, r.options.max_out, bool(r.options.norm))
    if twin is None or value.kind is not Kind.SIGNAL or value.raw:
        return _unknown(r, node, module)
    if is_plain:
        if not all(name_of(u) == "getitem" and (u.args[1] == 0 or not u.users) for u in node.users):
            return _unknown(r, node, module)  # attention weights are no signal
        node.args, node.kwargs = (), {**given, "need_weights": False}
    r.put_module(node, twin)
    return value


_ATTENTION_ARGUMENTS = (
    "query", "key", "value", "key_padding_mask", "need_weights", "attn_mask",
    "average_attn_weights", "is_causal",
)  # fmt: skip


def _product_by_indices(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """einsum of two tensors."""
    if len(node.args) != 3 or not isinstance(node.args[0], str):
        return _unknown(r, node, None)
    kinds = [r.value(a).kind for a in node.args[1:]]
    if Kind.CONSTANT in kinds:
        return _keep(r, node, None)
    if Kind.SIGNAL not in kinds:
        return _unknown(r, node, None)
    args: list[Any] = list(node.args)
    kept = 2 if kinds[1] is Kind.SIGNAL else 1
    args[3 - kept] = r.insert(node, functional.hold, args[3 - kept])
    r.put_function(node, torch.einsum, tuple(args), "one side held constant")
    return r.value(args[kept])


def _sum(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """a + b and a - b, where either may be a constant: an offset."""
    if len(node.args) != 2 or node.kwargs or not _batch_comes_first(r, node):
        return _unknown(r, node, None)
    a, b = node.args
    minus = name_of(node) in ("sub", "rsub")
    if name_of(node) == "rsub":
        a, b = b, a
    if Kind.CONSTANT not in (r.value(a).kind, r.value(b).kind):
        if not minus:
            node.op, node.target = "call_function", functional.add
        return _keep(r, node, None)
    if r.value(a).kind is Kind.CONSTANT:
        a, b = (r.insert(node, torch.neg, b) if minus else b), a
    elif minus:
        b = r.insert(node, torch.neg, b) if isinstance(b, fx.Node) else -b  # type: ignore[operator]
    value = r.value(a)
    r.put_function(node, functional.add_offset, (a, b), "offset added")
    return value


def _batch_comes_first(r: Rewriter, node: fx.Node) -> bool:
    """Offsets are kept apart image by image along the first dimension, so it must be theirs."""
    constants = [n for n in node.all_input_nodes if r.value(n).kind is Kind.CONSTANT]
    shape = node.meta.get("shape", ())
    return not constants or not shape or shape[0] % BATCH == 0


def _scaled_sum(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """addcmul: a + b · c, taken apart."""
    if len(node.args) != 3 or node.kwargs:
        return _unknown(r, node, None)
    a, b, c = node.args
    product = r.insert(node, operator.mul, b, c)
    product.meta["nn_module_stack"] = node.meta.get("nn_module_stack")
    r.values[product] = r.visit(product)
    node.target, node.args = operator.add, (a, product)
    return _sum(r, node, None)


def _joined_with_offsets(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """cat and stack, where a constant among the parts (a class token) is an offset."""
    parts = node.args[0]
    if isinstance(parts, list | tuple):
        if not _batch_comes_first(r, node):
            return _unknown(r, node, None)
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
    name, shape = str(node.target), node.all_input_nodes[0].meta["shape"]
    r.put_module(node, r.convert_auxiliary(name, module, shape), "B-cos, runs in training only")
    return r.joined(node)


def _table(*entries: tuple[Iterable[str], Rule]) -> dict[str, Rule]:
    return {name: rule for names, rule in entries for name in names}


_NAMED: dict[str, Rule] = _table(
    (ACTIVATIONS | DROPOUTS | FUNCTIONAL_NORMS, _remove),
    (LINEAR, _keep),
    (SIZES, _size),
    (["getattr"], _attribute),
    (["expandas", "reshapeas", "viewas", "typeas"], _like_another),
    (["cat", "concat", "concatenate", "stack"], _joined_with_offsets),
    (["add", "sub", "rsub"], _sum),
    (["addcmul"], _scaled_sum),
    (["mul", "multiply"], _product),
    (["div", "divide"], _quotient),
    (["matmul", "bmm", "mm"], _matrix_product),
    (["einsum"], _product_by_indices),
    (["scaleddotproductattention"], _attention),
    (["maxpool1d", "maxpool2d", "maxpool3d"], _max_pool),
    (["adaptivemaxpool1d", "adaptivemaxpool2d", "adaptivemaxpool3d"], _adaptive_max_pool),
    (["conv1d", "conv2d", "conv3d", "linear"], _functional_layer),
    (["pad"], _pad),
    (["inceptionoutputs", "googlenetoutputs"], _named_tuple),
)


def rule_for(node: fx.Node, module: nn.Module | None) -> Rule:
    """The rule for an operation: by the module's class, or by the function's or method's name."""
    if module is None:
        return _NAMED.get(name_of(node), _unknown)
    if isinstance(module, nn.modules.conv._ConvNd | nn.Linear):
        return _layer
    key = class_key(module)
    if isinstance(module, ATTENTION) or key in SHIFTED_WINDOWS:
        return _attention_module
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
    if isinstance(module, nn.AvgPool2d):
        return _average_pool
    return _keep if key in LINEAR else _unknown
