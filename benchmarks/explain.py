"""The time of explanations, side by side with the peer (`bcos` 0.1.3) on one and the same network.

    python benchmarks/explain.py                           # about five minutes on two cores

A ResNet-34 is built in both libraries with the same weights, so that both compute one function.
First their logits and explanations are compared; then 16 images × 5 classes are explained: here in
one call of `torchbcos.explain`, there with `model.explain(image, class)`, which takes one image
and one class. The peer's call also draws its picture, so ours is timed with and without
`render.colour`; and both also with their weights in channels last. All take turns, and the medians
are compared.
"""
# ruff: noqa: T201

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from bcos.models.resnet import resnet34
from bcos.modules import norms as peer_norms
from torch import Tensor, nn

import torchbcos as tb
from torchbcos.data import shapes
from torchbcos.encoding import encode
from torchbcos.evidence import command, commit, device_name

ROOT = Path(__file__).resolve().parent.parent
SEED = 0
IMAGES, CLASSES, SIZE = 16, 5, 224
TOLERANCE = 1e-4  # of the largest entry
GOAL = 1 / 3


def same_network_twice(images: Tensor) -> tuple[tb.BcosModel, nn.Module]:
    """Ours and the peer's ResNet-34 with the same weights and the statistics of `images`."""
    torch.manual_seed(SEED)
    norm_layer = peer_norms.NoBias(peer_norms.BatchNormUncentered2d)
    peer = resnet34(num_classes=1000, norm_layer=norm_layer).train()
    batch_norms = [m for m in peer.modules() if isinstance(m, nn.BatchNorm2d)]
    for module in batch_norms:
        module.momentum = 1.0
    with torch.no_grad():
        peer(encode(images))
    ours = tb.create_model("resnet34", num_classes=1000, max_out=1, norm="uncentred", head="conv")
    state = peer.state_dict()
    ours.load_state_dict(
        {f"network.{name.replace('.linear.', '.')}": v for name, v in state.items()}
    )
    ours.temperature, ours.logit_bias = 1.0, peer.logit_layer.logit_bias
    ours.scaling = "custom"
    return ours.eval(), peer.eval()


def by_the_peer(peer: nn.Module, images: Tensor, targets: Tensor) -> list[list[dict[str, Any]]]:
    """Its own way: one image, one class at a time."""
    return [
        [peer.explain(encode(image[None]).requires_grad_(), int(target)) for target in row]
        for image, row in zip(images, targets, strict=True)
    ]


def difference(actual: Tensor, expected: Tensor) -> float:
    off = (actual - expected).abs().amax() / expected.abs().amax()
    return float(off.detach())


def agreement(ours: tb.BcosModel, peer: nn.Module, images: Tensor, targets: Tensor) -> dict:
    """The largest differences, each as a part of the largest entry."""
    e = tb.explain(ours, images, targets)
    with torch.no_grad():
        logits = peer(encode(images)).gather(1, targets) - peer.logit_layer.logit_bias
    found = by_the_peer(peer, images, targets)
    weights = torch.stack([torch.cat([f["dynamic_linear_weights"] for f in row]) for row in found])
    maps = torch.stack([torch.cat([f["contribution_map"] for f in row]) for row in found])
    return {
        "logits": difference(e.outputs - ours.logit_bias, logits),
        "weights": difference(e.weights, weights),
        "contributions": difference(e.contributions, maps),
    }


def seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def evidence(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "command": command("python", "benchmarks/explain.py"),
        "commit": commit(),
        "seed": SEED,
        "threads": torch.get_num_threads(),
        "cpu": device_name("cpu"),
        "torch": torch.__version__,
        "torchbcos": tb.__version__,
        "bcos": metadata.version("bcos"),
        "repeats": arguments.repeats,
        "images": IMAGES,
        "classes_each": CLASSES,
        "pixels": SIZE,
        "network": "ResNet-34, 1 unit, uncentred batch norm without bias, 1000 classes, float32",
        "peer_images_timed": arguments.peer_images,
        "peer_time_scaled_by": IMAGES / arguments.peer_images,
    }


def profile(ours: tb.BcosModel, images: Tensor, targets: Tensor) -> None:
    with torch.profiler.profile() as recorded:
        tb.explain(ours, images, targets)
    table = recorded.key_averages().table(sort_by="self_cpu_time_total", row_limit=20)
    print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--peer-images", type=int, default=IMAGES, help="time the peer on fewer and scale"
    )
    parser.add_argument("--profile", action="store_true", help="also print where our time goes")
    parser.add_argument("--out", type=Path, default=ROOT / "results/explain_cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    images = shapes(IMAGES, size=SIZE, seed=SEED).images
    ours, peer = same_network_twice(images)
    with torch.no_grad():
        targets = ours(images).topk(CLASSES).indices

    differences = agreement(ours, peer, images[:2], targets[:2])
    print("agreement:", ", ".join(f"{k} {v:.1e}" for k, v in differences.items()))
    wrong = {k: v for k, v in differences.items() if not v <= TOLERANCE}
    if wrong:
        sys.exit(f"not the same function, so times would say nothing: {wrong}")
    if arguments.profile:
        profile(ours, images, targets)

    few = slice(arguments.peer_images)
    ours_last, peer_last = (
        copy.deepcopy(m).to(memory_format=torch.channels_last) for m in (ours, peer)
    )
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: tb.explain(ours, images, targets),
        "ours_with_pictures": lambda: tb.render.colour(
            tb.explain(ours, images, targets), style="released"
        ),
        "peer": lambda: by_the_peer(peer, images[few], targets[few]),
        "ours_channels_last": lambda: tb.explain(ours_last, images, targets),
        "peer_channels_last": lambda: by_the_peer(peer_last, images[few], targets[few]),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    tb.explain(ours, images[:1])  # both have run once by now
    for turn in range(arguments.repeats):
        for name, way in ways.items():
            scale = IMAGES / arguments.peer_images if name.startswith("peer") else 1
            times[name].append(seconds(way) * scale)
        print(f"turn {turn + 1}:", ", ".join(f"{n} {t[-1]:.1f} s" for n, t in times.items()))

    medians = {name: statistics.median(values) for name, values in times.items()}
    ratio = medians["ours"] / medians["peer"]
    result = {
        "evidence": evidence(arguments),
        "differences": differences,
        "seconds": {name: [round(t, 3) for t in values] for name, values in times.items()},
        "median_seconds": {name: round(value, 3) for name, value in medians.items()},
        "ratio": round(ratio, 4),
        "ratio_with_pictures": round(medians["ours_with_pictures"] / medians["peer"], 4),
        "ratio_channels_last": round(
            medians["ours_channels_last"] / medians["peer_channels_last"], 4
        ),
        "goal": round(GOAL, 4),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(
        f"ours takes {ratio:.3f} of the peer's time ({result['ratio_with_pictures']:.3f} with "
        f"pictures, {result['ratio_channels_last']:.3f} with both in channels last); the goal is "
        f"at most {GOAL:.3f}"
    )


if __name__ == "__main__":
    main()
