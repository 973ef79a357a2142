"""B-cos networks that the authors' second program defines and no conversion gives.

Their ConvNeXts normalise before the global pool; their vision transformers are the "simple" ones
of Beyer, Zhai and Kolesnikov (2022), with linear queries, keys and values and B-cos layers
everywhere else. Parameters have the names of that program, but for its `linear` within a layer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchbcos.functional import add, add_offset, hold
from torchbcos.layers import BcosConv2d, BcosLinear
from torchbcos.norms import (
    CentredGroupNorm,
    CentredLayerNorm,
    CentredPositionNorm,
    UncentredBatchNorm2d,
)

__all__ = ["CONVNEXTS", "SIMPLE_VITS", "VitShape", "v2_network", "v2_networks"]

Norm = Callable[[int], nn.Module]

#: Widths and numbers of blocks of the four stages.
CONVNEXTS = {
    "atto": ((40, 80, 160, 320), (2, 2, 6, 2)),
    "tiny": ((96, 192, 384, 768), (3, 3, 9, 3)),
    "small": ((96, 192, 384, 768), (3, 3, 27, 3)),
    "base": ((128, 256, 512, 1024), (3, 3, 27, 3)),
    "large": ((192, 384, 768, 1536), (3, 3, 27, 3)),
}
CONVNEXT_NORMS: dict[str, Norm] = {
    "pn": partial(CentredPositionNorm, eps=1e-6, bias=False),
    "bnu": partial(UncentredBatchNorm2d, bias=False),
}


@dataclass(frozen=True)
class VitShape:
    dim: int
    depth: int
    heads: int
    patch: int = 16
    stem: tuple[int, ...] = ()  # channels of the convolutions before it

    @property
    def hidden(self) -> int:
        return 4 * self.dim


SIMPLE_VITS = {
    "simple_vit_ti_patch16_224": VitShape(192, 12, 3),
    "simple_vit_s_patch16_224": VitShape(384, 12, 6),
    "simple_vit_b_patch16_224": VitShape(768, 12, 12),
    "simple_vit_l_patch16_224": VitShape(1024, 14, 16),
    "vitc_ti_patch1_14": VitShape(192, 11, 3, 1, (24, 48, 96, 192)),
    "vitc_s_patch1_14": VitShape(384, 11, 6, 1, (48, 96, 192, 384)),
    "vitc_b_patch1_14": VitShape(768, 11, 12, 1, (64, 128, 128, 256, 256, 512)),
    "vitc_l_patch1_14": VitShape(1024, 13, 16, 1, (64, 128, 128, 256, 256, 512)),
}


def v2_networks() -> list[str]:
    convnexts = [f"convnext_{size}_{norm}" for size in CONVNEXTS for norm in CONVNEXT_NORMS]
    return [*convnexts, *SIMPLE_VITS]


def v2_network(
    name: str, num_classes: int, b: float = 2.0, max_out: int = 1, in_channels: int = 3
) -> nn.Module:
    """The network for an encoded image, with weights of its own."""
    encoded = 2 * in_channels
    if name in SIMPLE_VITS:
        return _SimpleVit(SIMPLE_VITS[name], encoded, num_classes, b, max_out)
    if name not in v2_networks():
        raise ValueError(f"`name` (={name!r}) must be one of {', '.join(v2_networks())}.")
    _, size, norm = name.split("_")
    widths, depths = CONVNEXTS[size]
    return _ConvNeXt(widths, depths, CONVNEXT_NORMS[norm], encoded, num_classes, b, max_out)


class _ConvNeXt(nn.Module):
    def __init__(
        self,
        widths: Sequence[int],
        depths: Sequence[int],
        norm: Norm,
        channels: int,
        num_classes: int,
        b: float,
        max_out: int,
    ) -> None:
        super().__init__()
        conv = partial(BcosConv2d, b=b, max_out=max_out)
        layers: list[nn.Module] = [conv(channels, widths[0], 4, stride=4), norm(widths[0])]
        for stage, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            if stage:
                before = widths[stage - 1]
                layers.append(nn.Sequential(norm(before), conv(before, width, 2, stride=2)))
            layers.append(nn.Sequential(*(_Block(width, norm, conv) for _ in range(depth))))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(norm(widths[-1]), conv(widths[-1], num_classes, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.classifier(self.features(x))
        return out.mean((-2, -1))


class _Block(nn.Module):
    def __init__(self, width: int, norm: Norm, conv: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.block = nn.Sequential(
            conv(width, width, 7, padding=3, groups=width),
            norm(width),
            conv(width, 4 * width, 1),
            conv(4 * width, width, 1),
        )
        self.layer_scale = nn.Parameter(torch.full((width, 1, 1), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return add(x, self.layer_scale * self.block(x))


class _SimpleVit(nn.Module):
    def __init__(
        self, shape: VitShape, channels: int, num_classes: int, b: float, max_out: int
    ) -> None:
        super().__init__()
        self.patch = shape.patch
        linear = partial(BcosLinear, b=b, max_out=max_out)
        embedding = OrderedDict[str, nn.Module]()
        if shape.stem:
            conv = partial(BcosConv2d, kernel_size=3, padding=1, b=b, max_out=max_out)
            embedding["conv_stem"] = _stem(channels, shape.stem, conv)
            channels = shape.stem[-1]
        embedding["linear"] = linear(channels * shape.patch**2, shape.dim)
        self.to_patch_embedding = nn.ModuleDict(embedding)
        self.transformer = nn.Sequential(
            OrderedDict((f"encoder_{i}", _Encoder(shape, linear)) for i in range(shape.depth))
        )
        self.linear_head = _named(norm=_norm(shape.dim), linear=linear(shape.dim, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        if "conv_stem" in self.to_patch_embedding:
            x = self.to_patch_embedding["conv_stem"](x)
        p = self.patch
        x = x.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # [N, C, rows, p, columns, p]
        x = x.permute(0, 2, 4, 3, 5, 1).flatten(3)  # [N, rows, columns, p · p · C]
        x = self.to_patch_embedding["linear"](x)
        x = add_offset(x, _positions(x)).flatten(1, 2)
        out: Tensor = self.linear_head(self.transformer(x).mean(1))
        return out


def _stem(channels: int, widths: Sequence[int], conv: Callable[..., nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in widths:
        stride = 2 if width > channels else 1
        norm = CentredGroupNorm(1, width, bias=False)
        layers += [conv(channels, width, stride=stride), norm, nn.Identity()]
        channels = width
    return nn.Sequential(*layers)


class _Encoder(nn.Module):
    def __init__(self, shape: VitShape, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.attn = _Attention(shape, linear)
        net = _named(
            norm=_norm(shape.dim),
            linear1=linear(shape.dim, shape.hidden),
            linear2=linear(shape.hidden, shape.dim),
        )
        self.ff = _named(net=net)

    def forward(self, x: Tensor) -> Tensor:
        x = add(self.attn(x), x)
        return add(self.ff(x), x)


class _Attention(nn.Module):
    def __init__(self, shape: VitShape, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm = _norm(shape.dim)
        self.to_qkv = nn.Linear(shape.dim, 3 * shape.dim, bias=False)
        self.to_out = linear(shape.dim, shape.dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.to_qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(hold(q), hold(k), v)
        out: Tensor = self.to_out(mixed.transpose(1, 2).flatten(2))
        return out


def _norm(dim: int) -> nn.Module:
    return CentredLayerNorm(dim, bias=False)


def _named(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def _positions(x: Tensor) -> Tensor:
    """Sines and cosines of the columns and of the rows, for [N, rows, columns, dim]."""
    _, rows, columns, dim = x.shape
    count = partial(torch.arange, device=x.device, dtype=torch.float32)
    frequencies = 1 / 10_000 ** (count(dim // 4) / (dim // 4 - 1))
    down, across = (count(n)[:, None] * frequencies for n in (rows, columns))
    down, across = down[:, None].expand(-1, columns, -1), across.expand(rows, -1, -1)
    waves = [across.sin(), across.cos(), down.sin(), down.cos()]
    return torch.cat(waves, -1).to(x.dtype)
