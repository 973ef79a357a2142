"""For a module of a conventional network, the module that takes its place."""

from __future__ import annotations

from typing import Any

from torch import nn

from torchbcos import norms
from torchbcos.convert.trace import class_key
from torchbcos.layers import AvgPool2d, BcosConv1d, BcosConv2d, BcosConv3d, BcosLayer, BcosLinear

__all__ = ["average_pool", "bcos_convolution", "bcos_linear", "uncentred_norm"]

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
    if class_key(module).startswith("conv2dsame"):  # timm's, which pads in its own forward
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


def bcos_linear(module: nn.Linear, widen: int, b: float, max_out: int) -> BcosLayer:
    return BcosLinear(
        module.in_features * widen,
        module.out_features,
        device=module.weight.device,
        dtype=module.weight.dtype,
        b=b,
        max_out=max_out,
    )


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
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        if class_key(module).endswith("2d"):
            return norms.UncentredPositionNorm(module.normalized_shape[0], eps, bias=False)
        return norms.UncentredLayerNorm(list(module.normalized_shape), eps, bias=False)
    if isinstance(module, nn.GroupNorm):
        return norms.UncentredGroupNorm(module.num_groups, module.num_channels, eps, bias=False)
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        channels = module.num_features
        return norms.UncentredGroupNorm(channels, channels, eps, module.affine, bias=False)
    if isinstance(module, nn.modules.batchnorm._BatchNorm) or hasattr(module, "running_var"):
        dims = next((d for d in (1, 3) if f"{d}d" in type(module).__name__), 2)
        momentum = getattr(module, "momentum", 0.1)
        return _BATCH_NORM[dims](module.weight.numel(), eps, momentum, bias=False)
    return None
