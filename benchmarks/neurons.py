"""The time and memory of `neurons.collect` beside a plain forward pass over the same images.

    python benchmarks/neurons.py                                     # 10,000 images on a GPU
    python benchmarks/neurons.py --images 256 --batch 32 --size 64   # a few minutes on a CPU

A ResNet-34 with two MaxOut units looks at random pixels, which cost what photographs cost. Both
passes take the same batches from the same tensor, take turns, and are compared by their medians;
the pass of `collect` ends with the file on disk. Memory on a GPU is the peak that torch allocated
beyond that of the plain pass; `neurons.memory_bound` says what it must not exceed.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torchbcos as tb
from torchbcos.data import Images
from torchbcos.evidence import command, commit, device_name
from torchbcos.neurons import collect, memory_bound

ROOT = Path(__file__).resolve().parent.parent
SEED = 0
CLASSES = 1000
GOAL = 1.3


def random_images(count: int, size: int, device: str) -> Images:
    generator = torch.Generator(device).manual_seed(SEED)
    pixels = torch.randint(
        0, 256, (count, 3, size, size), dtype=torch.uint8, device=device, generator=generator
    )
    return Images(pixels, torch.arange(count, device=device) % CLASSES)


def network(images: Images, device: str, precision: str) -> tb.BcosModel:
    torch.manual_seed(SEED)
    size = images.pixels.shape[-1]
    model = tb.create_model("resnet34", num_classes=CLASSES, max_out=2, input_size=size).to(device)
    tb.calibrate(model, images.batch(torch.arange(8))[0])
    model.to(getattr(torch, precision))
    return model.to(memory_format=torch.channels_last).eval()


@torch.no_grad()
def plain_pass(model: tb.BcosModel, images: Images, batch: int) -> None:
    dtype = next(model.parameters()).dtype
    for indices in torch.arange(len(images)).split(batch):
        model(images.batch(indices)[0].to(dtype))


def measured(work: Callable[[], Any], device: str) -> tuple[float, int]:
    """Seconds, and on a GPU the peak of allocated bytes during the work beyond those before it."""
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    started = time.perf_counter()
    work()
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return seconds, torch.cuda.max_memory_allocated() - before if on_gpu else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--top", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "results/neurons_gpu.json")
    arguments = parser.parse_args()
    device, batch = arguments.device, arguments.batch

    images = random_images(arguments.images, arguments.size, device)
    model = network(images, device, arguments.precision)
    units = sum(layer.weight.shape[0] // layer.max_out for _, layer in model.bcos_layers())
    bound = memory_bound(units, arguments.top, batch)
    print(f"{units} units of {len(dict(model.bcos_layers()))} layers, {len(images)} images")
    print(f"memory bound beside the forward pass: {bound / 2**20:.1f} MiB")

    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[], Any]] = {
            "plain": lambda: plain_pass(model, images, batch),
            "collect": lambda: collect(
                model, images, Path(folder) / "neurons", top=arguments.top, batch=batch
            ),
        }
        warm = Images(images.pixels[: 2 * batch], images.labels[: 2 * batch])
        plain_pass(model, warm, batch)
        collect(model, warm, Path(folder) / "warm", top=arguments.top, batch=batch)
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        peaks: dict[str, int] = dict.fromkeys(ways, 0)
        for turn in range(arguments.repeats):
            for name, work in ways.items():
                took, peak = measured(work, device)
                seconds[name].append(took)
                peaks[name] = max(peaks[name], peak)
            words = ", ".join(f"{name} {times[-1]:.2f} s" for name, times in seconds.items())
            print(f"turn {turn + 1}: {words}", flush=True)
        written = (Path(folder) / "neurons").stat().st_size

    medians = {name: statistics.median(times) for name, times in seconds.items()}
    ratio = medians["collect"] / medians["plain"]
    more = peaks["collect"] - peaks["plain"]
    result = {
        "evidence": {
            "command": command("python", "benchmarks/neurons.py"),
            "commit": commit(),
            "seed": SEED,
            "hardware": device_name(device),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "torchbcos": tb.__version__,
            "network": f"ResNet-34, 2 units, {CLASSES} classes, {arguments.precision}",
            "images": len(images),
            "pixels": arguments.size,
            "batch": batch,
            "top": arguments.top,
            "repeats": arguments.repeats,
        },
        "units": units,
        "seconds": {name: [round(t, 3) for t in times] for name, times in seconds.items()},
        "median_seconds": {name: round(value, 3) for name, value in medians.items()},
        "ratio": round(ratio, 4),
        "goal": GOAL,
        "memory_bound_bytes": bound,
        "memory_beside_the_forward_pass_bytes": more if device.startswith("cuda") else None,
        "file_bytes": written,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"collect takes {ratio:.3f} times a plain pass; the goal is at most {GOAL}")
    if device.startswith("cuda"):
        print(f"and {more / 2**20:.1f} MiB more at its peak; the bound is {bound / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
