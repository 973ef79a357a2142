"""The recipe `shapes` on a CPU: its accuracy, its time, and where its explanations lie.

    python benchmarks/shapes.py                            # about two minutes on two cores

The share of a test image's positive contributions that lies inside the object's mask is measured
for the true class, over 512 test images; the share of the mask's area says what chance would give.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

import torchbcos as tb
from torchbcos.evidence import command, commit
from torchbcos.processes import make_fabric
from torchbcos.recipe import read_recipe
from torchbcos.shapes import shapes
from torchbcos.train import train

ROOT = Path(__file__).resolve().parent.parent
GOALS = {"test_accuracy": 0.97, "seconds": 120, "inside_mask": 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=ROOT / "results/shapes_cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    config = read_recipe("shapes", "", [f"seed={arguments.seed}"])
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = train(config, folder, fabric=make_fabric())
    seconds = time.perf_counter() - started

    test = shapes(512, size=48, seed=2)
    e = tb.explain(model, test.images, test.labels)
    positive = e.contributions[:, 0].clamp(min=0)
    inside = (positive * test.masks).sum((1, 2)) / positive.sum((1, 2))
    result = {
        "evidence": {
            "command": command("python", "benchmarks/shapes.py"),
            "commit": commit(),
            "seed": arguments.seed,
            "threads": arguments.threads,
            "torch": torch.__version__,
            "torchbcos": tb.__version__,
        },
        "seconds": round(seconds, 1),
        "test_accuracy": round(model.provenance["metrics"]["test_accuracy"], 4),
        "inside_mask": round(inside.mean().item(), 3),
        "mask_area": round(test.masks.float().mean().item(), 3),
        "goals": GOALS,
    }
    print(json.dumps(result, indent=1))
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
