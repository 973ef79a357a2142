"""How many grids a second each method of explanation scores, and how many in a loop one by one.

    python benchmarks/localise.py                     # on a GPU: 500 3×3 grids of 672 px, ResNet-34

The B-cos ResNet-34 is calibrated, not trained, and the images are noise: neither changes the time.
`ours` scores all grids. Every other method is timed until it has run for `--seconds`, at least two
batches; the time for all grids is then extrapolated, and the result says so. Beside it stands the
loop of most programs: one grid at a time, and a call for each of its classes; RISE, LIME and
Occlusion, which get all classes from one set of forward passes, grid by grid.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import torchbcos as tb
from torchbcos.data import Images
from torchbcos.evidence import command, commit
from torchbcos.localise import default_kernel, score_cells
from torchbcos.localise_run import grid_images
from torchbcos.posthoc import METHODS, Method, choose_methods

ROOT = Path(__file__).resolve().parent.parent
SEED = 0
OURS_GOAL, GRADIENTS_GOAL = 60.0, 600.0  # seconds for all grids on an H200


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.n, self.grids, self.batch = arguments.n, arguments.grids, arguments.batch
        self.device = torch.device(arguments.device)
        torch.manual_seed(SEED)
        self.model = tb.create_model(
            arguments.arch, num_classes=arguments.classes, b=2.0, max_out=2,
            input_size=arguments.size,
        )  # fmt: skip
        tb.calibrate(self.model, torch.rand(8, 3, arguments.size, arguments.size))
        self.model.to(self.device).eval()
        if arguments.channels_last:
            self.model.to(memory_format=torch.channels_last)
        cells = self.n**2
        shape = (50 * cells, 3, arguments.size, arguments.size)
        pixels = torch.randint(256, shape, dtype=torch.uint8)
        labels = torch.arange(len(pixels)) % arguments.classes
        self.images = Images(pixels, labels).to(self.device)
        self.plan = torch.arange(self.grids * cells).view(-1, cells) % len(pixels)
        self.labels = labels[self.plan]
        self.kernel = default_kernel(arguments.size)

    def score(self, method: Method, rows: slice) -> torch.Tensor:
        grids, _ = grid_images(self.images, self.plan[rows], self.n)
        smooth = 0 if method.perturbs else self.kernel
        return score_cells(method(self.model, grids, self.labels[rows]), self.n, smooth)

    def score_one_by_one(self, method: Method, grid: int) -> None:
        image, _ = grid_images(self.images, self.plan[grid : grid + 1], self.n)
        targets = self.labels[grid : grid + 1]
        for part in [targets] if method.perturbs else targets.split(1, dim=1):
            maps = method(self.model, image, part)
            score_cells(maps.expand(-1, self.n**2, -1, -1), self.n).cpu()

    def warm_up(self, method: Method) -> None:
        if method.perturbs:  # one cell will do
            method(self.model, self.images.batch(torch.tensor([0]))[0], [0])
        else:
            self.score(method, slice(0, self.batch))

    def together(self, method: Method, seconds: float) -> dict[str, Any]:
        """Grids scored in batches until the time is up; with no limit, all of them."""
        batch = 1 if method.perturbs else self.batch
        self.warm_up(method)
        started = now(self.device)
        done = 0
        while done < self.grids:
            rows = slice(done, min(done + batch, self.grids))
            self.score(method, rows)
            done = rows.stop
            if done >= 2 * batch and seconds < math.inf and now(self.device) - started > seconds:
                break
        taken = now(self.device) - started
        return {
            "grids_timed": done,
            "seconds": round(taken, 3),
            "grids_per_second": round(done / taken, 4),
            f"seconds_for_{self.grids}": round(taken / done * self.grids, 1),
            "extrapolated": done < self.grids,
        }

    def one_by_one(self, method: Method, seconds: float) -> dict[str, Any]:
        if not method.perturbs:  # kernels for this shape may have to be compiled
            self.score_one_by_one(method, 0)
        started = now(self.device)
        done = 0
        while done < self.grids and (done < 1 or now(self.device) - started < seconds):
            self.score_one_by_one(method, done)
            done += 1
        taken = now(self.device) - started
        return {
            "grids_timed": done,
            "seconds": round(taken, 3),
            "grids_per_second": round(done / taken, 4),
        }


def installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def evidence(arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "command": command("python", "benchmarks/localise.py"),
        "commit": commit(),
        "seed": SEED,
        "device": name,
        "torch": torch.__version__,
        "torchbcos": tb.__version__,
        **{p: installed(p) for p in ("captum", "lime", "scikit-image")},
        "tf32_convolutions": torch.backends.cudnn.allow_tf32,
        "channels_last": arguments.channels_last,
        "grids": arguments.grids,
        "cells": f"{arguments.n}×{arguments.n}",
        "pixels": arguments.n * arguments.size,
        "batch": arguments.batch,
        "network": f"B-cos {arguments.arch}, B = 2, 2 MaxOut units, {arguments.classes} classes",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default)
    parser.add_argument("--arch", default="resnet34")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--size", type=int, default=224, help="pixels of a cell")
    parser.add_argument("--n", type=int, default=3)
    parser.add_argument("--grids", type=int, default=500)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--methods", default="all", help="comma-separated")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each way of a method")
    parser.add_argument("--full", action="store_true", help="gradient methods on all grids")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "results/localise_gpu.json")
    arguments = parser.parse_args()

    bench = Bench(arguments)
    result: dict[str, Any] = {"evidence": evidence(arguments), "methods": {}}
    for method in choose_methods(arguments.methods.split(","), bench.model):
        whole = method.inherent or (arguments.full and not method.perturbs)
        found = bench.together(method, math.inf if whole else arguments.seconds)
        alone = bench.one_by_one(method, arguments.seconds)
        found["one_by_one"] = alone
        found["times_faster"] = round(found["grids_per_second"] / alone["grids_per_second"], 2)
        result["methods"][method.name] = found
        total = found[f"seconds_for_{arguments.grids}"]
        print(
            f"{method.label:14} {found['grids_per_second']:9.3f} grids/s, one by one "
            f"{alone['grids_per_second']:8.3f}; {arguments.grids} grids take {total:.0f} s"
            f"{' (extrapolated)' if found['extrapolated'] else ''}",
            flush=True,
        )
        key = f"seconds_for_{arguments.grids}"
        gradients = [v[key] for k, v in result["methods"].items() if not METHODS[k].perturbs]
        result["seconds"] = {
            "ours": result["methods"].get("ours", {}).get(key),
            "ours_goal": OURS_GOAL,
            "all_gradient_methods": round(sum(gradients), 1),
            "all_gradient_methods_goal": GRADIENTS_GOAL,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")  # what is known so far


if __name__ == "__main__":
    main()
