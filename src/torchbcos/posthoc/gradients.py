"""Methods by gradients. All targets of an image share its forward pass.

That is why captum, which runs one for each target, computes only DeepLIFT and Guided Backprop here;
the tests hold the other methods against it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from torchbcos.baseline import to_explain
from torchbcos.explain import explain
from torchbcos.localise import compose
from torchbcos.models import BcosModel
from torchbcos.posthoc.activations import RESCALED, separated
from torchbcos.posthoc.head import find_head
from torchbcos.posthoc.registry import register
from torchbcos.posthoc.subject import Subject, network_of
from torchbcos.targets import Targets

__all__ = [
    "deeplift",
    "grad",
    "gradcam",
    "guided_backprop",
    "guided_gradcam",
    "input_x_gradient",
    "integrated_gradients",
    "ours",
    "smoothgrad",
]

RELUS = (nn.ReLU,)
STEPS = 50  # of Integrated Gradients, as in the paper
PARTS, SAME = (1 / 64, 1 / 8, 1 / 2), 1e-4  # of the way, and how far gradients there may be apart
SAMPLES, NOISE = 25, 0.15  # of SmoothGrad; the noise as a part of the image's range


@register("ours", label="Ours", inherent=True)
def ours(model: nn.Module, images: Tensor, targets: Targets = None) -> Tensor:
    """The model's own contributions W(x)·x."""
    return explain(model, images, targets).contributions


@register("grad", label="Grad")
def grad(model: nn.Module, images: Tensor, targets: Targets = None) -> Tensor:
    """The gradient by the input, with its sign."""
    subject = Subject.of(model, images, targets)
    return _gradients(subject, subject.x).sum(2)


@register("ixg", label="IxG")
def input_x_gradient(model: nn.Module, images: Tensor, targets: Targets = None) -> Tensor:
    subject = Subject.of(model, images, targets)
    return (_gradients(subject, subject.x) * subject.x[:, None]).sum(2)


@register("intgrad", label="IntGrad")
def integrated_gradients(
    model: nn.Module, images: Tensor, targets: Targets = None, steps: int = STEPS
) -> Tensor:
    """Gradients along the line from zeros, by the Gauss–Legendre quadrature that captum uses.

    Where they are all the same, as in a network with f(a·x) = a·f(x), one stands for all.
    """
    subject = Subject.of(model, images, targets)
    nodes, weights = _gauss_legendre(steps)
    total = _gradients(subject, subject.x)
    if not _same_along_the_line(subject, total):
        total = torch.zeros_like(total)
        for node, weight in zip(nodes, weights, strict=True):
            total += weight * _gradients(subject, node * subject.x)
    return (total * subject.x[:, None]).sum(2)


@register("smoothgrad", label="SmoothGrad")
def smoothgrad(
    model: nn.Module,
    images: Tensor,
    targets: Targets = None,
    samples: int = SAMPLES,
    noise: float = NOISE,
    seed: int = 0,
) -> Tensor:
    """The mean of input gradients under normal noise of `noise` times the input's range."""
    subject = Subject.of(model, images, targets)
    x = subject.x
    deviation = noise * (x.amax((1, 2, 3), keepdim=True) - x.amin((1, 2, 3), keepdim=True))
    generator = torch.Generator(x.device).manual_seed(seed)
    total = x.new_zeros(*subject.targets.shape, *x.shape[1:])
    for _ in range(samples):
        # One image's noise for all: the result does not depend on what else is in the batch.
        drawn = torch.randn(x.shape[1:], generator=generator, device=x.device, dtype=x.dtype)
        total += _gradients(subject, x + deviation * drawn)
    return total.sum(2) / samples


@register("gradcam", label="GradCAM")
def gradcam(
    model: nn.Module, images: Tensor, targets: Targets = None, layer: str | None = None
) -> Tensor:
    """Positive part of the last features, weighted by their mean gradients; nearest pixels.

    `layer` is a submodule whose output is taken; by default the input of the head is found: of a
    classifier before the global pool, or of the global pool.
    """
    maps = _cam(Subject.of(model, images, targets), layer)
    return F.interpolate(maps, images.shape[-2:], mode="nearest")


@register(
    "deeplift",
    label="DeepLIFT",
    twin=lambda m: "" if _uses(m, RESCALED) else "ixg",
    needs=("captum",),
)
def deeplift(model: nn.Module, images: Tensor, targets: Targets = None) -> Tensor:
    """captum's DeepLIFT, rescale rule, from zeros.

    It has rules for activations and max pools. A B-cos network without gates has neither, and there
    the method is input × gradient.
    """
    if not _uses(model, RESCALED):
        return input_x_gradient(model, images, targets)
    from captum.attr import DeepLift

    return _by_captum(DeepLift, model, images, targets)


@register(
    "guided_backprop",
    label="GuidedBP",
    twin=lambda m: "" if _uses(m, RELUS) else "grad",
    needs=("captum",),
)
def guided_backprop(model: nn.Module, images: Tensor, targets: Targets = None) -> Tensor:
    """captum's Guided Backprop: ReLUs pass positive gradients only; without any, the gradient."""
    if not _uses(model, RELUS):
        return grad(model, images, targets)
    from captum.attr import GuidedBackprop

    return _by_captum(GuidedBackprop, model, images, targets)


@register("guided_gradcam", label="GuidedGradCAM")
def guided_gradcam(
    model: nn.Module, images: Tensor, targets: Targets = None, layer: str | None = None
) -> Tensor:
    """Guided Backprop times GradCAM."""
    guided = guided_backprop(model, images, targets)
    return guided * gradcam(model, images, targets, layer=layer)


def _gradients(subject: Subject, x: Tensor) -> Tensor:
    """[N, K, C, H, W] of the targets' logits at `x`, from one forward pass."""
    with torch.inference_mode(False):
        x = x.detach().clone().requires_grad_()
    return _derivatives(subject, x, x)


def _same_along_the_line(subject: Subject, at_image: Tensor) -> bool:
    """Whether gradients on the way from zeros are those at the image, at parts of the way by which
    floating-point numbers shrink without rounding.
    """
    length = at_image.flatten(2).norm(dim=2)  # [N, K]
    for part in PARTS:
        apart = (_gradients(subject, part * subject.x) - at_image).flatten(2).norm(dim=2)
        if not bool((apart <= SAME * length).all()):
            return False
    # Nor may anything come and go in between: what they add up to is the whole difference, as
    # nearly as TF32 can tell.
    with torch.no_grad():
        ends = [subject.outputs(x).double() for x in (torch.zeros_like(subject.x), subject.x)]
    along = (at_image.double() * subject.x.double()[:, None]).sum((2, 3, 4))
    missed = (along - (ends[1] - ends[0])).abs()
    return bool((missed <= 100 * SAME * (ends[0].abs() + ends[1].abs())).all())


def _derivatives(subject: Subject, x: Tensor, by: Tensor | Callable[[], Tensor]) -> Tensor:
    with torch.inference_mode(False), torch.enable_grad():
        outputs = subject.outputs(x)
        inner = by() if callable(by) else by
        last = outputs.shape[1] - 1
        found = [
            torch.autograd.grad(column.sum(), inner, retain_graph=k < last)[0]
            for k, column in enumerate(outputs.unbind(1))
        ]
    return torch.stack(found, 1).detach()


def _cam(subject: Subject, layer: str | None) -> Tensor:
    """[N, K, h, w] on the features' own grid, that of all cells where a model sees each alone."""
    network = network_of(subject.model)
    head = find_head(network, subject.x[:1], layer)
    x = subject.x.detach().requires_grad_()
    with head.watched(network) as features:
        gradients = _derivatives(subject, x, lambda: features[-1])
    weights = gradients.mean((-2, -1), keepdim=True)  # [N, K, C, 1, 1]
    maps = (weights * features[-1].detach()[:, None]).sum(2).relu()
    return compose(maps, math.isqrt(len(maps) // len(x)))


def _uses(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    network = network_of(model)
    if any(isinstance(m, kinds) for m in network.modules()):
        return True
    if isinstance(to_explain(model), BcosModel) and not isinstance(network, fx.GraphModule):
        return False
    return any(isinstance(m, kinds) for m in separated(network).modules())  # called as functions


def _by_captum(
    attribution: Callable[[nn.Module], object], model: nn.Module, images: Tensor, targets: Targets
) -> Tensor:
    subject = Subject.of(model, images, targets)
    if subject.extremes:
        with torch.no_grad():
            subject.logits(subject.x[:1])  # captum does not check targets
    computed = attribution(separated(network_of(model)))
    temperature = subject.model.temperature if isinstance(subject.model, BcosModel) else 1.0
    with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
        warnings.filterwarnings("ignore", message="Setting (forward, backward|backward) hooks")
        warnings.filterwarnings("ignore", message="Input Tensor")
        x = subject.x.detach().requires_grad_()
        maps = [
            computed.attribute(x, target=column).sum(1).detach()  # type: ignore[attr-defined]
            for column in subject.targets.unbind(1)
        ]
    return torch.stack(maps, 1) / temperature


def _gauss_legendre(steps: int) -> tuple[list[float], list[float]]:
    if steps < 1:
        raise ValueError(f"`steps` (={steps}) must be at least 1.")
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    return [float(v) for v in (nodes + 1) / 2], [float(w) for w in weights / 2]
