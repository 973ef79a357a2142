"""Other methods of explanation beside ours, all called in one way and found by name.

Every method is `method(model, images, targets) → [N, K, H, W]`, for a B-cos model or any module
from images to logits. Add your own in three lines:

>>> import torch, torchbcos as tb
>>> from torchbcos import posthoc
>>> @posthoc.register("noise")
... def noise(model, images, targets=None):
...     return torch.rand(len(images), 1, *images.shape[-2:])
>>> model = tb.create_model("cifar9", preset="paper").eval()
>>> posthoc.METHODS["noise"](model, torch.rand(2, 3, 32, 32)).shape
torch.Size([2, 1, 32, 32])
>>> del posthoc.METHODS["noise"]
"""

from torchbcos.posthoc.colours import by_colours
from torchbcos.posthoc.gradients import (
    deeplift,
    grad,
    gradcam,
    guided_backprop,
    guided_gradcam,
    input_x_gradient,
    integrated_gradients,
    ours,
    smoothgrad,
)
from torchbcos.posthoc.perturbation import occlusion, rise
from torchbcos.posthoc.registry import METHODS, Method, choose_methods, register
from torchbcos.posthoc.superpixels import lime

__all__ = [
    "METHODS",
    "Method",
    "by_colours",
    "choose_methods",
    "deeplift",
    "grad",
    "gradcam",
    "guided_backprop",
    "guided_gradcam",
    "input_x_gradient",
    "integrated_gradients",
    "lime",
    "occlusion",
    "ours",
    "register",
    "rise",
    "smoothgrad",
]
