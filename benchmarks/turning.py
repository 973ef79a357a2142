"""How the first steps of a deep network without norms depend on the length of its weights.

    python benchmarks/turning.py --data data/imagenette

Only the directions of B-cos weights matter, so `weight_rms` decides how far a step of Adam turns
them. For each recipe and each `weight_rms` (0: as the layers make them) the first steps are run,
and the mean loss of every 40 of them is written, or the sentence with which the training ended.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import torchbcos as tb
from torchbcos import train
from torchbcos.evidence import command, commit, device_name
from torchbcos.processes import make_fabric
from torchbcos.recipe import read_recipe
from torchbcos.watch import TrainError

ROOT = Path(__file__).resolve().parent.parent
EVERY = 40


def first_steps(config: train.TrainConfig, steps: int) -> dict[str, Any]:
    fabric = make_fabric(config.precision)
    fabric.launch()
    with tempfile.TemporaryDirectory() as out:
        run = train._Run(config, Path(out), fabric, Console(quiet=True), 0)
        run.begin()
        batches = run.batches.following(0)
        losses = []
        try:
            while run.state.step < steps:
                run.advance(*next(batches))
                if run.state.step % EVERY == 0:
                    losses.append(float(f"{run.state.loss.item() / EVERY:.4g}"))
                    run.state.loss.zero_()
        except TrainError as error:
            return {"images": len(run.data.train), "losses": losses, "ended": str(error)}
    accuracy = round(run.state.correct.item() / (steps * config.batch), 4)
    return {"images": len(run.data.train), "losses": losses, "train_accuracy": accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", required=True, help="class folders")
    parser.add_argument("--recipes", default="imagenette-resnet34,imagenette-resnet34-norm")
    parser.add_argument("--rms", default="0,0.03,0.3,1,3", help="values of weight_rms")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--change", nargs="*", default=["options.max_out=1"], help="settings")
    parser.add_argument("--out", type=Path, default=ROOT / "results/turning_cpu.json")
    arguments = parser.parse_args()

    made_by = {
        "command": command("python", "benchmarks/turning.py"),
        "commit": commit(),
        "device": device_name("cuda" if torch.cuda.is_available() else "cpu"),
        "torch": torch.__version__,
        "torchbcos": tb.__version__,
        "size": arguments.size,
        "batch": arguments.batch,
        "change": arguments.change,
        "steps_per_loss": EVERY,
    }
    runs: list[dict[str, Any]] = []
    if arguments.out.exists():  # results are added to it
        runs = json.loads(arguments.out.read_text())["runs"]
    for recipe in arguments.recipes.split(","):
        for rms in map(float, arguments.rms.split(",")):
            config = replace(
                read_recipe(recipe, arguments.data, arguments.change),
                size=arguments.size, train_sizes=(), batch=arguments.batch, warmup=1,
                weight_rms=rms, precision="bf16-mixed" if torch.cuda.is_available() else "32-true",
            )  # fmt: skip
            found = first_steps(config, arguments.steps)
            kept = {"recipe": recipe, "weight_rms": rms, "lr": config.lr, **found}
            print(json.dumps(kept), flush=True)
            runs.append({**kept, "evidence": made_by})
            arguments.out.write_text(json.dumps({"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
