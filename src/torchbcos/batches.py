"""Batches of an image set, for training by step and for evaluation in order.

Sets in memory are cut and augmented on their device, on a GPU by one CUDA graph. Files are decoded
by worker processes some batches ahead, copied to the device while it computes, and augmented there;
only the random resized crop is taken where the file is decoded, from all of its pixels.
`train_sizes` are sizes of the batches alone: what is in memory, and what is tested, has the size of
the set.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset

from torchbcos.augment import AUGMENTATIONS, crops, cutmix, draw_cutmix, exchanged
from torchbcos.captured import as_graph
from torchbcos.checkpoint import write_atomically
from torchbcos.data import DataError, ImageFiles, Images, ImageSet, default_workers
from torchbcos.images import ImageError, check_image
from torchbcos.training_config import TrainConfig

__all__ = ["Batches", "at_once", "digest_of_files", "find_damaged", "in_order"]

Batch = tuple[Tensor, Tensor]
Plan = tuple[Tensor, Tensor | None, tuple[int, int]]
#: Images that only pass forward together: so many at the most, and no more than have so many
#: pixels, which on a CPU should stay near its caches.
_AT_ONCE = {"cpu": (64, 16 * 224 * 224), "cuda": (500, 2**23)}


class Batches:
    """This process's share of every batch of a training.

    Which images a batch holds, and what is done to each, depends on the seed and the step alone:
    not on earlier steps, the device, the number of processes or of workers.
    """

    def __init__(
        self,
        images: ImageSet,
        config: TrainConfig,
        device: torch.device,
        *,
        classes: int = 0,
        rank: int = 0,
        world: int = 1,
        workers: int | None = None,
    ) -> None:
        self.images = images.to(device) if isinstance(images, Images) else images
        self.config, self.device, self.classes = config, device, classes
        self.steps_per_epoch = len(images) // config.batch
        self.total_steps = max(1, round(config.epochs * self.steps_per_epoch))
        self._workers = default_workers() if workers is None else workers
        self._share = slice(rank * config.batch // world, (rank + 1) * config.batch // world)
        self._order: tuple[int, Tensor] | None = None  # (epoch, its shuffled indices)
        in_memory = isinstance(images, Images)  # else resized_crop is taken while decoding
        self._names = [n for n in config.augment if in_memory or n != "resized_crop"]
        self._counts = [len(self._draw(0, name)) for name in self._names]
        self._counts.append(len(self._draw_mixing(0)))
        self._captures = in_memory and config.cuda_graph and device.type == "cuda" and world == 1
        self._graph: tuple[tuple[int, int], Callable[..., Batch]] | None = None  # (size, `_cut`)

    def at(self, step: int, *, whole: bool = False) -> Batch:
        """Images [n, C, H, W] in 0..1 and labels; with `whole` those of all processes.

        Labels are [n], or with `cutmix` [n, classes]: how much of each class is in an image.
        """
        rows = slice(None) if whole else self._share
        plan = self._plan(step, rows)
        draws = self._on_device(self._draws(step, rows))
        if isinstance(self.images, Images):
            return self._cut(plan[0], draws, plan[2])
        images, labels = (t.to(self.device) for t in self.images.batch(*plan))
        return self._augmented(images, labels, draws, plan[2])

    def size(self, step: int) -> tuple[int, int]:
        """Height and width of the images of a step."""
        sizes = self.config.train_sizes
        if not sizes:
            return self.images.size
        return (sizes[min(step * len(sizes) // self.total_steps, len(sizes) - 1)],) * 2

    def following(self, step: int) -> Iterator[Batch]:
        """The batches from `step` on, without an end; those of a graph overwrite one another."""
        if isinstance(self.images, Images):
            while True:
                yield self._replayed(step) if self._captures else self.at(step)
                step += 1
        loader = _loader(_Decoder(self.images), _Plans(self, step), self._workers, self.device)
        for pixels, labels in _ahead(loader, self.device):
            draws = self._on_device(self._draws(step, self._share))
            yield self._augmented(pixels.float() / 255, labels, draws, self.size(step))
            step += 1

    def _plan(self, step: int, rows: slice) -> Plan:
        """The indices of a batch's images and, for files, the part of each, and its size."""
        c = self.config
        epoch, within = divmod(step, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            shuffled = torch.randperm(len(self.images), generator=_generator(c.seed, epoch, -1))
            if isinstance(self.images, Images):
                shuffled = self._on_device(shuffled)
            self._order = (epoch, shuffled)
        indices = self._order[1][within * c.batch : (within + 1) * c.batch][rows]
        if isinstance(self.images, Images) or "resized_crop" not in c.augment:
            return indices, None, self.size(step)
        parts = crops(self._draw(step, "resized_crop")[:, rows], (c.crop_area, 1.0))
        return indices, parts, self.size(step)

    def _replayed(self, step: int) -> Batch:
        """As `at`, by the graph for images of this size."""
        indices, _, size = self._plan(step, self._share)
        draws = self._on_device(self._draws(step, self._share))
        if self._graph is None or self._graph[0] != size:
            self._graph = None  # its memory is free for the next
            example = (indices.clone(), draws.clone())
            self._graph = (size, as_graph(partial(self._cut, size=size), *example))
        return self._graph[1](indices, draws)

    def _cut(self, indices: Tensor, draws: Tensor, size: tuple[int, int]) -> Batch:
        """A batch of a set in memory; all that the graph does."""
        assert isinstance(self.images, Images)
        return self._augmented(*self.images.batch(indices), draws, size)

    def _augmented(
        self, images: Tensor, labels: Tensor, draws: Tensor, size: tuple[int, int]
    ) -> Batch:
        c = self.config
        if "resized_crop" not in c.augment and images.shape[2:] != size:
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        settings: dict[str, dict[str, Any]] = {
            "resized_crop": {
                "scale": (c.crop_area, 1.0),
                "size": size[0] if c.train_sizes else None,
            },
            "rand_augment": {"m": c.magnitude},
        }
        *parts, mixing = draws.split(self._counts)
        for name, own in zip(self._names, parts, strict=True):
            images = AUGMENTATIONS[name].change(images, own, **settings.get(name, {}))
        if c.cutmix:
            images, share = cutmix(images, mixing, c.cutmix)
            labels = F.one_hot(labels, self.classes).to(share.dtype)
            labels = torch.lerp(exchanged(labels), labels, share[:, None])
        return images.contiguous(memory_format=torch.channels_last), labels

    def _draws(self, step: int, rows: slice) -> Tensor:
        """The numbers [K, n] of all augmentations, together, so that they are copied at once."""
        drawn = [*(self._draw(step, name) for name in self._names), self._draw_mixing(step)]
        return torch.cat([numbers[:, rows] for numbers in drawn])

    def _on_device(self, numbers: Tensor) -> Tensor:
        """A copy that the host does not wait for."""
        if self.device.type != "cuda":
            return numbers.to(self.device)
        return numbers.pin_memory().to(self.device, non_blocking=True)

    def _draw(self, step: int, name: str) -> Tensor:
        c = self.config
        generator = _generator(c.seed, step, list(AUGMENTATIONS).index(name))
        settings = {"n": c.operations} if name == "rand_augment" else {}
        return AUGMENTATIONS[name].draw(generator, c.batch, **settings)

    def _draw_mixing(self, step: int) -> Tensor:
        c = self.config
        if not c.cutmix:
            return torch.empty(0, c.batch)
        return draw_cutmix(_generator(c.seed, step, -2), c.batch)


def in_order(
    images: ImageSet,
    size: int,
    device: torch.device,
    *,
    rank: int = 0,
    world: int = 1,
    workers: int | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Images, labels and whether each counts, for every `world`-th image.

    All processes get equally many; where that does not come out even, the last ones do not count.
    """
    rounds = -(-len(images) // world)
    numbers = torch.arange(rank, rounds * world, world)
    chunks = numbers.clamp(max=len(images) - 1).split(size)
    counted = (numbers < len(images)).split(size)
    if isinstance(images, Images):
        batches: Iterable[Batch] = (images.batch(chunk) for chunk in chunks)
    else:
        count = min(default_workers() if workers is None else workers, len(chunks))
        plans = [(chunk, None, images.size) for chunk in chunks]
        loaded = _ahead(_loader(_Decoder(images), plans, count, device), device)
        batches = ((pixels.float() / 255, labels) for pixels, labels in loaded)
    for (x, labels), counts in zip(batches, counted, strict=True):
        x = x.to(device).contiguous(memory_format=torch.channels_last)
        yield x, labels.to(device), counts.to(device)


def at_once(size: Sequence[int], device: torch.device) -> int:
    """How many images of this size are looked at together where nothing is derived.

    >>> at_once((224, 224), torch.device("cpu"))
    16
    """
    most, pixels = _AT_ONCE.get(device.type, _AT_ONCE["cuda"])
    return max(1, min(most, pixels // (size[0] * size[1])))


def find_damaged(
    images: ImageFiles, record: Path | None = None, workers: int | None = None
) -> dict[int, str]:
    """A sentence for each file that cannot be read, by its index.

    What was found is kept in `record`, if given, and not searched again for the same files, by
    their `digest_of_files`.
    """
    digest = digest_of_files(images.files)
    if record is not None and record.exists():
        known = json.loads(record.read_bytes())
        if known["files"] == digest:
            return {int(i): words for i, words in known["damaged"].items()}
    chunks = [range(i, min(i + 256, len(images))) for i in range(0, len(images), 256)]
    count = min(default_workers() if workers is None else workers, len(chunks))
    checked = _loader(_Checker(images), chunks, count, torch.device("cpu"))
    damaged = {i: words for part in checked for i, words in part.items()}
    if record is not None:
        text = json.dumps({"files": digest, "damaged": damaged}, indent=1)
        write_atomically(record, text.encode())
    return damaged


def digest_of_files(files: Iterable[str]) -> str:
    """Of their names, lengths and times of their last change."""
    digest = hashlib.sha256()
    for file in files:
        try:
            found = os.stat(file)  # noqa: PTH116 (a million paths as strings)
            stamp = f"{found.st_size} {found.st_mtime_ns}"
        except OSError:
            stamp = "not there"
        digest.update(f"{file}\0{stamp}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _generator(seed: int, number: int, stream: int) -> Generator:
    """Random numbers of their own for each (seed, step or epoch, purpose)."""
    digest = hashlib.blake2b(f"{seed} {number} {stream}".encode(), digest_size=8).digest()
    return Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


class _Decoder(Dataset[Batch | str]):
    """Decodes the planned batch; where that fails the sentence is the result."""

    def __init__(self, images: ImageFiles) -> None:
        self.images = images

    def __getitem__(self, plan: Any) -> Batch | str:
        try:
            return self.images.decode(*plan)
        except ImageError as error:
            return str(error)


class _Checker(Dataset[dict[int, str]]):
    def __init__(self, images: ImageFiles) -> None:
        self.images = images

    def __getitem__(self, chunk: Any) -> dict[int, str]:
        damaged = {}
        for index in chunk:
            try:
                check_image(self.images.files[index])
            except ImageError as error:
                damaged[index] = str(error)
        return damaged


class _Plans:
    """What to decode for the batches from a step on."""

    def __init__(self, batches: Batches, step: int) -> None:
        self.batches, self.step = batches, step

    def __iter__(self) -> Iterator[Plan]:
        step = self.step
        while True:
            yield self.batches._plan(step, self.batches._share)
            step += 1


def _loader(dataset: Dataset[Any], plans: Any, workers: int, device: torch.device) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "This DataLoader will create"
        )  # more than there are cores
        loader = DataLoader(
            dataset,
            batch_size=None,  # each plan is a whole batch
            sampler=plans,
            num_workers=workers,
            prefetch_factor=2 if workers else None,
            pin_memory=device.type == "cuda",
            collate_fn=_unchanged,
            worker_init_fn=_ignore_interrupt,
        )
        return iter(loader)


def _unchanged(item: Any) -> Any:
    return item


def _ignore_interrupt(_: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that trains answers to Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _ahead(loader: Iterable[Batch | str], device: torch.device) -> Iterator[Batch]:
    """Batches on the device; on a GPU the next one is copied while this one is worked on."""
    if device.type != "cuda":
        yield from map(_checked, loader)
        return
    side = torch.cuda.Stream(device)
    coming: tuple[Batch, torch.cuda.Event] | None = None

    def arrived(moved: Batch, done: torch.cuda.Event) -> Batch:
        now = torch.cuda.current_stream(device)
        now.wait_event(done)
        for tensor in moved:
            tensor.record_stream(now)
        return moved

    for item in loader:
        pixels, labels = _checked(item)
        with torch.cuda.stream(side):
            moved = pixels.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            done = side.record_event()
        if coming is not None:
            yield arrived(*coming)
        coming = moved, done
    if coming is not None:
        yield arrived(*coming)


def _checked(item: Batch | str) -> Batch:
    if isinstance(item, str):
        raise DataError(item)
    return item
