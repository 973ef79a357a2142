"""DiFull and DiPart (Rao et al., CVPR 2022): grids whose outputs cannot see beyond their cell.

In the grid pointing game a class may owe some of its logit to other cells. Here a model is cut so
that this cannot be: each cell has a set of logits of its own. With DiFull each cell goes through
the whole network alone; attribution outside it is wrong for certain. With DiPart the features are
computed on the whole grid, and only the head is confined to a cell.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchbcos.baseline import Normalised, to_explain
from torchbcos.explain import logits_of
from torchbcos.localise import split_cells
from torchbcos.models import BcosModel
from torchbcos.posthoc.activations import separated
from torchbcos.posthoc.head import Head, find_head
from torchbcos.posthoc.subject import input_of, network_of

__all__ = ["cell_targets", "difull", "dipart"]


def difull(model: nn.Module, n: int) -> nn.Module:
    """The model for grids of n×n, [N, C, n·H, n·W] → [N, n·n·K], each cell by itself."""
    return _cut(model, _Cells(_separated_network(model), n))


def dipart(model: nn.Module, n: int, images: Tensor, layer: str | None = None) -> nn.Module:
    """The model for grids like `images`, with one set of logits for each cell's features.

    `layer` is the last of the features; by default it is found as for GradCAM.
    """
    model = to_explain(model)
    network = _separated_network(model)
    head = find_head(network, input_of(model, images[:1]), layer)
    return _cut(model, _CellFeatures(network, n, head))


def cell_targets(classes: Tensor, count: int) -> Tensor:
    """The outputs [G, n·n] of such a model for the classes [G, n·n] of the cells, of `count`."""
    cells = torch.arange(classes.shape[1], device=classes.device)
    return classes + count * cells


def _separated_network(model: nn.Module) -> nn.Module:
    """The network as captum's methods need it: they cannot trace it through the cuts."""
    network = network_of(model)
    return network if isinstance(to_explain(model), BcosModel) else separated(network)


class _Cells(nn.Module):
    def __init__(self, network: nn.Module, n: int) -> None:
        super().__init__()
        self.inner = network
        self.n = n

    def forward(self, x: Tensor) -> Tensor:
        return logits_of(self.inner, split_cells(x, self.n)).view(len(x), -1)


class _CellFeatures(nn.Module):
    def __init__(self, network: nn.Module, n: int, head: Head) -> None:
        super().__init__()
        self.inner = network
        self.n = n
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        with self.head.watched(self.inner, lambda features: split_cells(features, self.n)):
            return logits_of(self.inner, x).view(len(x), -1)


def _cut(model: nn.Module, network: nn.Module) -> nn.Module:
    """The modes of the model's own modules stay as they are."""
    model = to_explain(model)
    cut = network
    if isinstance(model, Normalised):
        cut = model.around(network)
    elif isinstance(model, BcosModel):
        bcos = BcosModel(network, in_channels=model.in_channels, input_size=model.input_size)
        bcos.temperature, bcos.logit_bias = model.temperature, model.logit_bias
        bcos.scaling = model.scaling
        cut = bcos
    network.training = cut.training = model.training
    return cut
