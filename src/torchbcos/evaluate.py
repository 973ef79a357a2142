"""How good a model is on a set of images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torchbcos.data import Images
from torchbcos.models import BcosModel

__all__ = ["evaluate"]


@torch.no_grad()
def evaluate(model: BcosModel, images: Images, batch: int = 500) -> tuple[float, float]:
    """(accuracy, mean loss) over a set; the model's mode is as before afterwards."""
    training = model.training
    model.eval()
    correct = loss = torch.zeros((), device=images.labels.device)
    try:
        for indices in torch.arange(len(images)).split(batch):
            x, labels = images.batch(indices)
            logits = model(x.contiguous(memory_format=torch.channels_last))
            assert isinstance(logits, Tensor)
            target = F.one_hot(labels, logits.shape[1]).to(logits.dtype)
            loss = loss + F.binary_cross_entropy_with_logits(logits, target) * len(labels)
            correct = correct + (logits.argmax(1) == labels).sum()
    finally:
        model.train(training)
    return (correct / len(images)).item(), (loss / len(images)).item()
