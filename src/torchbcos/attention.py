"""Attention of B-cos layers: torch's own modules and the shifted windows of Swin transformers.

Queries, keys, values and outputs come from B-cos layers. In explanation mode the attention weights
are constants, so that what is attended to is mixed linearly.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchbcos.functional import add, hold
from torchbcos.layers import BcosLinear

__all__ = [
    "BcosMultiheadAttention",
    "BcosShiftedWindowAttention",
    "BcosTransformerEncoder",
    "BcosTransformerEncoderLayer",
]


class BcosMultiheadAttention(nn.Module):
    """B-cos in place of `nn.MultiheadAttention`.

    >>> attention = BcosMultiheadAttention(64, 4, batch_first=True)
    >>> x = torch.rand(2, 49, 64)
    >>> out, weights = attention(x, x, x)
    >>> out.shape, weights.shape
    (torch.Size([2, 49, 64]), torch.Size([2, 49, 49]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        b: float = 2.0,
        max_out: int = 1,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"`num_heads` (={num_heads}) must divide `embed_dim` (={embed_dim}) evenly."
            )
        self.num_heads = num_heads
        self.batch_first = batch_first
        kind: dict[str, Any] = {"device": device, "dtype": dtype, "b": b, "max_out": max_out}
        self.q_proj = BcosLinear(embed_dim, embed_dim, **kind)
        self.k_proj = BcosLinear(embed_dim if kdim is None else kdim, embed_dim, **kind)
        self.v_proj = BcosLinear(embed_dim if vdim is None else vdim, embed_dim, **kind)
        self.out_proj = BcosLinear(embed_dim, embed_dim, **kind)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,  # only a hint beside `attn_mask`, which it needs
    ) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise ValueError("`is_causal` (=True) needs `attn_mask`: give the mask itself.")
        is_batched = query.dim() == 3
        if not is_batched:
            query, key, value = query[None], key[None], value[None]
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = (  # [N, heads, length, width]
            t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for t in (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        )
        mask = self._mask(attn_mask, key_padding_mask, q.dtype)
        q, k = hold(q), hold(k)
        weights = None
        if need_weights:
            products = q @ k.mT / math.sqrt(q.shape[-1])
            weights = (products if mask is None else products + mask).softmax(-1)
            mixed = weights @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not is_batched:
            return out[0], weights if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _mask(
        self, of_pairs: Tensor | None, of_keys: Tensor | None, dtype: torch.dtype
    ) -> Tensor | None:
        """What is added to the products, broadcastable to [N, heads, queries, keys]."""
        masks = []
        if of_pairs is not None:
            added = _added(of_pairs, dtype)
            masks.append(added.unflatten(0, (-1, self.num_heads)) if added.dim() == 3 else added)
        if of_keys is not None:
            masks.append(_added(of_keys, dtype).unsqueeze(-2).unsqueeze(-2))
        return hold(sum(masks[1:], masks[0])) if masks else None


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """-∞ where a boolean mask is True; other masks are added as they are."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
    return mask.to(dtype)


class BcosTransformerEncoderLayer(nn.Module):
    """B-cos in place of `nn.TransformerEncoderLayer`, without its activation and dropout."""

    def __init__(
        self,
        attention: BcosMultiheadAttention,
        linear1: BcosLinear,
        linear2: BcosLinear,
        norm1: nn.Module,
        norm2: nn.Module,
        norm_first: bool,
    ) -> None:
        super().__init__()
        self.self_attn = attention
        self.linear1, self.linear2 = linear1, linear2
        self.norm1, self.norm2 = norm1, norm2
        self.norm_first = norm_first

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        masks = {"attn_mask": src_mask, "key_padding_mask": src_key_padding_mask}

        def attended(x: Tensor) -> Tensor:
            out: Tensor = self.self_attn(x, x, x, need_weights=False, **masks)[0]
            return out

        def fed(x: Tensor) -> Tensor:
            out: Tensor = self.linear2(self.linear1(x))
            return out

        x = src
        if self.norm_first:
            x = add(x, attended(self.norm1(x)))
            return add(x, fed(self.norm2(x)))
        x = self.norm1(add(x, attended(x)))
        out: Tensor = self.norm2(add(x, fed(x)))
        return out


class BcosTransformerEncoder(nn.Module):
    """B-cos in place of `nn.TransformerEncoder`."""

    def __init__(self, layers: list[BcosTransformerEncoderLayer], norm: nn.Module | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        for layer in self.layers:
            src = layer(src, mask, src_key_padding_mask)
        return src if self.norm is None else self.norm(src)


class BcosShiftedWindowAttention(nn.Module):
    """B-cos in place of torchvision's `ShiftedWindowAttention` and its V2.

    `position` is the original without its layers: it knows the windows and makes the biases of
    relative positions, which are in the attention weights alone.
    """

    def __init__(self, original: Any, *, b: float = 2.0, max_out: int = 1) -> None:
        super().__init__()
        kind: dict[str, Any] = {
            "device": original.qkv.weight.device,
            "dtype": original.qkv.weight.dtype,
            "b": b,
            "max_out": max_out,
        }
        self.qkv = BcosLinear(original.qkv.in_features, original.qkv.out_features, **kind)
        self.proj = BcosLinear(original.proj.in_features, original.proj.out_features, **kind)
        self.position = copy.deepcopy(original)
        del self.position.qkv, self.position.proj

    def forward(self, x: Tensor) -> Tensor:  # [N, H, W, C]
        position: Any = self.position
        height, width = x.shape[1:3]
        high, wide = position.window_size
        x = F.pad(x, (0, 0, 0, -width % wide, 0, -height % high))
        padded = x.shape[1:3]
        down, right = (
            0 if window >= size else shift
            for window, size, shift in zip(
                position.window_size, padded, position.shift_size, strict=True
            )
        )
        if down or right:
            x = x.roll((-down, -right), (1, 2))
        x = _windows(x, high, wide)  # [N, windows, pixels, C]
        q, k, v = (
            t.unflatten(-1, (position.num_heads, -1)).transpose(2, 3)
            for t in self.qkv(x).chunk(3, -1)
        )
        bias = position.get_relative_position_bias()
        if down or right:
            bias = bias + _apart(padded, (high, wide), (down, right), x)[:, None]
        scale = None
        if hasattr(position, "logit_scale"):  # V2: cosines, scaled
            q = F.normalize(q, dim=-1) * position.logit_scale.clamp(max=math.log(100)).exp()
            k, scale = F.normalize(k, dim=-1), 1.0
        bias = hold(bias.to(q.dtype))
        mixed = F.scaled_dot_product_attention(hold(q), hold(k), v, attn_mask=bias, scale=scale)
        x = self.proj(mixed.transpose(2, 3).flatten(3))
        x = x.unflatten(2, (high, wide)).unflatten(1, (-1, padded[1] // wide))
        x = x.transpose(2, 3).flatten(3, 4).flatten(1, 2)  # [N, H, W, C] again
        if down or right:
            x = x.roll((down, right), (1, 2))
        return x[:, :height, :width]


def _windows(x: Tensor, high: int, wide: int) -> Tensor:
    x = x.unflatten(2, (-1, wide)).unflatten(1, (-1, high))  # [N, rows, high, columns, wide, *]
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def _apart(
    size: torch.Size, window: tuple[int, int], shift: tuple[int, int], like: Tensor
) -> Tensor:
    """-100 between pixels of one window that the shift brought together, [windows, T, T]."""
    regions = torch.zeros(1, *size, device=like.device)
    for dim, (length, side, shifted) in enumerate(zip(size, window, shift, strict=True)):
        place = torch.arange(length, device=like.device)
        region = (place >= length - side).int() + (place >= length - shifted).int()
        if shifted:
            regions = regions + 3**dim * (region[:, None] if dim == 0 else region)
    region = _windows(regions[..., None], *window)[0, :, :, 0]
    return (region[:, :, None] != region[:, None]).to(like.dtype) * -100.0
