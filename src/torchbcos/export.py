"""A model as an ONNX file that gives logits, explanations and pictures without torch."""

from __future__ import annotations

import copy
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchbcos._arguments import missing_package, naming_size
from torchbcos._version import __version__
from torchbcos.checkpoint import write_atomically
from torchbcos.encoding import decode
from torchbcos.explain import explain, logits_of, network_input
from torchbcos.explanation import Explanation
from torchbcos.functional import collect_offsets
from torchbcos.models import BcosModel, refuse_conventional
from torchbcos.render import PERCENTILE, colour
from torchbcos.rows import rows_and_bias
from torchbcos.tracing import trace
from torchbcos.wrappers import bcos_within

__all__ = ["ExportError", "Exported", "export"]

# How far results may be from those in float64: so far, or so many times what float32 alone makes of
# them. Units of MaxOut that nearly tie win by rounding, and with them rows of W(x) change a little.
TOLERANCE, TIMES = 1e-4, 10
STRAY = 1e-3  # of a picture's bytes may be off by more than 1: at contributions that are nearly 0
LIMIT = 2**31 - 1  # bytes of an ONNX file
PACKAGES = ("onnx", "onnxscript", "onnxruntime")

Shape = tuple[str | int, ...]


class ExportError(RuntimeError):
    """The file would compute something else than the model."""


@dataclass(frozen=True)
class Exported:
    """What was written, and how far onnxruntime's results are from torch's in float64."""

    path: Path
    bytes: int
    opset: int
    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]
    difference: float  # of any output, as a share: of its largest value, of W(x) of its length

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "path": str(self.path)}


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    size: int | None = None,
    explanation: bool = True,
) -> Exported:
    """Write `model` to an ONNX file; onnxruntime must compute from it what torch computes.

    The file takes `images` [batch, C, H, W] in 0..1, and `targets` [batch], the class to explain
    for each, -1 for the predicted one. It gives `logits` [batch, K]; `explained` [batch], the
    classes; `weights` [batch, 2C, H, W], their rows of W(x); `contributions` [batch, H, W]; `bias`
    [batch]; and, for grey and colour images, `picture`, uint8 RGBA [batch, H, W, 4]. Without
    `explanation` it takes images and gives logits alone. A batch may have any length; images are of
    the model's own size, or of `size` pixels. The names of the classes are in the file's metadata.
    """
    for package in PACKAGES:
        if find_spec(package) is None:
            raise ValueError(missing_package("exporting", package, "export"))
    model, path = bcos_within(model), Path(path)
    if explanation:
        refuse_conventional(
            model,
            "W(x) of it does not sum up to its output",
            "export its logits alone, with explanation=False or --no-explanation",
        )
    if path.suffix != ".onnx":
        raise ValueError(f"`path` (={str(path)!r}) must end in .onnx.")
    if not path.parent.is_dir():
        raise ValueError(f"`path` (={str(path)!r}) must be in a folder that exists.")
    model = copy.deepcopy(model).cpu().float().eval()
    shape = (model.in_channels, *(model.input_size if size is None else (size, size)))
    images = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0))
    own = _computed(model, images)
    wide = _computed(copy.deepcopy(model).double(), images.double(), own[1].targets)
    outputs = _Outputs(model, explanation)
    proto = _translate(outputs, shape)
    if proto.ByteSize() > LIMIT:
        raise ValueError(
            f"`model` would take {proto.ByteSize() / 2**30:.1f} GiB, and an ONNX file holds 2."
        )
    written = proto.SerializeToString()
    found = _run(written, outputs.names, images, own[1])
    difference = _difference(found, *wide) if _is_drawn(found, own[1]) else math.inf
    by_rounding = _difference(_as_arrays(*own), *wide)
    if not difference <= max(TOLERANCE, TIMES * by_rounding):
        raise ExportError(
            f"onnxruntime's results are off by {difference:.1e}, so nothing was written: please "
            "report the network and the versions of torch, onnxscript and onnxruntime."
        )
    write_atomically(path, written)
    return Exported(
        path,
        len(written),
        next(o.version for o in proto.opset_import if not o.domain),
        _shapes(proto.graph.input),
        _shapes(proto.graph.output),
        difference,
    )


class _Outputs:
    """What the file computes, as a function of tensors."""

    def __init__(self, model: BcosModel, explanation: bool) -> None:
        self.model, self.explanation = model, explanation
        self.inputs: list[str] = ["images"]
        self.names: list[str] = ["logits"]
        if explanation:
            self.inputs += ["targets"]
            self.names += ["explained", "weights", "contributions", "bias"]
            self.names += ["picture"] if model.in_channels in (1, 3) else []

    def __call__(self, images: Tensor, *targets: Tensor) -> tuple[Tensor, ...]:
        x = network_input(self.model, images).detach()
        if not self.explanation:
            with torch.no_grad():
                return (logits_of(self.model, x),)
        with torch.enable_grad(), collect_offsets() as offsets:
            x.requires_grad_()
            logits = logits_of(self.model, x)
            explained = torch.where(targets[0] < 0, logits.detach().argmax(1), targets[0])
            rows, bias = rows_and_bias(logits.gather(1, explained[:, None]), x, offsets)
        weights = rows[:, 0]
        contributions = (weights * x.detach()).sum(1)
        found = [logits.detach(), explained, weights, contributions, bias[:, 0]]
        return (*found, *([_picture(weights, contributions)] if "picture" in self.names else []))


def _picture(weights: Tensor, contributions: Tensor) -> Tensor:
    """As `render.colour` draws it, [N, H, W, 4]."""
    length = weights.square().sum(1).sqrt()
    pixels = length.flatten(1)
    place = (pixels.shape[1] - 1) * PERCENTILE / 100  # of the percentile, among sorted pixels
    below = math.floor(place)
    largest = pixels.topk(pixels.shape[1] - below).values
    level = torch.lerp(largest[:, -1], largest[:, -min(2, largest.shape[1])], place - below)
    level = torch.where(level > 0, level, largest[:, 0])
    alpha = (length / torch.where(level > 0, level, 1.0)[:, None, None]).clamp(0, 1)
    alpha = torch.where(contributions > 0, alpha, 0.0)
    rgba = torch.cat([decode(weights).expand(-1, 3, -1, -1), alpha[:, None]], 1)
    return (rgba * 255).round().to(torch.uint8).permute(0, 2, 3, 1)


def _translate(outputs: _Outputs, shape: tuple[int, ...]) -> Any:
    """The ONNX file's content."""
    example = (torch.rand(2, *shape), torch.zeros(2, dtype=torch.long))[: len(outputs.inputs)]
    batch = torch.export.Dim("batch", min=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about parts of the exporter's own
        program = torch.export.export(
            trace(outputs, example), example, dynamic_shapes=({0: batch},) * len(example)
        )
        try:
            found: Any = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                input_names=outputs.inputs,
                output_names=outputs.names,
            )
        except torch.onnx.OnnxExporterError as error:
            raise ValueError(f"this network cannot be written as ONNX: {_why(error)}") from error
    found.model.metadata_props.update(_about(outputs.model))
    proto = found.model_proto
    batch_there = proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*proto.graph.input, *proto.graph.output, *proto.graph.value_info):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param:  # the batch, or a multiple of it
                dimension.dim_param = dimension.dim_param.replace(batch_there, "batch")
    return proto


def _why(error: BaseException) -> str:
    """The first sentence of what caused it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).split(". ")[0].splitlines()[0].removesuffix(".") + "."


def _about(model: BcosModel) -> dict[str, str]:
    about = {"torchbcos": __version__, "architecture": model.architecture.name or ""}
    if model.classes is not None:
        about["classes"] = json.dumps(model.classes, ensure_ascii=False)
    return about


def _shapes(values: Sequence[Any]) -> dict[str, Shape]:
    return {
        v.name: tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim)
        for v in values
    }


# The check.


def _computed(
    model: BcosModel, images: Tensor, targets: Tensor | None = None
) -> tuple[Tensor, Explanation]:
    with naming_size(f"`size` (={images.shape[-1]})", model), warnings.catch_warnings():
        with torch.no_grad():
            logits = logits_of(model, network_input(model, images))
        # Of a conventional network the logits are all that counts.
        warnings.filterwarnings("ignore", "`model` is conventional")
        return logits, explain(model, images, targets)


def _run(
    written: bytes, names: Sequence[str], images: Tensor, e: Explanation
) -> dict[str, np.ndarray]:
    """What onnxruntime computes for the targets of `e`."""
    import onnxruntime

    session = onnxruntime.InferenceSession(written, providers=["CPUExecutionProvider"])
    given = {"images": images.numpy(), "targets": e.targets[:, 0].numpy()}
    values = session.run(list(names), {i.name: given[i.name] for i in session.get_inputs()})
    return dict(zip(names, values, strict=True))


def _as_arrays(logits: Tensor, e: Explanation) -> dict[str, np.ndarray]:
    rows = {name: getattr(e, name)[:, 0] for name in ("weights", "contributions", "bias")}
    return {name: value.numpy() for name, value in {"logits": logits, **rows}.items()}


def _difference(found: Mapping[str, np.ndarray], logits: Tensor, e: Explanation) -> float:
    """The largest of an output: by its largest entry or, of W(x) and W(x)·x, by its length."""

    def share(name: str, right: np.ndarray) -> float:
        order = None if name in ("weights", "contributions") else np.inf
        off, whole = (
            float(np.linalg.norm(v.ravel().astype(float), order))
            for v in (found[name] - right, right)
        )
        return off / max(whole, 1e-30)

    return max(share(n, right) for n, right in _as_arrays(logits, e).items() if n in found)


def _is_drawn(found: Mapping[str, np.ndarray], e: Explanation) -> bool:
    """Whether the picture, if there is one, is that of `e`."""
    if "picture" not in found:
        return True
    off = np.abs(found["picture"].astype(int) - colour(e)[:, 0])
    return bool(np.mean(off > 1) <= STRAY)
