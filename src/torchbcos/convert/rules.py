"""The rule table: what becomes of each operation of a conventional network."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx, nn
from torch.fx.node import map_arg

from torchbcos import functional
from torchbcos.convert.combinations import (
    along_dimensions,
    assignment,
    item,
    joined,
    parts_of,
    scaled_sum,
    selection,
    sum_of_two,
    with_zeros,
)
from torchbcos.convert.pools import adaptive_max_pool, average_pool, max_pool
from torchbcos.convert.products import (
    attention,
    attention_module,
    matrix_product,
    product,
    product_by_indices,
    quotient,
    unit_length,
)
from torchbcos.convert.rewriter import CONSTANT, Kind, Rewriter, Rule, Value, name_of
from torchbcos.convert.trace import submodule
from torchbcos.convert.tracers import class_key, is_auxiliary
from torchbcos.convert.twins import (
    ATTENTION,
    SHIFTED_WINDOWS,
    bcos_convolution,
    bcos_linear,
    bcos_upsampling,
    device_and_dtype,
    functional_norm,
    functional_twin,
    uncentred_norm,
)

__all__ = ["LEAF_NAMES", "activations_among", "rule_for"]

# Names are those of functions and methods, without a trailing or leading "i"/"_" for "in place",
# and those of module classes in lower case. ReLU-like activations only shape a signal: they go.
ACTIVATIONS = frozenset(
    "relu relu6 leakyrelu elu selu celu gelu silu mish hardswish prelu rrelu hardtanh softplus "
    "swish hardmish gelutanh quickgelu preluact swishjit hardswishjit mishjit threshold "
    "starrelu squaredrelu softsign hardshrink softshrink tanhshrink logsigmoid".split()
)
#: These are factors of gates and attention, or activations: where one breaks the map, it goes too.
SQUASHING = frozenset("sigmoid tanh hardsigmoid square".split())
PROBABILITIES = frozenset("softmax logsoftmax".split())  # the same, where they are returned
DROPOUTS = frozenset(
    "dropout dropout1d dropout2d dropout3d alphadropout featurealphadropout featuredropout "
    "droppath dropblock2d dropblock stochasticdepth".split()
)
LINEAR = frozenset(
    "neg cat concat stack flatten unflatten view reshape permute transpose t squeeze "
    "unsqueeze contiguous expand repeat tile clone float half double movedim swapaxes swapdims "
    "identity patchmergingpad".split()
)
OVER_PLACES = frozenset(  # linear, but of several places at once
    "avgpool1d avgpool2d avgpool3d adaptiveavgpool1d adaptiveavgpool2d adaptiveavgpool3d "
    "interpolate upsample upsamplingnearest2d upsamplingbilinear2d "
    "pixelshuffle pixelunshuffle channelshuffle unfold fold "
    "zeropad1d zeropad2d zeropad3d reflectionpad1d reflectionpad2d reflectionpad3d "
    "replicationpad1d replicationpad2d replicationpad3d circularpad1d circularpad2d "
    "circularpad3d".split()
)
ALONG = frozenset(
    "mean sum cumsum roll flip rot90 chunk split tensorsplit unbind narrow select indexselect "
    "repeatinterleave".split()
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
FROM_SIZES = frozenset("zeroslike oneslike newzeros newones".split())
FUNCTIONAL_NORMS = frozenset(
    "batchnorm layernorm groupnorm instancenorm localresponsenorm rmsnorm".split()
)
#: Modules of these names are not looked into, whichever library they come from.
LEAF_NAMES = ACTIVATIONS | DROPOUTS | NORM_NAMES | SHIFTED_WINDOWS


# The rules.


def _remove(r: Rewriter, node: fx.Node, _: Any) -> Value:
    return r.remove(node)


def _keep(r: Rewriter, node: fx.Node, _: Any) -> Value:
    return r.keep(node)


def _keep_over_places(r: Rewriter, node: fx.Node, _: Any) -> Value:
    return r.keep_over_places(node)


def _to(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """To another device or type, of which whole numbers round."""
    types = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, torch.dtype)]
    rounds = any(not t.is_floating_point for t in types)
    return r.as_factor(node) if rounds else r.keep(node)


def _size(r: Rewriter, node: fx.Node, _: Any) -> Value:
    return CONSTANT


def _attribute(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """x.shape and the like are no signal; x.mT is one, and so are the values of a maximum."""
    if node.args[1] in ("T", "mT", "H", "mH", "values"):
        return r.keep(node)
    return CONSTANT if node.args[1] in _FACTS else r.as_factor(node)


_FACTS = frozenset("shape ndim dtype device layout is_cuda requires_grad itemsize nbytes".split())


def _like_another(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """a.expand_as(b): only the shape of b matters."""
    r.note(node, "kept")
    return r.value(node.args[0])


def _unknown(r: Rewriter, node: fx.Node, _: Any) -> Value:
    return r.as_factor(node)


def _layer(r: Rewriter, node: fx.Node, module: Any) -> Value:
    """A convolution or a linear layer."""
    value = r.joined(node)
    r.doubt_unless_images_lead(node.all_input_nodes[0])
    if _does_more(module, node.all_input_nodes[0].meta.get("shape", ())):
        return r.as_factor(node)
    if value.raw and getattr(module, "groups", 1) > 1:
        _pair_channels(r, node, node.all_input_nodes[0], module.in_channels)
    how = (2 if value.raw else 1, r.options.b, r.options.max_out)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        upsampling = bcos_upsampling(module, *how)
        if upsampling is None:
            return r.as_factor(node)
        r.put_module(node, upsampling, "BcosConv2d and PixelShuffle")
    else:
        make = bcos_linear if isinstance(module, nn.Linear) else bcos_convolution
        r.put_layer(node, module, make(module, *how))
    return replace(value, raw=False)


def _does_more(module: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether a layer's own code does more than the layer: weights of other layers, an output where
    its weights are zeros, as where it adds its input, or one that does not grow with the input. An
    activation grows with it, and goes with others.
    """
    is_torchs = type(module).forward.__module__.startswith("torch.nn.")
    if is_torchs or any(p.is_meta for p in module.parameters()):
        return False
    if any(next(child.parameters(), None) is not None for child in module.children()):
        return True
    module = copy.deepcopy(module).eval()
    with torch.no_grad(), suppress(Exception):  # it is code of any kind
        weight = next(module.parameters())
        x = torch.linspace(-1, 1, math.prod((2, *shape[1:]))).view(2, *shape[1:]).to(weight)
        if getattr(module, "bias", None) is not None:
            module.bias.zero_()  # type: ignore[operator]
        once, twice = module(x).double(), module(2 * x).double()
        if (twice - 2 * once).abs().max() > 1e-2 * twice.abs().max():
            return True
        for parameter in module.parameters():
            parameter.zero_()
        return bool(module(torch.ones_like(x)).any())
    return False


def _pair_channels(r: Rewriter, node: fx.Node, x: fx.Node, channels: int) -> None:
    """[r, g, b, 1-r, 1-g, 1-b] as [r, 1-r, g, 1-g, b, 1-b], for groups of channels."""
    apart = r.insert(node, torch.unflatten, x, 1, (2, channels))
    paired = r.insert(node, torch.transpose, apart, 1, 2)
    node.replace_input_with(x, r.insert(node, torch.flatten, paired, 1, 2))


def _functional_layer(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """F.conv2d and F.linear: a learned weight gets the transform and loses its bias."""
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    if not isinstance(weight, fx.Node) or r.value(weight).kind is not Kind.CONSTANT:
        return r.as_factor(node)
    name = name_of(node)
    given: dict[str, Any] = dict(zip(_CONV_ARGUMENTS, node.args, strict=False)) | node.kwargs
    bias = given.pop("bias", None)
    if not _is_learned(r, weight):
        return _fixed_filter(r, node, given, bias)
    value = r.joined(node)
    is_tied = weight.op == "get_attr" and _is_a_layers(r, weight)
    alone = weight.op == "get_attr" and len(weight.users) == 1 and not is_tied
    if alone and not any(isinstance(v, fx.Node) for v in _options(given)):
        parameter = operator.attrgetter(str(weight.target))(r.gm)
        widen = 2 if value.raw else 1
        layer = functional_twin(name, parameter, given, widen, r.options.b, r.options.max_out)
        node.op, node.target = "call_module", f"{weight.target}_layer"
        node.args, node.kwargs = (given["input"],), {}
        if value.raw and given.get("groups", 1) > 1:
            _pair_channels(r, node, given["input"], parameter.shape[1] * given["groups"])
        r.gm.add_submodule(node.target, layer)
        r.put_module(node, layer)
        return replace(value, raw=False)
    function = getattr(functional, f"bcos_{name}")
    r.put_function(node, function, (), f"bcos_{name}")
    node.kwargs = {**given, "b": r.options.b, "max_out": r.options.max_out if is_tied else 1}
    return replace(value, raw=False)


def _fixed_filter(r: Rewriter, node: fx.Node, given: dict[str, Any], bias: Any) -> Value:
    """It stays, and its bias is an offset."""
    if bias is None:
        node.args, node.kwargs = (), given
        return r.keep(node)
    r.note(node, "kept")
    name, function = name_of(node), cast(Callable[..., Any], node.target)
    dims = 0 if name == "linear" else int(name[-2])
    filtered = r.insert(node, function, given.pop("input"), **given)
    node.target, node.kwargs = operator.add, {}
    node.args = (filtered, r.insert(node, torch.reshape, bias, (-1, *[1] * dims)))
    return sum_of_two(r, node, None)


def _options(given: dict[str, Any]) -> list[Any]:
    return [
        part for name, v in given.items() if name not in ("input", "weight") for part in parts_of(v)
    ]


def _is_learned(r: Rewriter, weight: fx.Node) -> bool:
    """Whether a parameter is among what the weight is made of."""
    if weight.op == "get_attr":
        return weight.target in r.learned
    return any(_is_learned(r, source) for source in weight.all_input_nodes)


def _is_a_layers(r: Rewriter, weight: fx.Node) -> bool:
    """Whether a layer that is called has this weight, and so its B-cos twin."""
    owner = str(weight.target).rpartition(".")[0]
    return bool(owner) and any(
        n.op == "call_module" and n.target == owner for n in r.gm.graph.nodes
    )


_CONV_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def _norm(r: Rewriter, node: fx.Node, module: Any) -> Value:
    if not r.options.norm:
        return r.remove(node)
    new = uncentred_norm(module)
    if new is None:
        return r.remove(node, NO_TWIN)
    r.put_module(node, new)
    return r.joined(node)


NO_TWIN = "removed: it has no uncentred form"


def _functional_norm(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """F.layer_norm and the like: a module, whose weight is new."""
    if not r.options.norm:
        return r.remove(node)
    x = node.all_input_nodes[0]
    args: Any
    kwargs: Any
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("size", n))
    if node.target in (torch.batch_norm, torch.instance_norm):  # in an order of their own
        image, weight, bias, mean, variance, *rest = args
        args = (image, mean, variance, weight, bias, *rest)
    own = device_and_dtype(r.gm)
    original = functional_norm(name_of(node), args, kwargs, x.meta.get("shape", ()), own)
    new = None if original is None else uncentred_norm(original)
    if original is None or new is None:
        return r.remove(node, NO_TWIN)
    node.op, node.target = "call_module", f"{node.name}_norm"
    node.args, node.kwargs = (x,), {}
    r.gm.add_submodule(node.target, original)
    r.put_module(node, new)
    return r.joined(node)


def _clamp(r: Rewriter, node: fx.Node, _: Any) -> Value:
    """An activation, unless it keeps a divisor or another factor within bounds."""
    value = r.value(node.args[0])
    if value.kind is Kind.SIGNAL:
        return r.remove(node)
    return r.as_factor(node)


def _pad(r: Rewriter, node: fx.Node, _: Any) -> Value:
    value = node.args[3] if len(node.args) > 3 else node.kwargs.get("value")
    return r.keep_over_places(node) if not value else r.as_factor(node)


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
    (ACTIVATIONS | DROPOUTS, _remove),
    (FUNCTIONAL_NORMS, _functional_norm),
    (LINEAR, _keep),
    (OVER_PLACES, _keep_over_places),
    (["to"], _to),
    (SIZES | FROM_SIZES, _size),
    (["getattr"], _attribute),
    (["expandas", "reshapeas", "viewas", "typeas"], _like_another),
    (["cat", "concat", "concatenate", "stack"], joined),
    (["add", "sub", "rsub"], sum_of_two),
    (["addcmul"], scaled_sum),
    (["mul", "multiply"], product),
    (["div", "divide"], quotient),
    (["matmul", "bmm", "mm"], matrix_product),
    (["einsum"], product_by_indices),
    (["scaleddotproductattention"], attention),
    (["maxpool1d", "maxpool2d", "maxpool3d"], max_pool),
    (["adaptivemaxpool1d", "adaptivemaxpool2d", "adaptivemaxpool3d"], adaptive_max_pool),
    (["conv1d", "conv2d", "conv3d", "linear"], _functional_layer),
    (["pad"], _pad),
    (["clamp", "clip", "clampmin", "clampmax"], _clamp),
    (["abs", "absolute", "max", "min", "amax", "amin", "maximum", "minimum"], selection),
    (["getitem"], item),
    (ALONG, along_dimensions),
    (["normalize"], unit_length),
    (["assigned"], assignment),
    (["maskedfill"], with_zeros),
    (["inceptionoutputs", "googlenetoutputs"], _named_tuple),
)


def activations_among(gm: fx.GraphModule, names: set[str]) -> frozenset[str]:
    """Of the operations of these names, those that a network can do without."""
    found = set()
    for node in gm.graph.nodes:
        if node.name in names:
            kind = name_of(node) if node.op != "call_module" else class_key(submodule(gm, node))
            returned = all(user.op == "output" for user in node.users)
            if kind in SQUASHING or (kind in PROBABILITIES and returned):
                found.add(node.name)
    return frozenset(found)


def rule_for(node: fx.Node, module: nn.Module | None) -> Rule:
    """The rule for an operation: by the module's class, or by the function's or method's name."""
    if module is None:
        return _NAMED.get(name_of(node), _unknown)
    if isinstance(module, nn.modules.conv._ConvNd | nn.Linear):
        return _layer
    key = class_key(module)
    if isinstance(module, ATTENTION) or key in SHIFTED_WINDOWS:
        return attention_module
    if isinstance(module, NORMS) or key in NORM_NAMES:
        return _norm
    if isinstance(module, nn.modules.dropout._DropoutNd) or key in ACTIVATIONS | DROPOUTS:
        return _remove
    if is_auxiliary(module):
        return _auxiliary
    if isinstance(module, nn.modules.pooling._MaxPoolNd):
        return max_pool
    if isinstance(module, nn.modules.pooling._AdaptiveMaxPoolNd):
        return adaptive_max_pool
    if isinstance(module, nn.AvgPool2d):
        return average_pool
    if isinstance(module, nn.modules.padding._ConstantPadNd):
        return _unknown if module.value else _keep_over_places
    if key in OVER_PLACES:
        return _keep_over_places
    return _keep if key in LINEAR else _unknown
