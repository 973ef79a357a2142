"""For a module of a conventional network, the module that takes its place."""

from __future__ import annotations

import copy
import itertools
import math
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from torchbcos import attention, norms
from torchbcos.convert.tracers import class_key
from torchbcos.layers import AvgPool2d, BcosConv1d, BcosConv2d, BcosConv3d, BcosLayer, BcosLinear

__all__ = [
    "ATTENTION",
    "SHIFTED_WINDOWS",
    "attention_twin",
    "average_pool",
    "bcos_convolution",
    "bcos_linear",
    "bcos_upsampling",
    "device_and_dtype",
    "functional_norm",
    "functional_twin",
    "uncentred_norm",
]

_CONV = {1: BcosConv1d, 2: BcosConv2d, 3: BcosConv3d}
_AVG_POOL = {1: nn.AvgPool1d, 2: AvgPool2d, 3: nn.AvgPool3d}
_BATCH_NORM = {
    1: norms.UncentredBatchNorm1d,
    2: norms.UncentredBatchNorm2d,
    3: norms.UncentredBatchNorm3d,
}


def bcos_convolution(module: Any, widen: int, b: float, max_out: int) -> BcosLayer:
    """`widen` is 2 for a layer that sees the encoded image, which has twice the channels."""
    padding = module.padding
    if "conv2dsame" in class_key(module):  # timm's, which pad in their own forward
        padding = tuple(k // 2 for k in module.kernel_size)
    return _CONV[len(module.kernel_size)](
        module.in_channels * widen,
        module.out_channels,
        module.kernel_size,
        module.stride,
        padding,
        module.dilation,
        module.groups,
        padding_mode=module.padding_mode,
        device=module.weight.device,
        dtype=module.weight.dtype,
        b=b,
        max_out=max_out,
    )


def bcos_upsampling(module: Any, widen: int, b: float, max_out: int) -> nn.Module | None:
    """For a transposed convolution that multiplies the size: one B-cos unit for each pixel that a
    position becomes, so that each has a weight of its own to align; None for others.
    """
    factors = set(module.stride)
    if len(module.kernel_size) != 2 or len(factors) > 1 or set(module.dilation) != {1}:
        return None
    (factor,) = factors
    gains = zip(module.kernel_size, module.padding, module.output_padding, strict=True)
    if any(k + more - 2 * pad != factor for k, pad, more in gains):
        return None
    # Odd kernels that see at least what the transposed one saw.
    kernel = [2 * math.ceil(max(k - factor, 0) / (2 * factor)) + 1 for k in module.kernel_size]
    conv = BcosConv2d(
        module.in_channels * widen,
        module.out_channels * factor**2,
        kernel,
        padding=[k // 2 for k in kernel],
        groups=module.groups,
        device=module.weight.device,
        dtype=module.weight.dtype,
        b=b,
        max_out=max_out,
    )
    return nn.Sequential(conv, nn.PixelShuffle(factor))


def bcos_linear(module: nn.Linear, widen: int, b: float, max_out: int) -> BcosLayer:
    return BcosLinear(
        module.in_features * widen,
        module.out_features,
        device=module.weight.device,
        dtype=module.weight.dtype,
        b=b,
        max_out=max_out,
    )


def functional_twin(
    name: str, weight: nn.Parameter, given: dict[str, Any], widen: int, b: float, max_out: int
) -> BcosLayer:
    """For F.linear, F.conv1d, … with a weight of its own: the layer."""
    how: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype, "b": b}
    how["max_out"] = max_out
    if name == "linear":
        return BcosLinear(weight.shape[1] * widen, weight.shape[0], **how)
    geometry = {k: v for k, v in given.items() if k in ("stride", "padding", "dilation", "groups")}
    channels = weight.shape[1] * given.get("groups", 1) * widen
    kernel = tuple(weight.shape[2:])
    return _CONV[len(kernel)](channels, weight.shape[0], kernel, **geometry, **how)


def average_pool(module: Any) -> nn.Module | None:
    """For a pool the average pool of its geometry; None where there is none (dilation)."""
    if type(module) is nn.AvgPool2d:
        own = (module.kernel_size, module.stride, module.padding, module.ceil_mode)
        return AvgPool2d(*own, module.count_include_pad, module.divisor_override)
    if getattr(module, "return_indices", False):
        return None
    dims = next(d for d in (1, 2, 3) if f"{d}d" in type(module).__name__.lower())
    if isinstance(module, nn.modules.pooling._AdaptiveMaxPoolNd):
        pool: nn.Module = getattr(nn, f"AdaptiveAvgPool{dims}d")(module.output_size)
        return pool
    if module.dilation not in (1, (1,), (1, 1), (1, 1, 1)):
        return None
    padding = module.padding
    if class_key(module) == "maxpool2dsame":  # timm's, which pads in its own forward
        padding = tuple(k // 2 for k in module.kernel_size)
    geometry = (module.kernel_size, module.stride, padding, module.ceil_mode)
    average: nn.Module = _AVG_POOL[dims](*geometry, count_include_pad=True)
    return average


def uncentred_norm(module: Any) -> nn.Module | None:
    """The dynamic-linear norm, without bias, in place of `module`; None where there is none."""
    eps = getattr(module, "eps", None) or 1e-5
    affine = getattr(module, "affine", True)
    own = device_and_dtype(module)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        shape, affine = list(module.normalized_shape), module.elementwise_affine
        over_channels = "2d" in class_key(module) or _takes_maps(module, shape)
        if isinstance(module, nn.RMSNorm):
            return None if over_channels else norms.RMSNorm(shape, module.eps, affine, **own)
        if over_channels:
            return norms.UncentredPositionNorm(shape[0], eps, affine, bias=False, **own)
        return norms.UncentredLayerNorm(shape, eps, affine, bias=False, **own)
    if isinstance(module, nn.GroupNorm):
        groups, channels = module.num_groups, module.num_channels
        return norms.UncentredGroupNorm(groups, channels, eps, affine, bias=False, **own)
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        channels = module.num_features
        return norms.UncentredGroupNorm(channels, channels, eps, affine, bias=False, **own)
    if isinstance(module, nn.modules.batchnorm._BatchNorm) or hasattr(module, "running_var"):
        dims = next((d for d in (1, 3) if f"{d}d" in type(module).__name__), 2)
        channels = getattr(module, "num_features", None) or module.running_var.numel()
        momentum = getattr(module, "momentum", 0.1)
        tracks = getattr(module, "track_running_stats", True)
        return _BATCH_NORM[dims](channels, eps, momentum, affine, tracks, bias=False, **own)
    if class_key(module) == "layernorm2d":  # of the code that has one of its own
        channels = next((p.numel() for p in module.parameters()), 0)
        return norms.UncentredPositionNorm(channels, eps, bias=False, **own) if channels else None
    return None


def _takes_maps(module: nn.Module, shape: list[int]) -> bool:
    """Whether the code of a norm over the last dimension is for another: then [N, C, H, W] fits."""
    is_torchs = type(module).forward.__module__.startswith("torch.nn.")
    if is_torchs or len(shape) > 1 or any(p.is_meta for p in module.parameters()):
        return False
    with torch.no_grad(), suppress(Exception):  # it is code of any kind
        own = device_and_dtype(module)
        copy.deepcopy(module).eval()(torch.ones(1, *shape, shape[0] + 1, shape[0] + 2, **own))
        return True
    return False


def functional_norm(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    shape: tuple[int, ...],
    own: dict[str, Any],  # device and type
) -> nn.Module | None:
    """For F.layer_norm and the like, called on an input of this shape: the module of torch."""
    given = dict(zip(_NORM_ARGUMENTS[name], args, strict=False)) | kwargs
    eps = given.get("eps", 1e-5)
    affine = given.get("weight") is not None
    channels, dims = (shape[1], len(shape) - 2) if len(shape) > 1 else (0, 0)
    over = given.get("normalized_shape", ())
    if name == "layernorm" and dims > 0 and over == shape[1:] and not affine:
        return nn.GroupNorm(1, channels, eps, False, **own)  # which takes maps of any size
    if name == "layernorm" and _are_numbers(over):
        return nn.LayerNorm(over, eps, affine, **own)
    if name == "rmsnorm" and _are_numbers(over):
        return nn.RMSNorm(over, given.get("eps"), affine, **own)
    if name == "groupnorm" and _are_numbers([given["num_groups"]]) and channels:
        return nn.GroupNorm(given["num_groups"], channels, eps, affine, **own)
    if name == "instancenorm" and channels:
        return nn.GroupNorm(channels, channels, eps, affine, **own)
    if name == "batchnorm" and channels:
        make = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims]
        return make(channels, eps, given.get("momentum", 0.1), affine, **own)
    return None


def _are_numbers(sizes: Any) -> bool:
    return isinstance(sizes, list | tuple) and all(type(n) is int for n in sizes)


_NORM_ARGUMENTS = {
    "layernorm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rmsnorm": ("input", "normalized_shape", "weight", "eps"),
    "groupnorm": ("input", "num_groups", "weight", "bias", "eps"),
    "instancenorm": ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats",
                     "momentum", "eps"),
    "batchnorm": ("input", "running_mean", "running_var", "weight", "bias", "training",
                  "momentum", "eps"),
    "localresponsenorm": ("input",),
}  # fmt: skip


def device_and_dtype(module: nn.Module) -> dict[str, Any]:
    """Of the module's tensors; of none, torch's defaults."""
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if tensor.is_floating_point():
            return {"device": tensor.device, "dtype": tensor.dtype}
    return {}


#: Modules that are attention, whole: torch's by class, torchvision's by name.
ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
SHIFTED_WINDOWS = frozenset({"shiftedwindowattention", "shiftedwindowattentionv2"})


def attention_twin(module: Any, b: float, max_out: int, norm: bool) -> nn.Module | None:
    """The same of B-cos layers; None for other modules, and for attention to learned tokens.

    Also None for classes whose own code does otherwise than torch's.
    """
    if isinstance(module, ATTENTION) and not type(module).forward.__module__.startswith("torch."):
        return None
    if isinstance(module, nn.MultiheadAttention):
        if module.bias_k is not None or module.add_zero_attn:
            return None
        return attention.BcosMultiheadAttention(
            module.embed_dim,
            module.num_heads,
            module.kdim,
            module.vdim,
            module.batch_first,
            module.out_proj.weight.device,
            module.out_proj.weight.dtype,
            b=b,
            max_out=max_out,
        )
    if isinstance(module, nn.TransformerEncoderLayer):
        inner = attention_twin(module.self_attn, b, max_out, norm)
        if inner is None:
            return None
        assert isinstance(inner, attention.BcosMultiheadAttention)
        return attention.BcosTransformerEncoderLayer(
            inner,
            bcos_linear(module.linear1, 1, b, max_out),  # type: ignore[arg-type]
            bcos_linear(module.linear2, 1, b, max_out),  # type: ignore[arg-type]
            _norm_or_nothing(module.norm1, norm),
            _norm_or_nothing(module.norm2, norm),
            module.norm_first,
        )
    if isinstance(module, nn.TransformerEncoder):
        layers: Any = [attention_twin(layer, b, max_out, norm) for layer in module.layers]
        if any(layer is None for layer in layers):  # of another class
            return None
        last = None if module.norm is None else _norm_or_nothing(module.norm, norm)
        return attention.BcosTransformerEncoder(layers, last)
    if class_key(module) in SHIFTED_WINDOWS:
        return attention.BcosShiftedWindowAttention(module, b=b, max_out=max_out)
    return None


def _norm_or_nothing(module: nn.Module, norm: bool) -> nn.Module:
    return (uncentred_norm(module) if norm else None) or nn.Identity()
