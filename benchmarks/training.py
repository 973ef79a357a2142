"""The speed of training on a GPU, in images per second, each against a plain way of doing it.

    python benchmarks/training.py                          # about two minutes on one GPU
    python benchmarks/training.py --data DIR               # images in DIR/train and DIR/val

First the paper's CIFAR-10 network with MaxOut at batch 64 in float32 (TF32): our loop, with data on
the device and a captured step, against an eager loop over a torchvision data set and DataLoader,
for one and the same model. Then ResNet-34 at 224 pixels in bf16: our loop with its input pipeline,
from memory and from files, against the same loop on one batch that is already on the device.

Without --data the second part draws its own JPEG files.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

import torchbcos as tb
from torchbcos import train as training
from torchbcos.data import Images, Split, default_workers, shapes
from torchbcos.evidence import command, commit
from torchbcos.processes import make_fabric
from torchbcos.recipe import read_recipe
from torchbcos.training_config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
GOALS = {"cifar_ratio": 10, "cifar_images_per_second": 60_000, "pipeline_share": 0.9}


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def speed(step: Callable[[], Any], batch: int, seconds: float, warm_up: int = 5) -> float:
    """Images per second of repeated steps, over at least this time."""
    for _ in range(warm_up):
        step()
    synchronise()
    started, steps, some = time.perf_counter(), 0, 1
    while (passed := time.perf_counter() - started) < seconds:
        if steps:
            some = max(1, round(steps / passed * 0.5))  # so that waiting for the GPU is rare
        for _ in range(some):
            step()
        steps += some
        synchronise()
    return steps * batch / passed


def our_loop(config: TrainConfig, data: Split | None, workers: int | None) -> training._Run:
    """A training that is ready for its first step; `data` in place of what the config names."""
    before = training.open_data
    if data is not None:
        training.open_data = lambda *_, **__: data
    try:
        fabric = make_fabric(config.precision)
        fabric.launch()
        out = Path(tempfile.mkdtemp())
        run = training._Run(config, out, fabric, Console(quiet=True), workers)
        run.begin()
    finally:
        training.open_data = before
    return run


def steps_of(run: training._Run) -> Callable[[], None]:
    batches = run.batches.following(0)
    return lambda: run.advance(*next(batches))


def drawn_like_cifar(count: int) -> Split:
    made = shapes(min(count, 2048), size=32)
    pixels = (made.images * 255).round().to(torch.uint8)
    pixels = pixels.repeat(-(-count // len(pixels)), 1, 1, 1)[:count]
    labels = torch.arange(count) % 10
    return Split(Images(pixels, labels), Images(pixels[:100], labels[:100]), tuple("abcdefghij"))


class AsPictures(torch.utils.data.Dataset):
    """What torchvision's CIFAR10 does: a PIL image for each index, then transforms."""

    def __init__(self, images: Images) -> None:
        self.pixels = images.pixels.permute(0, 2, 3, 1).contiguous().numpy()
        self.labels = images.labels.tolist()
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(32, padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
            ]
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[index])), self.labels[index]


def endless(loader: DataLoader) -> Iterator[Any]:
    while True:
        yield from loader


def plain_steps(
    config: TrainConfig, loader: DataLoader, device: torch.device
) -> Callable[[], None]:
    """The loop that everyone writes first, for the same model, optimiser and loss."""
    torch.manual_seed(0)
    model = tb.create_model(config.arch, num_classes=10, preset="paper", **config.options)
    model.to(device)
    optimiser = torch.optim.Adam(model.parameters(), config.lr)
    batches = endless(loader)

    def step() -> None:
        images, labels = next(batches)
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        logits = model(images)
        target = F.one_hot(labels, 10).float()
        loss = F.binary_cross_entropy_with_logits(logits, target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return step


def cifar(arguments: argparse.Namespace, report: Callable[[str, Any], None]) -> None:
    data = drawn_like_cifar(arguments.images)
    config = replace(read_recipe("cifar10", "drawn"), batch=arguments.batch)
    run = our_loop(config, data, None)
    ours = speed(steps_of(run), config.batch, arguments.seconds)
    report("cifar_ours", round(ours))
    eager = our_loop(replace(config, cuda_graph=False), data, None)
    report("cifar_ours_not_captured", round(speed(steps_of(eager), config.batch, 2)))

    device = run.fabric.device
    torch.set_float32_matmul_precision("high")
    loader = DataLoader(
        AsPictures(data.train),
        config.batch,
        shuffle=True,
        drop_last=True,
        num_workers=arguments.workers,
        pin_memory=device.type == "cuda",
        persistent_workers=arguments.workers > 0,
    )
    plain = speed(plain_steps(config, loader, device), config.batch, arguments.seconds)
    report("cifar_plain", round(plain))
    report("cifar_ratio", round(ours / plain, 2))


def draw_jpegs(folder: Path, count: int, size: int) -> None:
    made = shapes(min(count, 128), size=size)
    for i in range(count):
        part = "val" if i % 16 == 0 else "train"
        path = folder / part / f"class{i // 16 % 10}" / f"{i}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = (made.images[i % len(made.images)] * 255).byte().permute(1, 2, 0)
        Image.fromarray(pixels.numpy()).save(path, quality=90)


def resnet(arguments: argparse.Namespace, report: Callable[[str, Any], None]) -> None:
    folder = arguments.data or Path(tempfile.mkdtemp())
    if arguments.data is None:
        draw_jpegs(folder, arguments.files, arguments.size)
    changes = [f"size={arguments.size}", f"batch={arguments.large_batch}"]
    config = read_recipe("imagenette-resnet34", str(folder), [*changes, *arguments.change])
    # One batch seen for ever must not be learned, and all images have the same size.
    config = replace(config, lr=1e-12, lr_end=0, warmup=0, train_sizes=())
    if not torch.cuda.is_available():
        config = replace(config, precision="32-true")
    measured: dict[str, float] = {}
    ways = {"cached": config, "from_memory": config, "from_files": replace(config, memory=0)}
    for name, settings in ways.items():
        run = our_loop(settings, None, arguments.workers)
        step = steps_of(run)
        if name == "cached":
            kept = run.batches.at(0)
            step = lambda run=run, kept=kept: run.advance(*kept)  # noqa: E731
        measured[name] = speed(step, settings.batch, arguments.seconds, warm_up=10)
        report(f"resnet34_{name}", round(measured[name]))
        del run, step
    for name in ("from_memory", "from_files"):
        report(f"pipeline_share_{name}", round(measured[name] / measured["cached"], 3))


def loader_alone(arguments: argparse.Namespace, report: Callable[[str, Any], None]) -> None:
    """What torchvision's ImageFolder and DataLoader reach with the same workers, for comparison."""
    if arguments.data is None:
        return
    change = transforms.Compose(
        [transforms.RandomResizedCrop(arguments.size), transforms.ToTensor()]
    )
    images = ImageFolder(str(arguments.data / "train"), change)
    loader = DataLoader(
        images, arguments.large_batch, shuffle=True, num_workers=arguments.workers, drop_last=True
    )
    batches = endless(loader)
    found = speed(lambda: next(batches), arguments.large_batch, arguments.seconds / 2, warm_up=2)
    report("torchvision_loader_alone", round(found))


def evidence(arguments: argparse.Namespace) -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "command": command("python", "benchmarks/training.py"),
        "commit": commit(),
        "seed": 0,
        "device": torch.cuda.get_device_name() if cuda else platform.processor(),
        "torch": torch.__version__,
        "torchbcos": tb.__version__,
        "workers": arguments.workers,
        "cifar": f"cifar9, MaxOut 2, B 2, batch {arguments.batch}, float32 with TF32",
        "resnet34": f"MaxOut 2, B 2, {arguments.size} px, batch {arguments.large_batch}, "
        + ("bf16" if cuda else "float32"),
        "images": "given folder" if arguments.data else f"{arguments.files} drawn JPEG files",
        "seconds_each": arguments.seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="class folders for the second part")
    parser.add_argument("--only", choices=("cifar", "resnet"))
    parser.add_argument("--seconds", type=float, default=8.0, help="for each measurement")
    parser.add_argument("--workers", type=int, default=default_workers())
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--files", type=int, default=4096, help="how many to draw without --data")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--large-batch", type=int, default=256)
    parser.add_argument("--change", nargs="*", default=[], help="settings for ResNet-34")
    parser.add_argument("--out", type=Path, default=ROOT / "results/training_gpu.json")
    arguments = parser.parse_args()

    results: dict[str, Any] = {}
    proof = evidence(arguments)

    def report(name: str, value: Any) -> None:
        results[name] = value
        print(f"{name}: {value:,}", flush=True)
        document = {"evidence": proof, "images_per_second": results, "goals": GOALS}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")  # what is known so far

    if arguments.only != "resnet":
        cifar(arguments, report)
    if arguments.only != "cifar":
        resnet(arguments, report)
        loader_alone(arguments, report)


if __name__ == "__main__":
    main()
