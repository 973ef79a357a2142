"""B-cos layers: `nn.Linear` and `nn.Conv1d/2d/3d` with four more keyword arguments.

Every argument of theirs is taken, but `bias` must be False.

Initialisation is torch's own for the layer replaced (Kaiming uniform with a = √5). Only the
direction of a row matters to the output; its norm, about 1/√3 at the start, sets how far a step of
the optimiser turns it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from torchbcos import functional
from torchbcos._arguments import (
    check_groups,
    check_padding_mode,
    check_transform,
    int_tuple,
    is_int,
    padding_pairs,
)

__all__ = ["AvgPool2d", "BcosConv1d", "BcosConv2d", "BcosConv3d", "BcosLayer", "BcosLinear"]


class BcosLayer(nn.Module):
    """What the B-cos layers share: `weight`, `b`, `max_out`, `scale` and `eps`."""

    weight: nn.Parameter
    bias: None

    def __init__(self, bias: bool, b: float, max_out: int, scale: float, eps: float) -> None:
        super().__init__()
        check_transform(b, max_out, scale, eps)
        if bias:
            raise ValueError(
                "`bias` (=True) must be False: a bias is a term that no input owns, so the output "
                "would no longer be W(x)·x."
            )
        self.b = float(b)
        self.max_out = int(max_out)
        self.scale = float(scale)
        self.eps = float(eps)
        self.register_parameter("bias", None)

    @property
    def fan_in(self) -> int:
        """How many inputs one unit sees: k²·c for a convolution."""
        return self.weight[0].numel()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def _transform_repr(self) -> str:
        text = f", b={self.b:g}, max_out={self.max_out}, scale={self.scale:.6g}"
        return text + (f", eps={self.eps:g}" if self.eps else "")


class BcosLinear(BcosLayer):
    """B-cos in place of `nn.Linear`, every argument of it but `bias`, which must be False.

    >>> layer = BcosLinear(512, 10, b=2.0, max_out=2)
    >>> layer
    BcosLinear(in_features=512, out_features=10, b=2, max_out=2, scale=1)
    >>> layer(torch.rand(8, 512)).shape
    torch.Size([8, 10])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        b: float = 2.0,
        max_out: int = 1,
        scale: float = 1.0,
        eps: float = 0.0,
    ) -> None:
        super().__init__(bias, b, max_out, scale, eps)
        _check_counts(in_features=in_features, out_features=out_features)
        self.in_features = int(in_features)
        self.out_features = int(out_features)
        shape = (self.out_features * self.max_out, self.in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        return functional.bcos_linear(
            input, self.weight, b=self.b, max_out=self.max_out, scale=self.scale, eps=self.eps
        )

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}"
            + self._transform_repr()
        )


class _BcosConv(BcosLayer):
    dims: int
    function: Callable[..., Tensor]

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Iterable[int],
        stride: int | Iterable[int] = 1,
        padding: str | int | Iterable[int] = 0,
        dilation: int | Iterable[int] = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        b: float = 2.0,
        max_out: int = 1,
        scale: float = 1.0,
        eps: float = 0.0,
    ) -> None:
        super().__init__(bias, b, max_out, scale, eps)
        _check_counts(in_channels=in_channels, out_channels=out_channels)
        check_groups(groups, in_channels, out_channels)
        check_padding_mode(padding_mode)
        self.in_channels = int(in_channels)
        self.out_channels = int(out_channels)
        self.kernel_size = int_tuple("kernel_size", kernel_size, self.dims, minimum=1)
        self.stride = int_tuple("stride", stride, self.dims, minimum=1)
        self.dilation = int_tuple("dilation", dilation, self.dims, minimum=1)
        pairs = padding_pairs(padding, self.kernel_size, self.stride, self.dilation)
        self.padding = padding if isinstance(padding, str) else tuple(before for before, _ in pairs)
        self.groups = int(groups)
        self.padding_mode = padding_mode
        rows, columns = self.out_channels * self.max_out, self.in_channels // self.groups
        shape = (rows, columns, *self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        return type(self).function(
            input,
            self.weight,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            self.padding_mode,
            self.b,
            self.max_out,
            self.scale,
            self.eps,
        )

    def extra_repr(self) -> str:
        text = (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}"
        )
        if self.padding not in ((0,) * self.dims, "valid"):
            text += f", padding={self.padding!r}"
        if any(d != 1 for d in self.dilation):
            text += f", dilation={self.dilation}"
        if self.groups != 1:
            text += f", groups={self.groups}"
        if self.padding_mode != "zeros":
            text += f", padding_mode={self.padding_mode!r}"
        return text + self._transform_repr()


class BcosConv1d(_BcosConv):
    """B-cos in place of `nn.Conv1d`; see `BcosConv2d`.

    >>> BcosConv1d(6, 16, 5, padding=2, b=2.0, max_out=2)(torch.rand(1, 6, 50)).shape
    torch.Size([1, 16, 50])
    """

    dims = 1
    function = staticmethod(functional.bcos_conv1d)


class BcosConv2d(_BcosConv):
    """B-cos in place of `nn.Conv2d`: its arguments in its order, the extras by keyword.

    `bias` must be False, which is the default.

    >>> layer = BcosConv2d(64, 128, 3, stride=2, padding=1, b=2.0, max_out=2)
    >>> layer(torch.rand(1, 64, 32, 32)).shape, layer.weight.shape
    (torch.Size([1, 128, 16, 16]), torch.Size([256, 64, 3, 3]))
    """

    dims = 2
    function = staticmethod(functional.bcos_conv2d)


class BcosConv3d(_BcosConv):
    """B-cos in place of `nn.Conv3d`; see `BcosConv2d`.

    >>> BcosConv3d(2, 8, 3, stride=2, b=2.0)(torch.rand(1, 2, 9, 9, 9)).shape
    torch.Size([1, 8, 4, 4, 4])
    """

    dims = 3
    function = staticmethod(functional.bcos_conv3d)


class AvgPool2d(nn.AvgPool2d):
    """`nn.AvgPool2d`, faster on a GPU; the pool of B-cos networks, where a maximum hides inputs."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.avg_pool2d(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.ceil_mode,
            self.count_include_pad,
            self.divisor_override,
        )


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if not is_int(value) or value < 1:
            raise ValueError(f"`{name}` (={value!r}) must be an integer of at least 1.")
