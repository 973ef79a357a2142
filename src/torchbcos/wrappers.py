"""Where a model is: inside of what torch wraps around it, and on which device."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from torchbcos.models import BcosModel

__all__ = ["bcos_within", "check_together", "unwrapped"]

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


def bcos_within(model: nn.Module) -> BcosModel:
    """`unwrapped`, for what only a BcosModel can do."""
    inner = unwrapped(model)
    if not isinstance(inner, BcosModel):
        raise TypeError(f"`model` (a {type(inner).__name__}) must be a BcosModel: convert it.")
    return inner


def check_together(model: nn.Module, images: Tensor) -> None:
    """Refuse images on another device than the model's, and weights in shards."""
    if any(hasattr(p, "full_tensor") for p in model.parameters()):
        raise ValueError(
            "`model` has weights that FSDP keeps in shards, which only its forward pass brings "
            "together: load its whole weights into a model of its own."
        )
    where = next((p.device for p in model.parameters()), images.device)
    if images.device != where:
        raise ValueError(
            f"`images` (on {images.device}) must be where the model is: use images.to('{where}')."
        )
