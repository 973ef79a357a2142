"""One forward pass over a data set that keeps, for every unit, what it responds to most.

The state has one size, whatever the number of images: for U units and their k best images
U · (12·k + 40) bytes in float32, beside which a batch of B images needs a few numbers for each
image and unit (`memory_bound` says how many bytes in all). It stays on the model's device, and
nothing waits for the device between batches.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from torchbcos.batches import at_once
from torchbcos.encoding import check_images, check_values
from torchbcos.interrupt import told_to_end
from torchbcos.layout import channel_axes
from torchbcos.models import BcosModel, in_mode, refuse_conventional
from torchbcos.neurons.table import Layer, Neurons, NeuronsError, write
from torchbcos.neurons.tally import Saved, Seen, Tally
from torchbcos.tap import layer_names, watch
from torchbcos.wrappers import bcos_within

__all__ = ["ImageSet", "collect", "fingerprint", "memory_bound"]

BATCH = 64  # images that are looked at together, unless they are large ones on a CPU


class ImageSet(Protocol):
    """What `data.Images` is, or anything else with images by number."""

    @property
    def labels(self) -> Tensor: ...  # [N]

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]: ...  # images in 0..1, and labels


def collect(
    model: nn.Module,
    images: ImageSet,
    out: Path | str,
    *,
    layers: Sequence[str] | None = None,
    top: int = 50,
    batch: int | None = None,
    active_above: float = 0.0,
    classes: Sequence[str] | None = None,
    fabric: Any = None,
    resume: bool = False,
    save_every: float = 60.0,
    about: Mapping[str, Any] | None = None,
    progress: Console | None = None,
) -> Neurons:
    """Write to `out` what every unit of `layers` responds to in `images`, and open that file.

    `layers` are names as for `explain`, or patterns such as "layer3.*" over the B-cos layers;
    without them all B-cos layers whose units have maps. Of each unit the `top` images are kept with
    the position and value of its largest activation there, besides moments and the share of images
    that excite it above `active_above`. `about` is JSON of your own, kept in the file. `batch`
    images are looked at together, by default 64, or fewer large ones on a CPU.

    With a launched `lightning.Fabric` its processes share the images. The state is written beside
    `out` every `save_every` seconds and when the process is told to end; `resume` goes on from it,
    to the same file.
    """
    model = bcos_within(model)
    refuse_conventional(model, "has no B-cos units to look at")
    for name, value in (("top", top), ("batch", batch)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` (={value}) must be at least 1.")
    if math.isnan(active_above):
        raise ValueError(f"`active_above` (={active_above}) must be a number: choose one, as in 0.")
    out, count = Path(out), len(images)
    if not count:
        raise ValueError("`images` is empty: there is nothing to respond to.")
    if not out.parent.is_dir():
        raise NeuronsError(f"`out` (={str(out)!r}): its folder does not exist; create it.")
    if out.is_dir():
        raise NeuronsError(f"`out` (={str(out)!r}) is a folder: name a file in it.")
    world, rank = (fabric.world_size, fabric.global_rank) if fabric is not None else (1, 0)
    labels = images.labels.cpu()
    names = _class_names(model, classes, labels)
    if batch is None:
        batch = min(BATCH, at_once(images.batch(torch.tensor([0]))[0].shape[2:], _device(model)))
    with in_mode(model, training=False), told_to_end() as ending:
        chosen = _chosen(model, images, layers)
        left = {name for name, _ in model.bcos_layers()} - {layer.name for layer in chosen}
        if layers is None and left and progress is not None and rank == 0:
            some = ", ".join(sorted(left)[:3]) + ", …" * (len(left) > 3)
            progress.print(
                f"{len(left)} B-cos layers are left out, whose units have no maps or which run in "
                f"training only: {some}."
            )
        identity = {
            "count": count,
            "top": top,
            "active_above": active_above,
            "classes": names,
            "model": fingerprint(model),
            "about": dict(about or {}),
        }
        own = {
            **identity,
            "layers": [layer.name for layer in chosen],
            "labels": hashlib.sha256(labels.numpy().tobytes()).hexdigest(),
            "processes": world,
        }
        state = Saved(out.with_name(f"{out.name}.{rank}-of-{world}.part"), own, save_every)
        tally = (state.read() if resume else None) or _nothing_seen(model, chosen, top)
        tally.to(_device(model))
        first, last = rank * count // world, (rank + 1) * count // world
        starts = range(first + tally.seen, last, batch)
        for start in _shown(starts, progress if rank == 0 else None):
            indices = torch.arange(start, min(start + batch, last))
            tally.add(start, _look(model, images.batch(indices)[0], chosen), active_above)
            if ending():
                state.write(tally)
                raise KeyboardInterrupt(
                    f"stopped after {tally.seen} images; resuming goes on from there."
                )
            state.write_if_due(tally)
    whole = tally if fabric is None else _merged(tally, fabric)
    statistics = whole.statistics(chosen)
    if fabric is None or fabric.local_rank == 0:  # one for each machine
        write(out, identity, chosen, statistics, labels)
    if fabric is not None:
        fabric.barrier()
    state.path.unlink(missing_ok=True)
    return Neurons(out)


def memory_bound(units: int, top: int, batch: int) -> int:
    """The bytes that `collect` needs at most beside the forward pass itself, in float32."""
    state = units * (12 * top + 40)
    merging = units * (top + batch) * 80
    return state + merging


def fingerprint(model: nn.Module) -> str:
    """A name for the model's function: equal for equal weights, γ, B and ε, on any device."""
    model = bcos_within(model)
    state = model.state_dict()
    hashes = torch.stack([torch.hash_tensor(v).view(torch.int64) for v in state.values()])
    scales = [(layer.scale, layer.b, layer.eps) for _, layer in model.bcos_layers()]
    words = json.dumps([list(state), hashes.tolist(), scales, model.temperature, model.logit_bias])
    return hashlib.sha256(words.encode()).hexdigest()[:16]


# The pass.


def _shown(starts: range, progress: Console | None) -> Iterable[int]:
    quiet = progress is None or not progress.is_terminal
    return track(starts, "looking at images", console=progress, disable=quiet, transient=True)


def _nothing_seen(model: BcosModel, layers: Sequence[Layer], top: int) -> Tally:
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    return Tally.empty(sum(layer.units for layer in layers), top, dtype)


def _look(model: BcosModel, x: Tensor, layers: Sequence[Layer]) -> Seen:
    found: dict[str, tuple[Tensor, ...]] = {}

    def reduce(layer: Layer, out: Tensor) -> None:
        maps = layer.maps(out).flatten(2)  # [B, C, H·W]
        if maps.dtype in (torch.float16, torch.bfloat16):
            maps = maps.float()
        means = maps.mean(2)
        length = torch.linalg.vector_norm(maps - means[:, :, None], dim=2)  # quicker than var_mean
        found[layer.name] = (*maps.max(2), means, length / math.sqrt(maps.shape[2]))

    looks = {layer.name: (lambda out, layer=layer: reduce(layer, out)) for layer in layers}
    with torch.no_grad():
        watch(model.network, _encoded(model, x), looks)
    columns = zip(*(found[layer.name] for layer in layers), strict=True)
    return Seen(*(torch.cat(parts, 1) for parts in columns))


def _merged(tally: Tally, fabric: Any) -> Tally:
    """One tally of all processes', whose images follow each other in the order of their ranks."""
    if fabric.world_size == 1:
        return tally
    gathered = fabric.all_gather({**tally.tensors(), "seen": torch.tensor(tally.seen)})
    parts = [
        Tally(**{k: v[rank] for k, v in gathered.items() if k != "seen"}, seen=int(seen))
        for rank, seen in enumerate(gathered["seen"])
    ]
    first, *others = parts
    for other in others:
        first.merge(other)
    return first


# What to look at.


def _chosen(
    model: BcosModel, images: ImageSet, patterns: Sequence[str] | None
) -> tuple[Layer, ...]:
    known = layer_names(model.network)
    bcos = [name for name, _ in model.bcos_layers() if name in known]
    names: dict[str, None] = {}
    for pattern in patterns if patterns is not None else bcos:
        matching = [pattern] if pattern in known else fnmatch.filter(bcos, pattern)
        if not matching:
            raise NeuronsError(
                f"`layers` (={pattern!r}) matches no layer: the B-cos layers are "
                f"{', '.join(bcos[:6])}{', …' * (len(bcos) > 6)}."
            )
        names.update(dict.fromkeys(matching))
    shapes: dict[str, tuple[int, ...]] = {}
    x = images.batch(torch.tensor([0]))[0]
    check_images(x, model.in_channels)
    check_values(x)
    looks = {name: (lambda out, name=name: shapes.update({name: out.shape})) for name in names}
    encoded = _encoded(model, x)
    with torch.no_grad():
        watch(model.network, encoded, looks)
    with_maps = [name for name in names if len(shapes[name]) == 4]
    axes = channel_axes(model.network, with_maps, encoded)
    layers = []
    for name in sorted(names, key=known.index):
        shape = shapes[name][1:]
        axis = axes.get(name)
        if len(shape) != 1 and axis not in (1, 3):
            if patterns is None:
                continue
            raise NeuronsError(
                f"`layers` (={name!r}) has an output of shape {tuple(shapes[name])}: units have "
                "maps in [N, C], [N, C, H, W] or [N, H, W, C], so leave this layer out."
            )
        if len(shape) == 1:
            layers.append(Layer(name, shape[0], 1, 1))
        elif axis == 3:
            layers.append(Layer(name, shape[2], shape[0], shape[1], channels_last=True))
        else:
            layers.append(Layer(name, shape[0], shape[1], shape[2]))
    return tuple(layers)


def _class_names(
    model: BcosModel, classes: Sequence[str] | None, labels: Tensor
) -> tuple[str, ...]:
    names = classes if classes is not None else model.classes
    needed = int(labels.max()) + 1
    if names is None:
        names = [f"class {i}" for i in range(max(needed, model.num_classes or 0))]
    if len(names) < needed:
        raise ValueError(
            f"`classes` (={len(names)} names) must name all {needed} classes of the images."
        )
    return tuple(names)


def _device(model: BcosModel) -> torch.device:
    return next(model.parameters()).device


def _encoded(model: BcosModel, images: Tensor) -> Tensor:
    return model.encoded(images.to(_device(model), non_blocking=True))
