"""From a unit to a logit: the rest of the network is a linear map, too.

Between a layer l and the logits a network applies W_{l→L}(x), and a unit contributes its activation
times its entry there. What reaches a logit without passing through the layer (around it, on a
residual branch) is set apart as `around`, what no input owns as `bias`; all of it is the logit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchbcos.encoding import check_images, check_values
from torchbcos.functional import collect_offsets
from torchbcos.layout import channel_axis
from torchbcos.models import BcosModel, refuse_conventional
from torchbcos.neurons.table import Neurons, NeuronsError, Ranked, largest
from torchbcos.rows import check_images_first
from torchbcos.tap import tap, watch
from torchbcos.targets import Targets, resolve_targets
from torchbcos.undisturbed import keeping_buffers
from torchbcos.wrappers import bcos_within

__all__ = ["UnitContributions", "most_active_for", "most_contributing", "unit_contributions"]


@dataclass(frozen=True)
class UnitContributions:
    """What the units of a layer add to K logits of N images.

    outputs = Σ over units and positions of weights · activations + around + bias + residual.
    """

    outputs: Tensor  # [N, K] logits
    targets: Tensor  # [N, K] class indices
    activations: Tensor  # [N, C, …] of the layer
    weights: Tensor  # [N, K, C, …] rows of W_{l→L}(x)
    around: Tensor  # [N, K] what comes from the image but not through the layer: 0 at a cut
    bias: Tensor  # [N, K] what no pixel owns and is added after the layer or around it
    residual: Tensor  # [N, K] rounding, if all is well
    layer: str

    @property
    def maps(self) -> Tensor:
        """[N, K, C, …]: what each unit adds at each position."""
        return self.weights * self.activations[:, None]

    @property
    def units(self) -> Tensor:
        """[N, K, C]: what each unit adds, over all positions."""
        maps = self.maps
        return maps.flatten(3).sum(3) if maps.dim() > 3 else maps


@keeping_buffers
def unit_contributions(
    model: nn.Module, images: Tensor, layer: str, targets: Targets = None
) -> UnitContributions:
    """What every unit of `layer` contributes to the predicted class of each image, or to `targets`.

    `targets` and `layer` are as for `explain`. Where every path to the logits leads through the
    layer, `around` is 0.

    >>> import torchbcos as tb
    >>> model = tb.create_model("cifar9", preset="paper").eval()
    >>> found = unit_contributions(model, torch.rand(2, 3, 32, 32), "8", targets=[3])
    >>> found.units.shape, found.around.flatten()
    (torch.Size([2, 1, 128]), tensor([0., 0.]))
    >>> total = found.units.sum(2) + found.bias
    >>> torch.allclose(total, found.outputs, rtol=1e-4)
    True
    """
    model = bcos_within(model)
    refuse_conventional(model, "what its units add does not sum up to its logits")
    check_images(images, model.in_channels)
    check_values(images)
    cut: list[Tensor] = []

    def start_here(out: Tensor) -> Tensor:
        cut.append(out.detach().requires_grad_())
        return cut[0]

    with torch.inference_mode(False), torch.enable_grad(), collect_offsets() as offsets:
        x = model.encoded(images.detach()).requires_grad_()
        logits = model.from_outputs(watch(model.network, x, {layer: start_here}))
        logits = logits if isinstance(logits, Tensor) else logits[0]
        indices = resolve_targets(targets, logits, model.classes)
        outputs = logits.gather(1, indices)
        sources = [
            cut[0],
            x,
            *offsets,
        ]  # of these, what is before the cut goes around it, if at all
        rows: list[Tensor] = []
        shares = []
        for column in outputs.unbind(1):
            grads = torch.autograd.grad(column.sum(), sources, retain_graph=True, allow_unused=True)
            if not rows:
                check_images_first(column, offsets, grads[2:])
            rows.append(torch.zeros_like(cut[0]) if grads[0] is None else grads[0])
            shares.append(_shares(grads, sources))
    activations, weights = cut[0].detach(), torch.stack(rows, 1)
    axis = _axis(model, layer, x, activations)
    activations, weights = activations.movedim(axis, 1), weights.movedim(axis + 1, 2)
    through, around, *terms = torch.stack(shares, 2).unbind(0)  # each [N, K]
    bias = torch.stack(terms).sum(0) if terms else torch.zeros_like(around)
    return UnitContributions(
        outputs=outputs.detach(),
        targets=indices,
        activations=activations,
        weights=weights,
        around=around,
        bias=bias,
        residual=outputs.detach() - (through + around + bias),
        layer=layer,
    )


def _axis(model: BcosModel, layer: str, x: Tensor, out: Tensor) -> int:
    axis = channel_axis(model.network, layer, x)
    if axis is None:
        raise NeuronsError(
            f"`layer` (={layer!r}) has an output of shape {tuple(out.shape)} of which it is not "
            "known where the units are: use a B-cos layer before or after it."
        )
    return axis


def _shares(grads: Sequence[Tensor | None], sources: Sequence[Tensor]) -> Tensor:
    """[S, N]: how much of an output comes from each source."""
    wide = torch.promote_types(sources[0].dtype, torch.float32)
    nothing = torch.zeros(len(sources[0]), dtype=wide, device=sources[0].device)
    return torch.stack(
        [
            nothing
            if grad is None
            else (grad.to(wide) * source.detach().to(wide)).reshape(len(nothing), -1).sum(1)
            for grad, source in zip(grads, sources, strict=True)
        ]
    )


def most_contributing(
    model: nn.Module,
    images: Tensor,
    layer: str,
    target: int | str,
    count: int = 10,
    *,
    batch: int = 32,
) -> list[Ranked]:
    """The units of `layer` that add most to the logit `target`, on average over `images`."""
    total: Tensor | None = None
    for part in images.split(batch):
        added = unit_contributions(model, part, layer, target).units[:, 0].double().sum(0)
        total = added if total is None else total + added
    assert total is not None  # `unit_contributions` refuses no images
    return largest({layer: total.cpu() / len(images)}, count)


@keeping_buffers
def most_active_for(
    model: nn.Module, image: Tensor, layer: str, count: int = 10, *, usual: Neurons | None = None
) -> list[Ranked]:
    """The units of `layer` that one image [C, H, W] excites most.

    With `usual`, which units those are is judged by what they do over a data set: the score is by
    how many deviations this image exceeds the largest activation that an image usually has.
    """
    model = bcos_within(model)
    refuse_conventional(model, "has no B-cos units to look at")
    images = image[None] if image.dim() == 3 else image
    check_images(images, model.in_channels)
    check_values(images)
    if len(images) != 1:
        raise ValueError(f"`image` (={len(images)} images) must be one, [C, H, W].")
    with torch.no_grad():
        x = model.encoded(images)
        out = tap(model.network, layer, x)
    maps = out.movedim(_axis(model, layer, x, out), 1)
    peaks = maps[0].flatten(1).amax(1) if maps.dim() > 2 else maps[0]
    peaks = peaks.double().cpu()
    if usual is not None:
        units = usual.units(layer)
        peaks = (peaks - units.peak_mean) / units.peak_std.clamp(min=1e-300)
    return largest({layer: peaks}, count)
