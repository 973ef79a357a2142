"""Models inside of what torch wraps around them."""

from __future__ import annotations

from torch import nn
from torch.optim.swa_utils import AveragedModel

from torchbcos.models import BcosModel

__all__ = ["unwrapped"]

#: What holds a model as `module`, and computes what it computes.
_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch's wrappers: for many devices, for averages, of torch.compile."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, _WRAPPERS):
            inner = model.module
        if inner is None:
            break
        model = inner
    if not isinstance(model, BcosModel):
        for name, part in model.named_modules():
            if isinstance(part, BcosModel):
                raise ValueError(
                    f"`model` (a {type(model).__name__}) is no BcosModel but holds one, and what "
                    "it does with its images is not known: pass "
                    f"model.get_submodule({name!r}) itself."
                )
    return model
