"""LIME by the package `lime`, with the perturbed images made on the model's device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from torchbcos.posthoc.registry import register
from torchbcos.posthoc.subject import Subject, input_of, probabilities
from torchbcos.targets import Targets

__all__ = ["lime"]

SAMPLES, KERNEL, FEATURES = 500, 4, 5  # as in the paper
CHUNK = 16


@register("lime", label="LIME", perturbs=True, needs=("lime", "skimage"))
@torch.no_grad()
def lime(
    model: nn.Module,
    images: Tensor,
    targets: Targets = None,
    samples: int = SAMPLES,
    kernel: int | None = None,
    features: int = FEATURES,
    seed: int = 0,
    chunk: int = CHUNK,
) -> Tensor:
    """1 on the `features` superpixels that speak most for the target, else 0.

    Superpixels are quickshift's; one that is switched off has its mean colour. The kernel is 4, as
    in the paper, and smaller for images below 224 pixels, of which it would leave only one piece.
    """
    from skimage.segmentation import quickshift

    if kernel is None:
        kernel = max(1, round(KERNEL * min(1, min(images.shape[-2:]) / 224)))
    subject = Subject.of(model, images, targets)
    maps = torch.zeros(*subject.targets.shape, *images.shape[-2:], device=images.device)
    for i, image in enumerate(images):
        pixels = _as_array(image)
        explanation = _explainer(subject, image, chunk, seed).explain_instance(
            pixels if pixels.shape[2] == 3 else np.repeat(pixels[:, :, :1], 3, 2),
            classifier_fn=None,
            labels=sorted(set(subject.targets[i].tolist())),
            top_labels=None,
            hide_color=0,  # not used; else each superpixel's mean takes a pass over the image
            num_samples=samples,
            segmentation_fn=lambda p: quickshift(
                p, kernel_size=kernel, max_dist=200, ratio=0.2, rng=seed
            ),
        )
        for k, target in enumerate(subject.targets[i].tolist()):
            _, mask = explanation.get_image_and_mask(
                target, positive_only=True, hide_rest=True, num_features=features
            )
            maps[i, k] = torch.from_numpy(mask).to(maps)
    return maps


def _explainer(subject: Subject, image: Tensor, chunk: int, seed: int) -> Any:
    from lime.lime_image import LimeImageExplainer

    class OnDevice(LimeImageExplainer):  # type: ignore[misc]
        """As the package has it, but for one loop over segments and samples on the CPU."""

        def data_labels(
            self, pixels: Any, hidden: Any, segments: Any, _: Any, count: int, **__: Any
        ) -> tuple[np.ndarray, np.ndarray]:
            number = len(np.unique(segments))
            data = self.random_state.randint(0, 2, count * number).reshape(count, number)
            data[0] = 1
            where = torch.from_numpy(segments).to(image.device)
            mean = torch.from_numpy(_means(_as_array(image), segments)).to(image)
            found = []
            for rows in torch.from_numpy(data).to(image.device).bool().split(chunk):
                changed = torch.where(rows[:, where][:, None], image, mean)
                logits = subject.logits(input_of(subject.model, changed))
                found.append(probabilities(subject.model, logits).cpu())
            return data, torch.cat(found).double().numpy()

    return OnDevice(random_state=seed)


def _as_array(image: Tensor) -> np.ndarray:
    array: np.ndarray = image.detach().float().cpu().permute(1, 2, 0).double().numpy()
    return array


def _means(pixels: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """[C, H, W]: each pixel of an image [H, W, C] as its superpixel is on average."""
    which = segments.ravel()
    counts = np.bincount(which)
    colours = [np.bincount(which, weights=c.ravel()) / counts for c in np.moveaxis(pixels, 2, 0)]
    return np.stack([c[segments] for c in colours])
