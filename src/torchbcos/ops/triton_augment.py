"""RandAugment on a GPU: two launches for a batch, whatever operations its images take."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from torchbcos.ops import augment_kernels as kernels

__all__ = ["operate"]

BLOCK = 1024  # pixels


def operate(x: Tensor, numbers: Tensor, levels: int) -> Tensor:
    """Images [N, 3, H, W] in float32, each after the operation that its `numbers` [N, 15] say."""
    n, channels, height, width = x.shape
    x, numbers = x.contiguous(), numbers.contiguous()
    found = torch.empty(n * channels, kernels.ROW.value, device=x.device)
    out = torch.empty_like(x)
    pixels = height * width
    kernels.measure[n * channels,](x, numbers, found, pixels, BLOCK)
    programs = n * triton.cdiv(pixels, BLOCK)
    kernels.operate[programs,](x, numbers, found, out, height, width, float(levels), BLOCK)
    return out
