"""Weights that the authors of B-cos networks released, as models of ours.

Their first program (v1, the paper's) and their second (v2) store the tensors of a network alone.
Which network it is, its MaxOut units, norms and classes are seen from names and shapes; γ, T and b
are the program's own. Both add 1e-6 to the squared norm of a patch; the layers' `eps` does so here.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchbcos.data import CIFAR10_CLASSES, imagenet_classes
from torchbcos.layers import BcosConv2d
from torchbcos.models import BcosModel, apply_preset, create_model, default_logit_bias
from torchbcos.v2_networks import CONVNEXTS, SIMPLE_VITS

__all__ = ["is_released", "load_released"]

EPS = 1e-6  # of both programs' convolutions
Tensors = Mapping[str, Tensor]


def is_released(path: str | os.PathLike[str]) -> bool:
    """Whether a file was written by torch.save, as both programs do."""
    with Path(path).open("rb") as file:
        start = file.read(2)
    return start in (b"PK", b"\x80\x02")


def load_released(path: str | os.PathLike[str], *, b: float | None = None) -> BcosModel:
    """The model whose weights v1 or v2 wrote to `path`, in evaluation mode.

    `b` is the exponent, which no file tells; all released networks have 2 but v1's for CIFAR-10,
    of which there is one for each B. Nothing in the file is executed.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"`path` (={str(path)!r}) is no file.")
    tensors, is_v1 = _read(path)
    found = _recognise(tensors)
    if b is None and found.name == "cifar9":
        raise ValueError(
            "it holds v1's network for CIFAR-10, and does not tell its B: read it with "
            "torchbcos.released.load_released(path, b=2)."
        )
    b = 2.0 if b is None else b
    units = len(tensors[found.first]) // found.width
    outputs = len(tensors[found.last])
    model = create_model(
        found.name,
        num_classes=outputs // units,
        b=b,
        max_out=units,
        classes=_class_names(found.name, outputs // units),
        **found.options,
    )
    _fill(model, tensors, found.is_numbered)
    if is_v1:
        apply_preset(model, "paper")
    else:
        model.logit_bias = default_logit_bias(model.num_classes)
    for _, layer in model.bcos_layers():
        if isinstance(layer, BcosConv2d):
            layer.eps = EPS
    model.scaling = "released"
    model.provenance = {"weights": f"B-cos v{1 if is_v1 else 2}", "file": path.name}
    if found.name != "cifar9":  # both programs test the middle of images of a larger size
        part = 299 / 320 if found.name == "inception_v3" else 224 / 256
        model.provenance["config"] = {"test_part": part}
    return model.eval()


def _read(path: Path) -> tuple[dict[str, Tensor], bool]:
    """The tensors by the names we give them, and whether v1 wrote them."""
    try:
        with path.open("rb") as file:  # by its name torch might take it for another kind
            content = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, OSError, EOFError, KeyError, ValueError) as error:
        raise ValueError(
            "it holds more than tensors, or is cut short or damaged: store the network's "
            "state_dict() alone with torch.save, or download it again."
        ) from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not (
        isinstance(content, dict)
        and content
        and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items())
    ):
        raise ValueError("it holds no tensors by names: store a network's state_dict().")
    tensors: dict[str, Tensor] = dict(content)
    for wrapper in ("module.", "model."):
        if all(name.startswith(wrapper) for name in tensors):
            tensors = {name.removeprefix(wrapper): value for name, value in tensors.items()}
    # A sequence of network, pool and logits: v1's all, of v2's the transformers.
    in_sequence = all(name.startswith("0.") for name in tensors)
    if in_sequence:
        tensors = {name.removeprefix("0."): value for name, value in tensors.items()}
    tensors = {re.sub(r"\.linear\.weight$", ".weight", n): v for n, v in tensors.items()}
    is_v1 = _CIFAR in tensors or (in_sequence and _TRANSFORMER not in tensors)
    return tensors, is_v1


# Which network it is.


@dataclass(frozen=True)
class _Found:
    name: str  # for create_model
    first: str  # a layer that has `width` outputs
    width: int
    last: str  # the layer that classifies
    options: dict[str, Any] = field(default_factory=dict)
    is_numbered: bool = False  # with numbers for names, which count other operations, too


_TRANSFORMER = "to_patch_embedding.linear.weight"
_CIFAR = "0.weight"


def _recognise(tensors: Tensors) -> _Found:
    if _is_conventional(tensors):
        raise ValueError(
            "it holds a conventional network's weights, no B-cos network's: give a file that "
            "torchbcos.save wrote, or the weights that v1 or v2 released; localise takes this one "
            "as --baseline torchvision/NAME=FILE."
        )
    for mark, family in _FAMILIES.items():
        if mark in tensors:
            try:
                found = family(tensors)
            except (KeyError, ZeroDivisionError):  # a part is missing, or narrower than any
                break
            if found is not None and _is_whole(found, tensors):
                return found
            break
    known = "ResNets, DenseNets, VGGs, Inception-v3, ConvNeXts, simple vision transformers"
    raise ValueError(
        f"its {len(tensors)} tensors ({next(iter(tensors))}, …) are of no network that v1 or v2 "
        f"released ({known} and the paper's for CIFAR-10): make the network with torchbcos.convert."
    )


def _is_conventional(t: Tensors) -> bool:
    """Whether the first convolution takes three colours; those of B-cos networks take six."""
    first = next((value for value in t.values() if value.dim() == 4), None)
    return first is not None and first.shape[1] == 3


def _is_whole(found: _Found, tensors: Tensors) -> bool:
    ends = {found.first, found.last} <= tensors.keys()
    return ends and not len(tensors[found.first]) % found.width


def _resnet(t: Tensors) -> _Found | None:
    is_deep = "layer1.0.conv3.weight" in t
    blocks = tuple(_length(t, f"layer{i}.{{}}.conv1.weight") for i in (1, 2, 3, 4))
    _, inner, *_ = t["layer1.0.conv2.weight"].shape
    units = len(t["conv1.weight"]) // 64
    width = len(t["layer1.0.conv2.weight"]) // units
    name = _RESNETS.get((blocks, is_deep, width, inner))
    return _Found(name, "conv1.weight", 64, "fc.weight", _norm(t, "bn1")) if name else None


#: By blocks of each stage, whether they are bottlenecks, the width of the first and its inputs.
_RESNETS: dict[tuple[tuple[int, ...], bool, int, int], str] = {
    ((2, 2, 2, 2), False, 64, 64): "resnet18",
    ((3, 4, 6, 3), False, 64, 64): "resnet34",
    ((3, 4, 6, 3), True, 64, 64): "resnet50",
    ((3, 4, 23, 3), True, 64, 64): "resnet101",
    ((3, 8, 36, 3), True, 64, 64): "resnet152",
    ((3, 4, 6, 3), True, 128, 4): "resnext50_32x4d",
    ((3, 4, 23, 3), True, 256, 8): "resnext101_32x8d",
    ((3, 4, 6, 3), True, 128, 128): "wide_resnet50_2",
    ((3, 4, 23, 3), True, 128, 128): "wide_resnet101_2",
}


def _densenet(t: Tensors) -> _Found | None:
    layer = "features.denseblock{}.denselayer{}.conv2.weight"
    blocks = tuple(_length(t, layer.format(i, "{}"), 1) for i in (1, 2, 3, 4))
    name, width, growth = _DENSENETS.get(blocks, ("", 1, 0))
    first = "features.conv0.weight"
    units = len(t[first]) // width
    options = _norm(t, "features.norm0")
    if len(t[layer.format(1, 1)]) != growth * units:
        options["growth_rate"] = len(t[layer.format(1, 1)]) // units
    return _Found(name, first, width, "classifier.weight", options) if name else None


#: By blocks: the name, the width of the first layer and the growth rate.
_DENSENETS: dict[tuple[int, ...], tuple[str, int, int]] = {
    (6, 12, 24, 16): ("densenet121", 64, 32),
    (6, 12, 36, 24): ("densenet161", 96, 48),
    (6, 12, 32, 32): ("densenet169", 64, 32),
    (6, 12, 48, 32): ("densenet201", 64, 32),
}


def _vgg(t: Tensors) -> _Found | None:
    layers = sum(value.dim() == 4 for value in t.values())
    options = _norm(t, "features.1")
    name = f"vgg{layers}" + ("_bn" if options else "")
    if layers not in (11, 13, 16, 19):
        return None
    return _Found(name, "features.0.weight", 64, "classifier.2.weight", options, is_numbered=True)


def _inception(t: Tensors) -> _Found:
    first = "Conv2d_1a_3x3.conv.weight"
    return _Found("inception_v3", first, 32, "fc.weight", _norm(t, "Conv2d_1a_3x3.bn"))


def _convnext(t: Tensors) -> _Found | None:
    depths = tuple(_length(t, f"features.{i}.{{}}.layer_scale") for i in (2, 4, 6, 8))
    width = len(t["features.2.0.layer_scale"])
    norm = "bnu" if "features.1.running_var" in t else "pn"
    for size, (widths, blocks) in CONVNEXTS.items():
        if (widths[0], blocks) == (width, depths):
            name = f"v2/convnext_{size}_{norm}"
            return _Found(name, "features.0.weight", width, "classifier.1.weight")
    return None


def _vit(t: Tensors) -> _Found | None:
    dim = len(t["linear_head.norm.weight"])
    depth = _length(t, "transformer.encoder_{}.attn.norm.weight")
    has_stem = "to_patch_embedding.conv_stem.0.weight" in t
    for name, shape in SIMPLE_VITS.items():
        if (shape.dim, shape.depth, bool(shape.stem)) == (dim, depth, has_stem):
            return _Found(f"v2/{name}", _TRANSFORMER, dim, "linear_head.linear.weight")
    return None


def _cifar9(t: Tensors) -> _Found | None:
    shapes = [tuple(value.shape[2:]) for value in t.values()]
    if shapes != [(3, 3)] * 8 + [(1, 1)]:
        return None
    return _Found("cifar9", _CIFAR, 64, "8.weight", is_numbered=True)


#: By a tensor that no other family has.
_FAMILIES: dict[str, Callable[[Tensors], _Found | None]] = {
    "layer1.0.conv1.weight": _resnet,
    "features.denseblock1.denselayer1.conv1.weight": _densenet,
    "Mixed_5b.branch1x1.conv.weight": _inception,
    _TRANSFORMER: _vit,
    "features.2.0.layer_scale": _convnext,
    "features.0.weight": _vgg,
    _CIFAR: _cifar9,
}


def _length(tensors: Tensors, name: str, start: int = 0) -> int:
    """How many tensors there are of a name that counts."""
    return sum(1 for _ in takewhile(lambda i: name.format(i) in tensors, count(start)))


def _norm(tensors: Tensors, first: str) -> dict[str, Any]:
    """The option that makes the norms, of which `first` is one."""
    if f"{first}.weight" not in tensors or tensors[f"{first}.weight"].dim() > 1:
        return {}
    if f"{first}.running_var" not in tensors:
        raise ValueError("its norms are no batch norms, and no released network has others there.")
    if f"{first}.bias" in tensors:
        raise ValueError("its norms have biases, and those of no released network have any.")
    return {"norm": "uncentred"}


def _class_names(name: str, classes: int) -> Sequence[str] | None:
    """Those of CIFAR-10, or of ImageNet, on which all networks of 1000 classes were trained."""
    if (name, classes) == ("cifar9", 10):
        return CIFAR10_CLASSES
    return imagenet_classes() if classes == 1000 else None


def _fill(model: BcosModel, tensors: Tensors, is_numbered: bool) -> None:
    own = model.network.state_dict()
    if is_numbered:
        if len(own) != len(tensors):
            raise ValueError(f"it has {len(tensors)} tensors, and the network {len(own)}.")
        tensors = dict(zip(own, tensors.values(), strict=True))
    wrong = sorted(own.keys() ^ tensors.keys())
    wrong += [n for n in own.keys() & tensors.keys() if own[n].numel() != tensors[n].numel()]
    if wrong:
        raise ValueError(
            f"{len(wrong)} of its tensors do not fit {model.architecture.name}, the first is "
            f"{wrong[0]}."
        )
    model.network.load_state_dict({n: tensors[n].reshape(own[n].shape) for n in own})
