"""A trained model for other classes: its layers are kept, its classifier is made anew."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from torchbcos.models import BcosModel, create_model, default_logit_bias

__all__ = ["freeze_all_but_the_head", "head_names", "with_new_head"]


def with_new_head(
    model: BcosModel, classes: Sequence[str], input_size: tuple[int, int] | None = None
) -> BcosModel:
    """`model` for `classes`: all weights and every γ kept but the classifier's weights, the bias of
    the logits as for a new model; T is for `calibrate(…, only_temperature=True)` to set."""
    new = _again(model, len(classes), input_size or model.input_size)
    names = head_names(model)
    own = new.state_dict()
    kept = {n: v for n, v in model.state_dict().items() if n.rpartition(".")[0] not in names}
    new.load_state_dict({**own, **kept})
    old = dict(model.bcos_layers())
    for name, layer in new.bcos_layers():
        layer.scale, layer.b, layer.eps = old[name].scale, old[name].b, old[name].eps
    new.classes = tuple(classes)
    new.temperature, new.scaling = model.temperature, model.scaling
    new.logit_bias = default_logit_bias(len(classes))
    return new


def head_names(model: BcosModel) -> list[str]:
    """The layers whose outputs are the classes, the main classifier last."""
    count = model.architecture.options.get("num_classes", 0)
    with torch.device("meta"):
        other = _again(model, count + 1, model.input_size)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    return list(
        dict.fromkeys(
            name.rpartition(".")[0]
            for name, p in other.named_parameters()
            if p.shape != shapes[name]
        )
    )


def freeze_all_but_the_head(model: BcosModel) -> None:
    """Only the main classifier learns; norms keep the statistics they have."""
    head: nn.Module = model.get_submodule(head_names(model)[-1])
    model.requires_grad_(False).eval()
    head.requires_grad_(True)


def _again(model: BcosModel, num_classes: int, input_size: tuple[int, int]) -> BcosModel:
    name, options = model.architecture.name, model.architecture.options
    if name is None:
        raise ValueError(
            "`start_from` names a model that was converted from a module of its author, which has "
            "no name to make it again with other classes: convert a module with the new classes, "
            "and copy its weights."
        )
    return create_model(name, **{**options, "num_classes": num_classes}, input_size=input_size)
