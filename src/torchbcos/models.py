"""Whole models: the encoding, a B-cos network and the logit head; made by name or by conversion."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from torchbcos._arguments import is_int
from torchbcos.architectures import OURS, SIZES, builder, list_models
from torchbcos.convert import Conversion, Report, convert_lazily, convert_network
from torchbcos.convert.trace import as_pair
from torchbcos.encoding import check_images, check_values, encode
from torchbcos.layers import BcosLayer
from torchbcos.mode import add_offset
from torchbcos.presets import paper_preset
from torchbcos.v2_networks import v2_network

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's colours

__all__ = [
    "Architecture",
    "BcosModel",
    "ConventionalModel",
    "convert",
    "create_model",
    "in_mode",
    "list_models",
    "refuse_conventional",
]


@dataclass(frozen=True)
class Architecture:
    """What the network was made from: enough to make it again."""

    name: str | None  # for `create_model`; None for a module that was given to `convert`
    options: dict[str, Any]

    def __post_init__(self) -> None:
        """NumPy's numbers as Python's own, which a file can hold."""
        plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in self.options.items()}
        object.__setattr__(self, "options", plain)


class BcosModel(nn.Module):
    """Images in 0..1 to logits: `network(encode(images)) / temperature + logit_bias`.

    `scaling` says where the layers' γ and the temperature come from: "none" (all 1, which few
    networks can be trained with), "paper", "calibrated" or "custom".

    >>> import torchbcos as tb
    >>> model = tb.load("cifar10")
    >>> model(torch.rand(2, 3, 32, 32)).shape, model.input_size
    (torch.Size([2, 10]), (32, 32))
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        in_channels: int = 3,
        input_size: tuple[int, int] = (224, 224),
        num_classes: int | None = None,
        classes: Sequence[str] | None = None,
        report: Report | None = None,
        architecture: Architecture | None = None,
    ) -> None:
        super().__init__()
        self.network = network
        self.in_channels = in_channels
        self.input_size = input_size
        if isinstance(classes, str):
            raise TypeError(f"`classes` (={classes!r}) must be a list of names, not one name.")
        self.num_classes = num_classes if classes is None else len(classes)
        if num_classes is not None and num_classes != self.num_classes:
            raise ValueError(
                f"`classes` (={len(classes or ())} names) must name all {num_classes} outputs."
            )
        self.classes = tuple(map(str, classes)) if classes is not None else None
        self.report = report
        self.architecture = architecture or Architecture(None, {})
        self.provenance: dict[str, Any] = {}
        self.temperature = 1.0
        self.logit_bias = default_logit_bias(self.num_classes)
        self.scaling = "none"
        self._values_checked = self._has_warned = False

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        """[N, C, H, W] in 0..1 → [N, K]; in training a tuple with the auxiliary logits, if any."""
        check_images(images, self.in_channels)
        if not (self._values_checked or torch.compiler.is_compiling()):
            self._check_once(images)
        return self.from_encoded(self.encoded(images))

    def encoded(self, images: Tensor) -> Tensor:  # [N, 2C, H, W]
        """Images in 0..1 as the network takes them, in its type."""
        dtype = next((p.dtype for p in self.parameters()), images.dtype)
        return encode(images.to(dtype))

    def from_encoded(self, encoded: Tensor) -> Tensor | tuple[Tensor, ...]:
        """`forward` for images that went through `encoding.encode` already."""
        return self.from_outputs(self.network(encoded))

    def from_outputs(self, outputs: Any) -> Tensor | tuple[Tensor, ...]:
        """Logits from what `network` gave."""
        if isinstance(outputs, Tensor):
            return self._logits(outputs)
        logits = tuple(self._logits(o) for o in outputs if o is not None)
        return logits if self.training else logits[0]

    def _logits(self, outputs: Tensor) -> Tensor:
        return add_offset(outputs / self.temperature, self.logit_bias)

    def _check_once(self, images: Tensor) -> None:
        """Reading values stops a GPU, so only the first images of a model are looked at."""
        if not (images.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(images)):
            check_values(images)
            self._values_checked = True
            self.warn_of_scales()

    def warn_of_scales(self) -> None:
        """Once, of a model that was neither calibrated nor given a preset."""
        if self.scaling == "none" and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "this model's γ and temperature are all 1, with which signals fade from layer to "
                "layer: call torchbcos.calibrate(model, images), or create it with preset='paper'.",
                stacklevel=3,
            )

    def bcos_layers(self) -> Iterator[tuple[str, BcosLayer]]:
        """The B-cos layers of the network with their names, in the order they were defined."""
        for name, module in self.network.named_modules():
            if isinstance(module, BcosLayer):
                yield name, module

    def extra_repr(self) -> str:
        return (
            f"classes={self.num_classes}, input_size={self.input_size}, "
            f"temperature={self.temperature:.4g}, logit_bias={self.logit_bias:.4g}, "
            f"scaling={self.scaling!r}"
        )


class ConventionalModel(BcosModel):
    """A network as it was before any conversion, with the interface of a B-cos model.

    Colours are normalised as is usual for ImageNet. It is here to be compared with: W(x) of it
    does not sum up to its output.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, network: nn.Module, **arguments: Any) -> None:
        super().__init__(network, **arguments)
        self.scaling = "conventional"
        mean, deviation = torch.tensor([MEAN, DEVIATION])
        if self.in_channels != 3:
            mean, deviation = mean.mean()[None], deviation.mean()[None]
        self.register_buffer("mean", mean[:, None, None], persistent=False)
        self.register_buffer("deviation", deviation[:, None, None], persistent=False)

    def from_encoded(self, encoded: Tensor) -> Tensor | tuple[Tensor, ...]:
        colours = encoded.chunk(2, dim=1)[0]
        return self.from_outputs(self.network((colours - self.mean) / self.deviation))


def refuse_conventional(
    model: nn.Module, why: str, remedy: str = "use a B-cos model", called: str = "`model`"
) -> None:
    """An error for a network that is as it was before any conversion; `why` says what it lacks."""
    if isinstance(model, ConventionalModel):
        raise ValueError(f"{called} is conventional, and {why}: {remedy}.")


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """The model in training or in evaluation, and afterwards each of its modules as it was."""
    before = {module: module.training for module in model.modules()}
    try:
        model.train(training)
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


def default_logit_bias(num_classes: int | None) -> float:
    """The bias that gives each of K classes the probability 1/K when the network says nothing."""
    return -math.log(num_classes - 1) if num_classes and num_classes > 1 else 0.0


@torch.inference_mode(False)  # no derivative passes weights that are made in it
def convert(
    module: nn.Module,
    *,
    b: float = 2.0,
    max_out: int = 2,
    norm: str | None = None,
    head: str = "conv",
    input_size: int | Sequence[int] | None = None,
    classes: Sequence[str] | None = None,
    strict: bool = True,
) -> BcosModel:
    """A conventional network as a B-cos model with new weights; `module` is not touched.

    Convolutions and linear layers become B-cos layers, the first for the encoded image; activations
    and dropout go, norms too unless `norm="uncentred"`; max pools become average pools; with
    `head="conv"` the classifier moves before the global pool. `model.report` tells all. An
    operation that breaks W(x)·x + bias = output is an error unless `strict=False`.

    >>> model = convert(nn.Sequential(
    ...     nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)))
    >>> print(model.report)
    Sequential as a B-cos network
      operation          became                       times
      AdaptiveAvgPool2d  kept                             1
      Conv2d             BcosConv2d                       1
      Flatten            kept                             1
      Linear             BcosConv2d, before the pool      1
      ReLU               removed                          1
    Dynamic-linear: W(x)·x + bias is the output.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"`module` (={module!r}) must be an nn.Module; create_model takes names.")
    if isinstance(module, BcosModel):
        raise ValueError("`module` (a BcosModel) is converted already: give the network it is of.")
    options = {"b": b, "max_out": max_out, "norm": norm, "head": head, "strict": strict}
    conversion = convert_network(module, size=input_size, **options)  # type: ignore[arg-type]
    return _model(conversion, classes, Architecture(None, options))


@torch.inference_mode(False)  # no derivative passes weights that are made in it
def create_model(
    name: str,
    *,
    num_classes: int | None = None,
    b: float = 2.0,
    max_out: int = 2,
    norm: str | None = None,
    head: str = "conv",
    preset: str | None = None,
    input_size: int | Sequence[int] | None = None,
    classes: Sequence[str] | None = None,
    strict: bool = True,
    **options: Any,
) -> BcosModel:
    """A B-cos model by name: ours, any torchvision classifier, or `timm/NAME`.

    Ours are `cifar9`, the paper's for CIFAR-10, `cifar_resnet` and `mini`. `options` go to the
    architecture, as `growth_rate=22` to a DenseNet, or `in_channels=1` to any, for grey images.
    `preset="paper"` sets the paper's γ, T and bias of the logits; otherwise call `calibrate` before
    training. `conventional/NAME` is the network of that name as it was, to compare with; `v2/NAME`
    is a ConvNeXt or a vision transformer of the authors' own.

    >>> model = create_model("cifar9", b=2.0, max_out=2, preset="paper")
    >>> model(torch.rand(1, 3, 32, 32)).shape
    torch.Size([1, 10])
    """
    if "in_chans" in options:  # timm's name for it
        raise ValueError(f"`in_chans` (={options['in_chans']!r}) is `in_channels` here.")
    for argument, value in (
        ("in_channels", options.get("in_channels", 3)),
        ("num_classes", num_classes),
    ):
        if value is not None and (not is_int(value) or value < 1):
            raise ValueError(f"`{argument}` (={value!r}) must be an integer of at least 1.")
    num_classes = None if num_classes is None else int(num_classes)
    if "in_channels" in options:
        options["in_channels"] = int(options["in_channels"])
    if classes is not None and num_classes is None:
        num_classes = len(classes)
    if num_classes is None:
        num_classes = 10 if name.removeprefix(_CONVENTIONAL) in OURS else 1000
    conversion_options = {"b": b, "max_out": max_out, "norm": norm, "head": head, "strict": strict}
    if name.startswith(_CONVENTIONAL):
        given = {**conversion_options, "preset": preset}
        _check_left_out(name, given, "has no B-cos layers")
        return _conventional(name, {"num_classes": num_classes, **options}, input_size, classes)
    if name.startswith(_V2):
        given = {"norm": norm, "head": head, "strict": strict, "preset": preset}
        _check_left_out(name, given, "is not converted and not of the paper")
        own: dict[str, Any] = {"num_classes": num_classes, "b": b, "max_out": max_out, **options}
        network = v2_network(name.removeprefix(_V2), **own)
        return _unconverted(BcosModel, network, name, own, input_size or 224, classes)
    build = builder(name, {"num_classes": num_classes, **options})
    if input_size is None:
        input_size = SIZES.get(name)
    conversion = convert_lazily(build, {**conversion_options, "size": input_size})
    architecture = Architecture(name, {"num_classes": num_classes, **conversion_options, **options})
    model = _model(conversion, classes, architecture)
    if preset is not None:
        apply_preset(model, preset)
    return model


def _check_left_out(name: str, given: dict[str, Any], why: str) -> None:
    """Refuse what makes no sense for a network that is not converted, unless it is as usual."""
    for argument, value in given.items():
        if value != _USUAL[argument]:
            raise ValueError(f"`{argument}` (={value!r}) must be left out for {name}, which {why}.")


def apply_preset(model: BcosModel, preset: str) -> None:
    """Set γ, T and logit bias as `preset` (only "paper") has them for the architecture."""
    if preset != "paper":
        raise ValueError(f"`preset` (={preset!r}) must be 'paper' or None.")
    layers = dict(model.bcos_layers())
    scales = paper_preset(
        model.architecture.name or "",
        {name: layer.fan_in for name, layer in layers.items()},
        next(iter(layers.values())).b,
    )
    for name, layer in layers.items():
        layer.scale = scales.gamma[name]
    model.temperature, model.logit_bias = scales.temperature, scales.logit_bias
    model.scaling = preset


def _model(
    conversion: Conversion, classes: Sequence[str] | None, architecture: Architecture
) -> BcosModel:
    model = BcosModel(
        conversion.network,
        in_channels=conversion.channels,
        input_size=conversion.size,
        num_classes=conversion.outputs,
        classes=classes,
        report=conversion.report,
        architecture=architecture,
    )
    return model.train()


def _conventional(
    name: str,
    options: dict[str, Any],
    input_size: int | Sequence[int] | None,
    classes: Sequence[str] | None,
) -> ConventionalModel:
    base = name.removeprefix(_CONVENTIONAL)
    extra: dict[str, Any] = {"cifar9": {"batch_norm": True}}.get(base, {})
    if base in ("inception_v3", "googlenet"):
        extra = {"init_weights": True}
    if input_size is None:
        input_size = {**SIZES, "inception_v3": 299}.get(base, 224)
    network = builder(base, {**extra, **options})()
    return _unconverted(ConventionalModel, network, name, options, input_size, classes)


M = TypeVar("M", bound=BcosModel)


def _unconverted(
    kind: type[M],
    network: nn.Module,
    name: str,
    options: dict[str, Any],
    size: int | Sequence[int],
    classes: Sequence[str] | None,
) -> M:
    model = kind(
        network,
        in_channels=options.get("in_channels", 3),
        input_size=as_pair(size),
        num_classes=options["num_classes"],
        classes=classes,
        architecture=Architecture(name, options),
    )
    return model.train()


_CONVENTIONAL = "conventional/"
_V2 = "v2/"
_USUAL = {"b": 2.0, "max_out": 2, "norm": None, "head": "conv", "strict": True, "preset": None}
