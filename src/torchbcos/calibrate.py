"""Choose every layer's γ and the temperature from one batch of images.

Why this works: a B-cos layer is positively homogeneous, f(a·x) = a·f(x), and so are pools, sums and
concatenations. In a plain sequence a layer's γ therefore only multiplies what comes after it and
never changes a direction or a cosine: nothing but γ₁·…·γ_L / T reaches the logits. Where branches
are added or concatenated γ also decides how much each counts, and equal scales let each have its
say; where an uncentred norm follows, γ cancels and does no harm. So each layer, in the order the
signal meets them, is set once and for all: to give its output the root mean square 1. No later
choice disturbs it, and one forward pass does them all. What is left is one number, T, and it is set
from the outputs of the same pass.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchbcos.encoding import check_images, check_values
from torchbcos.functional import explanation_mode
from torchbcos.layers import BcosLayer
from torchbcos.models import BcosModel, in_mode, refuse_conventional
from torchbcos.undisturbed import undisturbed
from torchbcos.wrappers import bcos_within

__all__ = ["LayerSignal", "Signal", "calibrate", "signal"]

LOGIT_RMS = 0.05

M = TypeVar("M", bound=nn.Module)


def calibrate(
    model: M,
    images: Tensor,
    *,
    logit_rms: float = LOGIT_RMS,
    only_temperature: bool = False,
) -> M:
    """Set γ of every layer and T in place, so that signals neither vanish nor explode.

    `images` are a batch [N, C, H, W] as in training; 32 or more are enough. After the call every
    B-cos layer's output and the logits, without their bias, have root mean square 1 and
    `logit_rms`. Returns the model.

    A smaller `logit_rms`, that is a larger T, asks for better aligned weights before the network
    can be confident. With `only_temperature` every γ stays as it is, as for a trained network that
    got a new classifier.

    >>> import torchbcos as tb
    >>> model = tb.create_model("mini", num_classes=4, input_size=32)
    >>> images = torch.rand(32, 3, 32, 32)
    >>> round(tb.signal(tb.calibrate(model, images), images).logits, 3)
    0.05
    """
    inner = bcos_within(model)
    refuse_conventional(inner, "has no γ to set")
    check_images(images, inner.in_channels)
    check_values(images)
    if not (math.isfinite(logit_rms) and logit_rms > 0):
        raise ValueError(f"`logit_rms` (={logit_rms!r}) must be a positive finite number.")
    before = {layer: layer.scale for _, layer in inner.bcos_layers()}
    done: set[nn.Module] = set()

    def settle(layer: BcosLayer, _: Tensor, out: Tensor) -> Tensor:
        if layer in done or only_temperature:  # a layer used twice keeps the γ of its first use
            return out
        done.add(layer)
        rms = _rms(out)
        gain = 1 / rms if 0 < rms < math.inf else 1.0
        layer.scale *= gain
        return out * gain

    try:
        for layer in before if not only_temperature else ():
            layer.scale = 1.0
        with _watching(inner, settle), _as_in_training(inner):
            outputs = inner.network(inner.encoded(images))
        first = outputs if isinstance(outputs, Tensor) else outputs[0]
        finite = bool(torch.isfinite(first).all())
        if not finite or not first.any():
            raise ValueError(
                f"the network's outputs are {'all 0' if finite else 'not finite'}, so there is "
                "nothing to calibrate: look at torchbcos.signal(model, images) for the layer where "
                "that begins."
            )
    except BaseException:
        for layer, scale in before.items():
            layer.scale = scale
        raise
    inner.temperature = _rms(first) / logit_rms
    inner.scaling = "calibrated"
    return model


@dataclass(frozen=True)
class LayerSignal:
    name: str
    norm: float  # mean ‖patch‖ over positions and images
    cosine: float  # mean |cos| between patch and the winning unit
    output: float  # root mean square of the output
    scale: float  # γ


@dataclass(frozen=True)
class Signal:
    """The signal on its way through a model, layer by layer; `print` shows a table."""

    layers: tuple[LayerSignal, ...]
    logits: float  # root mean square of the logits without their bias

    def __str__(self) -> str:
        width = max([len("layer"), *(len(layer.name) for layer in self.layers)])
        lines = [f"{'layer':<{width}}  {'‖patch‖':>9}  {'|cos|':>9}  {'output':>9}  {'γ':>9}"]
        for s in self.layers:
            numbers = (s.norm, s.cosine, s.output, s.scale)
            lines.append(f"{s.name:<{width}}" + "".join(f"  {v:>9.3g}" for v in numbers))
        return "\n".join([*lines, f"{'logits':<{width}}  {'':>9}  {'':>9}  {self.logits:>9.3g}"])


def signal(model: nn.Module, images: Tensor) -> Signal:
    """How large the signal is in every layer, and how well its weights are aligned with it.

    For the user whose training does not start: a column `output` that falls towards 0 or grows
    without bound from layer to layer says that γ is wrong, and `calibrate` sets it right.

    >>> import torchbcos as tb
    >>> found = tb.signal(tb.load("cifar10"), torch.rand(2, 3, 32, 32))
    >>> found.layers[0].name, 0 < found.layers[0].cosine < 1
    ('0', True)
    """
    model = bcos_within(model)
    refuse_conventional(model, "has no B-cos layers to look at")
    check_images(images, model.in_channels)
    check_values(images)
    names = {layer: name for name, layer in model.bcos_layers()}
    rows: list[LayerSignal] = []

    def look(layer: BcosLayer, x: Tensor, out: Tensor) -> Tensor:
        lin, cosine = _linear_and_cosine(layer, x)
        seen = cosine > 0
        share = seen.count_nonzero().item() / seen.numel()
        norm = torch.where(seen, lin.abs() / cosine, 0.0).mean().item() / (share or 1.0)
        row = LayerSignal(names[layer], norm, cosine.mean().item(), _rms(out), layer.scale)
        rows.append(row)
        return out

    with _watching(model, look), _as_in_training(model):
        outputs = model.network(model.encoded(images))
    first = outputs if isinstance(outputs, Tensor) else outputs[0]
    return Signal(tuple(rows), _rms(first) / model.temperature)


def _rms(x: Tensor) -> float:
    """Root mean square, in float64, so that no float32's square underflows."""
    x, norm = x.detach(), partial(torch.linalg.vector_norm, dtype=torch.float64)
    length: float = norm(x).item()
    if not 1e-140 < length < 1e140:  # a float64's square may
        length = x.abs().amax().item()
        if 0 < length < math.inf:
            length *= norm(x / length).item()
    return length / math.sqrt(x.numel())


def _linear_and_cosine(layer: BcosLayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """ŵᵀx and |cos| of the winning units, from the layer itself with b = 1 and b = 2."""
    twin = copy.copy(layer)  # shares the weight
    twin.scale = 1.0
    twin.b = 1.0
    lin = twin.forward(x)
    twin.b = 2.0
    return lin, (twin.forward(x) / torch.where(lin == 0, 1.0, lin)).abs()


@contextmanager
def _watching(
    model: BcosModel, look: Callable[[BcosLayer, Tensor, Tensor], Tensor]
) -> Iterator[None]:
    """Each B-cos layer's output passes through `look` while this context lasts."""

    def show(layer: BcosLayer, args: tuple[Any, ...], named: dict[str, Any], out: Tensor) -> Tensor:
        return look(layer, args[0] if args else named["input"], out)

    with ExitStack() as stack:
        for _, layer in model.bcos_layers():
            stack.enter_context(layer.register_forward_hook(show, with_kwargs=True))
        yield


@contextmanager
def _as_in_training(model: BcosModel) -> Iterator[None]:
    """Batch statistics and auxiliary classifiers as in training; nothing is tracked or changed."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    as_it_is = undisturbed(model, device)
    with in_mode(model, training=True), as_it_is, torch.no_grad(), explanation_mode():
        yield
