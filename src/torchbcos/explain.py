"""The linear map W(x) that a network applied to an image, for any class or inner unit.

One forward pass in explanation mode records the network with every input-dependent factor held
constant; it is then linear, and a backward pass from a unit gives that unit's row of W(x).
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from torchbcos.convert.rewriter import FACTOR
from torchbcos.encoding import begin_check_values, check_images
from torchbcos.explanation import Explanation
from torchbcos.functional import collect_offsets, record_factors, replay_factors
from torchbcos.layout import tap_with_axis
from torchbcos.models import BcosModel, ConventionalModel, refuse_conventional
from torchbcos.rows import Room, check_images_first, rows_and_bias
from torchbcos.tap import is_in_graph, node_of, tap
from torchbcos.targets import Targets, resolve_targets, targets_of_chunk
from torchbcos.undisturbed import generators_as_before, looks_at_batch, undisturbed
from torchbcos.wrappers import check_together, unwrapped

__all__ = ["Explanation", "Targets", "Unit", "explain"]

#: A channel (at its strongest position), (channel, y, x), or a function of the activation.
Unit = int | tuple[int, int, int] | Callable[[Tensor], Tensor]

#: How many images are explained at once where `chunk` is not given: at most so many, and at most
#: so many pixels, so that on a CPU activations stay near its caches.
CHUNK = {"cpu": (32, 8 * 224 * 224), "cuda": (256, 256 * 224 * 224)}


def explain(
    model: nn.Module,
    images: Tensor,
    targets: Targets = None,
    *,
    layer: str | None = None,
    unit: Unit | Sequence[Unit] | None = None,
    chunk: int | None = None,
    create_graph: bool = False,
) -> Explanation:
    """W(x) of each image for its predicted class, for `targets`, or for units of `layer`.

    `targets`: a class index or name; a list of them for every image; a tensor [N] or [N, K] for
    each image its own; or "all". `layer` is a submodule's name in the network, `unit` a channel
    (explained where it is strongest), (channel, y, x), a function from the activation, [N, C, H, W]
    or as the layer has it, to one value per image [N], or a list of these.

    At most `chunk` images are in memory at once: by default 8 of 224×224 pixels, or 256 on a GPU.
    In training it is the whole batch, whose statistics norms use; they would be each chunk's own.
    The model and the images are left as they were.

    With `create_graph` the explanation is differentiable, by the weights and by the images, and can
    stand in a loss; this takes a second forward pass.

    >>> import torchbcos as tb
    >>> model = tb.create_model("cifar9", preset="paper").eval()
    >>> e = tb.explain(model, torch.rand(2, 3, 32, 32), targets=[3, 7])
    >>> e.weights.shape, e.contributions.shape
    (torch.Size([2, 2, 6, 32, 32]), torch.Size([2, 2, 32, 32]))
    """
    model = unwrapped(model)
    end_check = None
    if isinstance(model, BcosModel):
        check_images(images, model.in_channels)
        end_check = begin_check_values(images)
    elif not isinstance(images, Tensor) or images.dim() != 4:
        shape = tuple(getattr(images, "shape", ()))
        raise ValueError(f"`images` (shape {shape}) must be a tensor [N, C, H, W].")
    chunk = _chunk_of(chunk, model, images)
    units: list[Any] = list(unit) if isinstance(unit, list) else [unit]
    _check_request(model, layer, units, targets)
    check_together(model, images)
    if isinstance(targets, Iterator):
        targets = list(targets)  # for every chunk
    if isinstance(targets, Tensor):
        targets = targets.cpu()  # now, so that the chunks need not wait for the device
    room = None if create_graph else Room(len(images))
    parts = [
        _explain_chunk(
            model,
            part,
            targets_of_chunk(targets, i, chunk, len(images)),
            layer,
            units,
            room,
        )
        for i, part in enumerate(images.split(chunk))
    ]
    if end_check is not None:
        end_check()
    joined = {
        field.name: torch.cat([getattr(part, field.name) for part in parts])
        for field in fields(Explanation)
        if isinstance(getattr(parts[0], field.name), Tensor)
        and not (field.name == "weights" and room is not None)
    }
    if room is not None:
        joined["weights"] = room.rows
    return replace(parts[0], **joined)  # type: ignore[arg-type]


def _chunk_of(chunk: int | None, model: nn.Module, images: Tensor) -> int:
    if chunk is None and any(map(_mixes_images, model.modules())):
        return max(1, len(images))  # in parts they would be divided by other statistics
    if chunk is None:
        most, pixels = CHUNK.get(images.device.type, CHUNK["cpu"])
        return max(1, min(most, pixels // max(1, images.shape[2:].numel())))
    if not isinstance(chunk, SupportsIndex) or chunk < 1:
        raise ValueError(f"`chunk` (={chunk!r}) must be a whole number, of at least 1 image.")
    return operator.index(chunk)


def _check_request(
    model: nn.Module, layer: str | None, units: Sequence[Unit | None], targets: Targets
) -> None:
    if not units:
        raise ValueError("`unit` (=[]) must hold at least one unit.")
    none = [unit is None for unit in units]  # no equality: arrays have none
    if layer is None and none != [True]:
        given = units[0] if len(units) == 1 else units
        raise ValueError(f"`unit` (={given!r}) needs `layer`: the name of the layer it is in.")
    if layer is not None and (any(none) or targets is not None):
        raise ValueError(f"`layer` (={layer!r}) needs `unit`, and `targets` only go with logits.")
    if any(p.is_inference() for p in model.parameters()):
        raise ValueError(
            "`model` has weights that were made within torch.inference_mode, which no derivative "
            "passes: explain copy.deepcopy(model), made outside of it."
        )
    if layer is not None:
        refuse_conventional(model, "W(x) of its layers does not sum up to their outputs")
        _warn_of_factor(_network_of(model), layer)
    elif isinstance(model, ConventionalModel):
        warnings.warn(
            "`model` is conventional: W(x)·x is not its output, and `residual` says by how much it "
            "misses. The methods of torchbcos.posthoc are for such models.",
            stacklevel=3,
        )


def _network_of(model: nn.Module) -> nn.Module:
    return model.network if isinstance(model, BcosModel) else model


def _mixes_images(module: nn.Module) -> bool:
    """Whether what it makes of an image may depend on the others of the batch."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return module.training or module.running_var is None
    known = type(module).__module__.startswith(("torch.", "torchbcos."))
    return module.training and not known


def _warn_of_factor(network: nn.Module, layer: str) -> None:
    cause = None
    if isinstance(network, GraphModule) and is_in_graph(network, layer):
        cause = node_of(network, layer).meta.get(FACTOR)
    if cause is not None:
        warnings.warn(
            f"`layer` (={layer!r}) is not linear in the image because of {cause}: W(x)·x is not "
            "its output, and `residual` says by how much it misses.",
            stacklevel=4,
        )


def _explain_chunk(
    model: nn.Module,
    images: Tensor,
    targets: Targets,
    layer: str | None,
    units: Sequence[Unit | None],
    room: Room | None,
) -> Explanation:
    """Without `room` it is differentiable."""
    network = _network_of(model)
    create_graph = room is None
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(undisturbed(model, images.device))
        given = network_input(model, images if create_graph else images.detach())
        x = given.detach().requires_grad_()
        if create_graph:
            with generators_as_before(images.device), record_factors() as tape:
                full = tap(network, layer, given) if layer is not None else logits_of(model, given)
            offsets = stack.enter_context(replay_factors(tape))
        else:
            offsets = stack.enter_context(collect_offsets())
        positions = None
        if layer is None:
            logits = logits_of(model, x)
            indices = resolve_targets(targets, logits, getattr(model, "classes", None))
            values = logits.gather(1, indices)
        else:
            activation, axis = tap_with_axis(network, layer, x)
            if len(activation) != len(x):
                raise ValueError(
                    f"`layer` (={layer!r}) has an output of shape {tuple(activation.shape)} for "
                    f"{len(x)} images, which it has taken apart: give a layer before or after it."
                )
            values, indices, positions = _pick_units(activation, axis, units, layer)
        place = None if room is None else room.of_chunk(x.detach(), values.shape[1])
        rows, bias = rows_and_bias(values, x, offsets, place, create_graph, check_images_first)
        outputs = values.detach()
        if create_graph:  # from the pass that the images' derivatives know
            outputs = (
                full.gather(1, indices)
                if layer is None
                else _pick_units(full, axis, units, layer)[0]
            )
        wide = torch.promote_types(x.dtype, torch.float32)
        pixels = given.to(wide)
        contributions = torch.stack([(row.to(wide) * pixels).sum(1) for row in rows.unbind(1)], 1)
        residual = outputs.to(wide) - (contributions.sum((2, 3)) + bias)
    return Explanation(
        outputs=outputs,
        targets=indices,
        weights=rows,
        contributions=contributions,
        bias=bias,
        residual=residual,
        positions=positions,
        classes=getattr(model, "classes", None),
        layer=layer,
        statistics="batch" if looks_at_batch(model) else "running",
    )


def network_input(model: nn.Module, images: Tensor) -> Tensor:
    """What W(x) multiplies: the encoded images, or for a bare network the images as they are."""
    if isinstance(model, BcosModel):
        model.warn_of_scales()
        return model.encoded(images)
    return images.to(next((p.dtype for p in model.parameters()), images.dtype), copy=True)


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    out = model.from_encoded(x) if isinstance(model, BcosModel) else model(x)
    if not isinstance(out, Tensor):
        with suppress(LookupError, TypeError):
            out = out[0]
    if not isinstance(out, Tensor) or out.dim() != 2:
        shape = getattr(out, "shape", None)
        what = f"a {type(out).__name__}" if shape is None else f"outputs of shape {tuple(shape)}"
        raise ValueError(
            f"`model` gives {what}, not logits [N, K]: explain one of "
            "its layers with `layer` and `unit`."
        )
    return out


def _pick_units(
    activation: Tensor, axis: int | None, units: Sequence[Unit | None], layer: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Values [N, K], channels [N, K] and positions [N, K, 2] of the units to explain.

    `axis` is that of the channels; functions are given the activation as it is.
    """
    if activation.dim() == 2:
        activation = activation[:, :, None, None]
    n = len(activation)
    values, which, where = [], [], []
    for unit in units:
        if callable(unit):
            value = unit(activation)
            if not (isinstance(value, Tensor) and value.shape == (n,)):
                raise ValueError(
                    "`unit` (a function) must return one value for each image, a tensor of shape "
                    f"({n},), not {getattr(value, 'shape', type(value).__name__)}."
                )
            if activation.requires_grad and not value.requires_grad:
                raise ValueError(
                    "`unit` (a function) must compute its values from the activation, in a way "
                    "that torch can derive: what it returned has no derivative."
                )
            values.append(value)
            which.append(torch.full((n,), -1, device=activation.device))
            where.append(torch.full((n, 2), -1, device=activation.device))
            continue
        if activation.dim() != 4:
            raise ValueError(
                f"`layer` (={layer!r}) has an output of shape {tuple(activation.shape)}; channels "
                "are known in [N, C], [N, C, H, W] and [N, H, W, C], so give `unit` a function: "
                f"lambda a: a[:, {', '.join('0' for _ in activation.shape[1:])}]."
            )
        if axis is None:
            raise ValueError(
                f"`unit` (={unit!r}) cannot be found in {layer!r}, of whose output (shape "
                f"{tuple(activation.shape)}) it is not known where the channels are: give a "
                "function of the activation instead."
            )
        by_channel = activation.movedim(axis, 1)
        width = by_channel.shape[3]
        channel, y, x = _unit_index(unit, tuple(by_channel.shape[1:]), layer)
        maps = by_channel[:, channel].flatten(1)
        if y is None or x is None:
            flat = maps.detach().argmax(1)
        else:
            flat = torch.full((n,), y * width + x, device=activation.device)
        values.append(maps.gather(1, flat[:, None])[:, 0])
        which.append(torch.full((n,), channel, device=activation.device))
        where.append(torch.stack([flat // width, flat % width], 1))
    return torch.stack(values, 1), torch.stack(which, 1), torch.stack(where, 1)


def _unit_index(
    unit: Any, shape: tuple[int, ...], layer: str
) -> tuple[int, int | None, int | None]:
    try:
        parts = tuple(map(operator.index, unit if isinstance(unit, tuple) else (unit,)))
    except TypeError:
        parts = ()
    if len(parts) not in (1, 3) or not all(0 <= p < s for p, s in zip(parts, shape, strict=False)):
        raise ValueError(
            f"`unit` (={unit!r}) must be a channel or (channel, y, x) within the {shape} of "
            f"{layer!r}."
        )
    if len(parts) == 1:
        return parts[0], None, None
    return parts[0], parts[1], parts[2]
