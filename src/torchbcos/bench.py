"""Time and memory of B-cos networks beside the networks they replace, measured in one run.

Four ways to build one architecture are compared:

- `conventional`: torchvision's network, with its norms and activations;
- `floor`: our network with plain convolutions for B-cos ones and torch's own pools and sums, so
  without norms and activations (two units: doubled channels and a plain maximum);
- `peer`: our network with the layers of the package `bcos`, if it is installed;
- `ours`.
"""

from __future__ import annotations

import copy
import operator
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

from torchbcos import functional
from torchbcos._arguments import check_device
from torchbcos._version import __version__
from torchbcos.evidence import commit, device_name
from torchbcos.explain import explain
from torchbcos.layers import AvgPool2d, BcosConv2d, BcosLinear
from torchbcos.models import BcosModel, create_model

__all__ = ["BenchError", "Case", "Measurement", "bench", "check_kernels", "evidence", "suite"]

CLASSES = 10  # of every network: the classifier's size is not what is measured


@dataclass(frozen=True)
class Case:
    """What is measured."""

    way: str  # conventional, floor, peer or ours
    task: str  # training, inference or explanation
    arch: str = "resnet34"
    units: int = 1
    b: float = 2.0
    batch: int = 128
    size: int = 224
    targets: int = 1  # of an explanation
    compiled: bool = False


@dataclass(frozen=True)
class Measurement:
    case: Case
    milliseconds: float  # median over groups of steps
    spread: float  # (largest - smallest) / median
    busy_milliseconds: (
        float | None
    )  # the sum of the device's kernels; the rest is waiting for the host
    peak_mib: float | None

    def words(self) -> str:
        c = self.case
        what = (
            f"{c.arch} {c.way:12} {c.task:11} {c.units} unit{'s' if c.units > 1 else ' '} B={c.b:g}"
        )
        setting = f"batch {c.batch:3} {c.size} px" + (
            f" {c.targets} targets" if c.targets > 1 else ""
        )
        memory = "" if self.peak_mib is None else f"  {self.peak_mib:8.0f} MiB"
        busy = "" if self.busy_milliseconds is None else f" (device {self.busy_milliseconds:.2f})"
        compiled = " compiled" if c.compiled else ""
        return f"{what} {setting}{compiled}: {self.milliseconds:9.2f} ms{busy}{memory}"

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self.case), **{k: v for k, v in asdict(self).items() if k != "case"}}


def suite(device: str, compiled: bool = True) -> list[Case]:
    """What is compared, the most telling first; on a CPU only what takes minutes there."""
    ways = [("conventional", 1), ("floor", 1), ("peer", 1), ("ours", 1)]
    two = [("floor", 2), ("peer", 2), ("ours", 2)]
    if device == "cpu":
        return [
            Case(w, task, units=u, batch=8) for task in ("inference", "training") for w, u in ways
        ]
    cases = [Case(w, t, units=u) for t in ("training", "inference") for w, u in ways + two]
    cases += [Case("ours", t, b=b) for t in ("training", "inference") for b in (1, 1.5, 2.5)]
    cases += [Case("ours", "inference", batch=256), Case("ours", "explanation", batch=256)]
    cases += [Case("peer", "explanation", batch=1), Case("ours", "explanation", batch=1)]
    for arch, batch, size in (("densenet121", 64, 224), ("vgg11", 64, 224), ("cifar9", 64, 32)):
        cases += [
            Case(w, t, arch, u, batch=batch, size=size)
            for t in ("training", "inference")
            for w, u in (*ways[:2], ways[3], two[2])
        ]
    cases += [Case("ours", "training", batch=n) for n in (16, 32, 64, 256)]
    cases += [Case("ours", "training", batch=64, size=size) for size in (96, 160, 320)]
    cases += [Case("ours", "explanation", batch=64, targets=k) for k in (1, 2, 5, 10)]
    if compiled:
        cases += [Case(w, "training", units=u, compiled=True) for w, u in reversed(ways)]
        cases += [Case("ours", "inference", compiled=True)]
    return cases


class BenchError(RuntimeError):
    """The kernels are wrong here, so their speed says nothing."""


def bench(
    cases: list[Case], device: torch.device | str, dtype: torch.dtype, seconds: float = 0.5
) -> Iterator[Measurement]:
    """Measure one case after the other; the kernels are checked before the first."""
    device = torch.device(device)
    check_kernels(device)
    torch.backends.cudnn.benchmark = True
    for case in cases:
        try:
            step = _step(case, device, dtype)
        except ImportError:
            continue  # the peer is not installed
        yield _measure(case, step, device, seconds)
        del step
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def check_kernels(device: torch.device) -> None:
    """Layers here against the reference in float64, in both passes; raises where they differ."""
    for b, units in ((1.5, 2), (2.0, 1), (2.0, 2), (2.5, 1)):
        torch.manual_seed(0)
        x, w = torch.randn(4, 16, 17, 15), torch.randn(24 * units, 16, 3, 3)
        grad = torch.randn(4, 24, 9, 8)
        found = []
        for place, kind in ((device, torch.float32), (torch.device("cpu"), torch.float64)):
            images, weight = (t.to(place, kind).requires_grad_() for t in (x, w))
            with torch.backends.cudnn.flags(allow_tf32=False):
                out = functional.bcos_conv2d(images, weight, 2, 1, b=b, max_out=units)
                grads = torch.autograd.grad(out, (images, weight), grad.to(place, kind))
            found.append([t.detach().cpu().double() for t in (out, *grads)])
        for here, right in zip(*found, strict=True):
            off = float((here - right).abs().max() / right.abs().max())
            if not off < 1e-5:
                raise BenchError(
                    f"with b = {b} and {units} units the layer on {device} is off by {off:.1e}, "
                    "so its speed is not measured: run the tests of the kernels there."
                )


def evidence(device: torch.device | str, dtype: torch.dtype) -> dict[str, Any]:
    device = check_device(device)
    found = {
        "commit": commit(),
        "seed": 0,
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "memory_format": "channels_last",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "torchbcos": __version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        import triton

        found |= {"triton": triton.__version__, "cudnn": torch.backends.cudnn.version()}
    return found


# One step of each task.


def _step(case: Case, device: torch.device, dtype: torch.dtype) -> Callable[[], Any]:
    torch.manual_seed(0)
    model = build(case).to(device, dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.train(case.task == "training")
    images = torch.rand(case.batch, 3, case.size, case.size, device=device, dtype=dtype)
    images = images.contiguous(memory_format=torch.channels_last)
    forward = torch.compile(model) if case.compiled else model
    if case.task == "inference":

        def infer() -> None:
            with torch.no_grad():
                forward(images)

        return infer
    if case.task == "explanation":
        if case.way == "peer":
            return _peer_explanation(model, images)
        targets = list(range(case.targets)) if case.targets > 1 else None
        return lambda: explain(model, images, targets)
    labels = F.one_hot(torch.zeros(case.batch, dtype=torch.long, device=device), CLASSES)

    def train() -> None:
        loss = F.binary_cross_entropy_with_logits(forward(images).float(), labels.float())
        loss.backward()
        for p in model.parameters():
            p.grad = None

    return train


def _peer_explanation(model: nn.Module, images: Tensor) -> Callable[[], Any]:
    """Its own way: one image at a time, the top class, in its explanation mode."""
    from bcos.modules.common import DetachableModule

    for module in model.modules():
        if isinstance(module, DetachableModule):
            module.set_explanation_mode(True)
    x = images[:1].detach().requires_grad_()

    def step() -> None:
        logits = model(x)
        torch.autograd.grad(logits.amax(1).sum(), x)

    return step


# The four ways.


def build(case: Case) -> nn.Module:
    if case.way == "conventional":
        return _conventional(case.arch)
    options: dict[str, Any] = {"num_classes": CLASSES, "b": case.b, "max_out": case.units}
    if case.arch == "cifar9":
        options["preset"] = "paper" if case.b in (1, 1.25, 1.5, 1.75, 2, 2.25, 2.5) else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = create_model(case.arch, **options)
    model._values_checked = True  # nothing is asked about the images
    model.scaling = "custom"
    if case.way == "ours":
        return model
    return _with_layers(model, _plain if case.way == "floor" else _peer, case.way == "floor")


def _conventional(arch: str) -> nn.Module:
    if arch != "cifar9":
        network: nn.Module = getattr(torchvision.models, arch)(num_classes=CLASSES)
        return network
    widths, strides = (64, 64, 128, 128, 128, 256, 256, 256), (1, 1, 2, 1, 1, 2, 1, 1)
    layers: list[nn.Module] = []
    for i, (width, stride) in enumerate(zip(widths, strides, strict=True)):
        before = widths[i - 1] if i else 3
        layers += [nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)]
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers, nn.Conv2d(256, 10, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _with_layers(
    model: BcosModel, layer: Callable[[BcosConv2d], nn.Module], plain: bool
) -> BcosModel:
    """A copy of the model with other layers and, if `plain`, with torch's own pools and sums."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, BcosConv2d):
                setattr(parent, name, layer(child))
            elif isinstance(child, BcosLinear):
                raise ValueError(f"{name} is linear, and only convolutions are exchanged here.")
            elif plain and isinstance(child, AvgPool2d):
                pool = (child.kernel_size, child.stride, child.padding, child.ceil_mode)
                setattr(parent, name, nn.AvgPool2d(*pool, child.count_include_pad))
    graph = getattr(model.network, "graph", None)
    if plain and graph is not None:
        for node in graph.nodes:
            if node.target is functional.add:
                node.target = operator.add
        model.network.recompile()  # type: ignore[operator]
    return model


class _PlainMaximum(nn.Module):
    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.conv(x).chunk(2, 1)
        return torch.maximum(first, second)


def _plain(layer: BcosConv2d) -> nn.Module:
    conv = nn.Conv2d(
        layer.in_channels,
        layer.out_channels * layer.max_out,
        layer.kernel_size,  # type: ignore[arg-type]
        layer.stride,  # type: ignore[arg-type]
        layer.padding,  # type: ignore[arg-type]
        layer.dilation,  # type: ignore[arg-type]
        layer.groups,
        bias=False,
    )
    return conv if layer.max_out == 1 else _PlainMaximum(conv)


def _peer(layer: BcosConv2d) -> nn.Module:
    from bcos.modules import BcosConv2d as Peer

    made: nn.Module = Peer(
        layer.in_channels,
        layer.out_channels,
        layer.kernel_size,
        layer.stride,
        layer.padding,
        b=layer.b,
        max_out=layer.max_out,
    )
    return made


# The clock.


def _measure(
    case: Case, step: Callable[[], Any], device: torch.device, seconds: float
) -> Measurement:
    cuda = device.type == "cuda"

    def timed(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            step()
        if cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / count * 1000

    for _ in range(3):
        step()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    groups = 5
    count = max(1, round(seconds * 1000 / groups / max(timed(2), 1e-3)))
    times = [timed(count) for _ in range(groups)]
    median = statistics.median(times)
    return Measurement(
        case,
        round(median, 3),
        round((max(times) - min(times)) / median, 3),
        round(_busy(step), 3) if cuda else None,
        round(torch.cuda.max_memory_allocated() / 2**20, 1) if cuda else None,
    )


def _busy(step: Callable[[], Any], count: int = 3) -> float:
    """Milliseconds of kernels in one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    events = [e for e in recorded.events() if e.device_type.name == "CUDA"]
    return float(sum(e.device_time for e in events)) / count / 1000
