"""How exactly networks of `bcos` 0.1.3 give the same logits and rows of W(x) when read by us.

    python benchmarks/released.py                # all B-cos networks it has released weights for

Each is made with random weights, scales and statistics, stored as that program stores them, read
with torchbcos.load, and compared on one random image, in float32 and float64: the largest
difference as a part of the largest value. Its released weights themselves are not needed.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import torchbcos as tb
from torchbcos.encoding import encode
from torchbcos.evidence import command, commit, device_name

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from v2_peer import lively, made  # noqa: E402

SIZE = 224
TARGET = 7


def names() -> list[str]:
    from bcos.models import pretrained

    return [n for n in pretrained.list_available() if not n.startswith("standard_")]


def measure(name: str) -> dict[str, Any]:
    network = lively(made(name), SIZE)
    with tempfile.NamedTemporaryFile(suffix=".pth") as file:
        torch.save(network.state_dict(), file.name)
        model = tb.load(file.name)
    model.logit_bias = 0.0
    row: dict[str, Any] = {
        "name": name,
        "ours": model.architecture.name,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    for dtype in (torch.float32, torch.float64):
        image = torch.rand(1, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
        x = encode(image).requires_grad_()
        with network.to(dtype).explanation_mode():
            logits = network(x)
            (rows,) = torch.autograd.grad(logits[0, TARGET], x)
        e = tb.explain(model.to(dtype), image, targets=[TARGET])
        with torch.no_grad():
            found = model(image)
        row[str(dtype).removeprefix("torch.")] = {
            "logits": _off(found, logits),
            "weights": _off(e.weights[:, 0], rows),
        }
    return row


def _off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(f"{((found - expected).abs().max() / expected.abs().max()).item():.1e}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare networks of `bcos` with ours.")
    parser.add_argument("--only", nargs="+", default=names(), help="names as `bcos` has them")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "released.json")
    arguments = parser.parse_args()
    evidence = {
        "command": command("python", "benchmarks/released.py"),
        "commit": commit(),
        "hardware": device_name("cpu"),
        "torch": torch.__version__,
        "seed": 0,
        "size": SIZE,
    }
    rows = []
    for name in arguments.only:
        rows.append(measure(name))
        print(json.dumps(rows[-1]), flush=True)
    arguments.out.write_text(json.dumps({"networks": rows, "evidence": evidence}, indent=1) + "\n")


if __name__ == "__main__":
    main()
