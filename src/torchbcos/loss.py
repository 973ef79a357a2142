"""The loss that B-cos networks are trained with."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

__all__ = ["bce"]


def bce(
    outputs: Tensor | tuple[Tensor, ...],  # [N, K]; in a tuple auxiliary logits follow
    labels: Tensor,  # [N], or a share of each class [N, K]
    label_smoothing: float = 0.0,
    auxiliary_weight: float = 1.0,
) -> Tensor:
    """Binary cross-entropy of every class by itself, each against all others, as in the paper.

    >>> import torch
    >>> bce(torch.zeros(2, 5), torch.tensor([1, 3]))
    tensor(0.6931)
    """
    main, *auxiliary = outputs if isinstance(outputs, tuple) else (outputs,)
    target = (labels if labels.dim() == 2 else F.one_hot(labels, main.shape[1])).to(main.dtype)
    if label_smoothing:
        target = target + label_smoothing * (1 / main.shape[1] - target)
    loss = F.binary_cross_entropy_with_logits(main, target)
    for other in auxiliary if auxiliary_weight else ():
        loss = loss + auxiliary_weight * F.binary_cross_entropy_with_logits(other, target)
    return loss
