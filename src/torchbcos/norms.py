"""Normalisations that stay dynamic-linear: they divide by a deviation but subtract no mean.

Each takes the arguments of torch's own norm and keeps its state-dict keys. For an input the layer
is x · (weight / deviation) + bias: a linear map and an offset. In explanation mode the deviation
is held constant, running statistics are left alone, and the bias is accounted for as an offset;
`bias=False` does without it. Three are `Centred`: a mean over values of the same image is linear
in them, so that subtracting it is allowed, too. `RMSNorm` is torch's, which subtracts none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchbcos.functional import add_offset, hold, in_explanation_mode
from torchbcos.ops import accumulation_dtype, fused_batch_norm, fused_scale

__all__ = [
    "CentredGroupNorm",
    "CentredLayerNorm",
    "CentredPositionNorm",
    "RMSNorm",
    "UncentredBatchNorm1d",
    "UncentredBatchNorm2d",
    "UncentredBatchNorm3d",
    "UncentredGroupNorm",
    "UncentredLayerNorm",
    "UncentredPositionNorm",
]


def _variance(x: Tensor, dims: Sequence[int]) -> Tensor:
    wide = x.to(accumulation_dtype(x.dtype))
    return wide.var(tuple(dims), correction=0, keepdim=True)


def _check_channels(input: Tensor, channels: int) -> None:
    if input.dim() < 2 or input.shape[1] != channels:
        raise ValueError(
            f"`input` (shape {tuple(input.shape)}) must have {channels} channels in its second "
            "dimension."
        )


def _check_end(input: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(input.shape[-len(shape) :]) != shape:
        raise ValueError(f"`input` (shape {tuple(input.shape)}) must end in {shape}.")


def _reset_affine(weight: Tensor | None, bias: Tensor | None) -> None:
    if weight is not None:
        nn.init.ones_(weight)
    if bias is not None:
        nn.init.zeros_(bias)


def _normalise(
    x: Tensor,
    variance: Tensor,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: tuple[int, ...],
    centred_over: Sequence[int] = (),
) -> Tensor:
    factor = hold((variance + eps).rsqrt())
    if weight is not None:
        factor = factor * weight.view(shape)  # mostly small, so that x is passed over once
    out = x.to(accumulation_dtype(x.dtype))
    if centred_over:
        out = out - out.mean(tuple(centred_over), keepdim=True)
    out = out * factor
    if bias is not None:
        out = add_offset(out, bias.view(shape))
    return out.to(x.dtype)


class _UncentredBatchNorm(nn.modules.batchnorm._BatchNorm):
    dims: tuple[int, ...]  # how many dimensions an input may have

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:
            self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        self.reset_running_stats()
        _reset_affine(self.weight, self.bias)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() not in self.dims or input.shape[1] != self.num_features:
            expected = " or ".join(map(str, self.dims))
            raise ValueError(
                f"`input` (shape {tuple(input.shape)}) must have {expected} dimensions, the second "
                f"of size {self.num_features}."
            )

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if input.numel() == 0:
            return input.clone()
        if (self.training or self.running_var is None) and input.numel() == self.num_features:
            raise ValueError(
                f"`input` (shape {tuple(input.shape)}) has one value in each channel, of which "
                "there is no variance: give more or larger images, or use it after eval()."
            )
        if in_explanation_mode():
            return self._plainly(input)[0]
        given = None if self.training else self.running_var
        if given is not None:
            out = fused_scale(input, given, self.weight, self.bias, self.eps)
            return self._plainly(input)[0] if out is None else out
        running = self.running_var if self.training else None
        fused = fused_batch_norm(input, self.weight, self.bias, self.eps, running, self.momentum)
        out, variance, is_tracked = fused or (*self._plainly(input), False)
        if running is not None:
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            if not is_tracked:
                self._track(variance.detach().flatten(), input.numel() // input.shape[1])
        return out

    def _plainly(self, input: Tensor) -> tuple[Tensor, Tensor]:
        """The output and the variance that made it, for every device and mode."""
        per_channel = (1, -1) + (1,) * (input.dim() - 2)
        if self.training or self.running_var is None:
            variance = _variance(input, [0, *range(2, input.dim())])
        else:
            variance = self.running_var.view(per_channel)
        return _normalise(input, variance, self.eps, self.weight, self.bias, per_channel), variance

    def _track(self, variance: Tensor, count: int) -> None:
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        rate: float | Tensor
        if self.momentum is None:
            rate = 1 / self.num_batches_tracked.to(self.running_var.dtype)
        else:
            rate = self.momentum
        unbiased = variance * (count / max(count - 1, 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)


class UncentredBatchNorm1d(_UncentredBatchNorm):
    """`nn.BatchNorm1d` without the mean; see `UncentredBatchNorm2d`."""

    dims = (2, 3)


class UncentredBatchNorm2d(_UncentredBatchNorm):
    """`nn.BatchNorm2d` without the mean: x / √(var + eps) · weight + bias.

    >>> norm = UncentredBatchNorm2d(64, bias=False)
    >>> norm(torch.rand(8, 64, 7, 7)).shape
    torch.Size([8, 64, 7, 7])
    """

    dims = (4,)


class UncentredBatchNorm3d(_UncentredBatchNorm):
    """`nn.BatchNorm3d` without the mean; see `UncentredBatchNorm2d`."""

    dims = (5,)


class UncentredLayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` without the mean: over the last dimensions, one deviation per position."""

    centred = False

    def forward(self, input: Tensor) -> Tensor:
        shape = tuple(self.normalized_shape)
        _check_end(input, shape)
        dims = range(-len(shape), 0)
        centred_over = dims if self.centred else ()
        return _normalise(
            input, _variance(input, dims), self.eps, self.weight, self.bias, shape, centred_over
        )


class UncentredGroupNorm(nn.GroupNorm):
    """`nn.GroupNorm` without the mean: one deviation per image and group of channels."""

    centred = False

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(num_groups, num_channels, eps, affine, device, dtype)
        if not bias:
            self.register_parameter("bias", None)

    def reset_parameters(self) -> None:
        _reset_affine(self.weight, self.bias)

    def forward(self, input: Tensor) -> Tensor:
        _check_channels(input, self.num_channels)
        grouped = input.unflatten(1, (self.num_groups, -1))
        dims = range(2, grouped.dim())
        per_group = (1, self.num_groups, -1) + (1,) * (input.dim() - 2)
        centred_over = dims if self.centred else ()
        return _normalise(
            grouped,
            _variance(grouped, dims),
            self.eps,
            self.weight,
            self.bias,
            per_group,
            centred_over,
        ).flatten(1, 2)


class UncentredPositionNorm(nn.Module):
    """One deviation per image and position, over the channels: a layer norm for [N, C, *]."""

    centred = False
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.num_channels = num_channels
        self.eps = eps
        kind = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(num_channels, **kind)) if affine else None  # type: ignore[arg-type]
        self.bias = nn.Parameter(torch.empty(num_channels, **kind)) if affine and bias else None  # type: ignore[arg-type]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _reset_affine(self.weight, self.bias)

    def forward(self, input: Tensor) -> Tensor:
        _check_channels(input, self.num_channels)
        per_channel = (1, -1) + (1,) * (input.dim() - 2)
        variance, centred_over = _variance(input, [1]), (1,) if self.centred else ()
        return _normalise(
            input, variance, self.eps, self.weight, self.bias, per_channel, centred_over
        )

    def extra_repr(self) -> str:
        return f"{self.num_channels}, eps={self.eps}, affine={self.weight is not None}"


class CentredLayerNorm(UncentredLayerNorm):
    """`nn.LayerNorm` as torch has it, for explanations."""

    centred = True


class CentredGroupNorm(UncentredGroupNorm):
    """`nn.GroupNorm` as torch has it, for explanations."""

    centred = True


class CentredPositionNorm(UncentredPositionNorm):
    """`UncentredPositionNorm` with the mean of each position subtracted."""

    centred = True


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` as torch has it, for explanations: x / √(mean of x² + eps) · weight."""

    def forward(self, input: Tensor) -> Tensor:
        shape = tuple(self.normalized_shape)
        _check_end(input, shape)
        wide = input.to(accumulation_dtype(input.dtype))
        eps = torch.finfo(wide.dtype).eps if self.eps is None else self.eps
        square = wide.square().mean(tuple(range(-len(shape), 0)), keepdim=True)
        return _normalise(input, square, eps, self.weight, None, shape)
