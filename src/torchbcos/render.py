"""Pictures of explanations, as arrays or matplotlib figures; nothing here opens a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from torchbcos.encoding import decode
from torchbcos.explanation import Explanation
from torchbcos.smoothing import smoothed

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "colour",
    "contributions",
    "delta",
    "figure",
    "overlay",
    "photo",
    "shortened",
    "signed",
    "target_name",
]

PERCENTILE = 99.5
_PIXELS = 2**17  # of all pictures that are coloured at once: what is made on the way stays small
TITLE = 20  # letters above a panel of a figure, beside the value
RED, BLUE = (214, 39, 40), (31, 90, 180)
ORANGE, AZURE = (230, 120, 10), (20, 110, 200)


def colour(
    e: Explanation, *, style: str = "paper", percentile: float = PERCENTILE, kernel: int = 15
) -> np.ndarray:
    """W(x) as pictures in colour with transparency: uint8 RGBA [N, K, H, W, 4].

    A pixel has the colour that its weights point to, (r, 1-r) scaled to sum 1, negative weights cut
    to 0, and is the more opaque the longer its weights are, up to the given percentile.

    style="paper": pixels that do not contribute positively are transparent, and the percentile is
    one of all weights' lengths. style="released", as in the authors' code: opacity, 0 where the
    contribution is negative, is averaged over `kernel`×`kernel` pixels before the percentile.

    >>> import torchbcos as tb
    >>> e = tb.explain(tb.load("cifar10"), torch.rand(2, 3, 32, 32), ["cat", "dog"])
    >>> tb.render.colour(e).shape, tb.render.colour(e).dtype
    ((2, 2, 32, 32, 4), dtype('uint8'))
    """
    if style not in ("paper", "released"):
        raise ValueError(f"`style` (={style!r}) must be 'paper' or 'released'.")
    weights = e.weights.detach().cpu()
    if weights.shape[2] not in (2, 6):
        raise ValueError(
            f"`e` has weights of {weights.shape[2]} channels, which are no colours: pictures need "
            "encoded grey (2) or colour (6) images; use render.contributions."
        )
    if style == "released" and (kernel < 1 or kernel % 2 == 0):
        raise ValueError(f"`kernel` (={kernel}) must be a positive odd number of pixels.")
    n, k, _, height, width = weights.shape
    pictures = np.empty((n * k, 1, height, width, 4), np.uint8)
    weights = weights.flatten(0, 1).unsqueeze(1)
    contribution = e.contributions.detach().cpu().flatten(0, 1).unsqueeze(1)
    few = max(1, _PIXELS // max(1, height * width))
    for start in range(0, n * k, few):
        rows = slice(start, start + few)
        pictures[rows] = _coloured(weights[rows], contribution[rows], style, percentile, kernel)
    return pictures.reshape(n, k, height, width, 4)


def _coloured(
    weights: Tensor, contribution: Tensor, style: str, percentile: float, kernel: int
) -> np.ndarray:
    weights = _relative(weights, (2, 3, 4))  # as colours and opacity are
    rgb = decode(weights).expand(-1, -1, 3, -1, -1)
    length = weights.square().sum(2).sqrt()  # [N, K, H, W]; a norm by torch takes much longer
    if style == "paper":
        alpha = length / _percentile(length, percentile)
        alpha = torch.where(contribution > 0, alpha, 0.0)
    else:
        length = torch.where(contribution < 0, 0.0, length)
        length = smoothed(length, kernel)
        alpha = length / _percentile(length, percentile)
    rgba = torch.cat([rgb, alpha.clamp(0, 1).unsqueeze(2)], dim=2)
    return _bytes(rgba.permute(0, 1, 3, 4, 2))


def contributions(e: Explanation, *, percentile: float = PERCENTILE) -> np.ndarray:
    """Contribution maps, red for positive, blue for negative: uint8 RGB [N, K, H, W, 3].

    >>> import torchbcos as tb
    >>> e = tb.explain(tb.load("cifar10"), torch.rand(2, 3, 32, 32))
    >>> tb.render.contributions(e).shape
    (2, 1, 32, 32, 3)
    """
    return signed(e.contributions, percentile=percentile)


def delta(e: Explanation, i: int = 0, j: int = 1, *, percentile: float = PERCENTILE) -> np.ndarray:
    """Where target i (orange) and target j (blue) have the larger contribution: [N, H, W, 3].

    >>> import torchbcos as tb
    >>> e = tb.explain(tb.load("cifar10"), torch.rand(2, 3, 32, 32), ["cat", "dog"])
    >>> tb.render.delta(e).shape
    (2, 32, 32, 3)
    """
    return signed(e.delta(i, j), percentile=percentile, positive=ORANGE, negative=AZURE)


def signed(
    values: Tensor,  # [..., H, W]
    *,
    percentile: float = PERCENTILE,
    positive: tuple[int, int, int] = RED,
    negative: tuple[int, int, int] = BLUE,
) -> np.ndarray:
    """Maps of signed values: white at 0, full colour at the percentile of |values|, per map.

    >>> signed(torch.tensor([[0.0, 2.0], [-2.0, 0.0]]), percentile=100).tolist()
    [[[255, 255, 255], [214, 39, 40]], [[31, 90, 180], [255, 255, 255]]]
    """
    values = _relative(values.detach().cpu(), (-2, -1))
    v = (values / _percentile(values.abs(), percentile)).clamp(-1, 1).unsqueeze(-1)
    end = torch.where(v > 0, torch.tensor(positive), torch.tensor(negative)) / 255
    return _bytes(1 + v.abs() * (end - 1))


def overlay(images: Tensor, pictures: np.ndarray, *, fade: float = 0.3) -> np.ndarray:
    """Pictures on faded grey versions of their images: uint8 RGB [N, K, H, W, 3].

    RGBA pictures are laid over the image, RGB maps multiplied with it, so that white shows it.

    >>> import torchbcos as tb
    >>> images = torch.rand(2, 3, 32, 32)
    >>> e = tb.explain(tb.load("cifar10"), images)
    >>> tb.render.overlay(images, tb.render.colour(e)).shape
    (2, 1, 32, 32, 3)
    """
    if pictures.ndim != 5 or pictures.shape[0] != len(images):
        raise ValueError(
            f"`pictures` (shape {pictures.shape}) must be [N, K, H, W, 3 or 4] for N = "
            f"{len(images)} images."
        )
    if tuple(images.shape[-2:]) != pictures.shape[2:4]:
        raise ValueError(
            f"`images` ({tuple(images.shape[-2:])} px) must have the size of `pictures` "
            f"({pictures.shape[2:4]} px)."
        )
    grey = images.detach().float().cpu().mean(1).clamp(0, 1).numpy()
    ground = (1 - fade * (1 - grey))[:, None, :, :, None]
    top = pictures[..., :3] / 255
    if pictures.shape[-1] == 4:
        alpha = pictures[..., 3:] / 255
        return _bytes(torch.from_numpy(alpha * top + (1 - alpha) * ground))
    return _bytes(torch.from_numpy(top * ground))


def photo(image: Tensor) -> np.ndarray:
    """An image [C, H, W] in 0..1 as uint8 RGB [H, W, 3]; of other channels than 1 the first three.

    >>> photo(torch.ones(1, 2, 2)).shape
    (2, 2, 3)
    """
    pixels = image.detach().float().cpu().clamp(0, 1)
    pixels = pixels.expand(3, -1, -1) if len(pixels) == 1 else pixels[:3]
    return _bytes(pixels.permute(1, 2, 0))


def figure(
    images: Tensor,  # [N, C, H, W] in 0..1
    e: Explanation,
    *,
    names: Sequence[str] | None = None,
    style: str = "paper",
    maps: bool = True,
) -> Figure:
    """One row for each image: the input, then picture and contribution map of each target.

    `names` are class names, by default the model's. The figure is not shown; call `.savefig`.

    >>> import torchbcos as tb
    >>> images = torch.rand(2, 3, 32, 32)
    >>> drawn = tb.render.figure(images, tb.explain(tb.load("cifar10"), images))
    >>> len(drawn.axes)  # of each image the input, the picture and the map
    6
    """
    from matplotlib.figure import Figure

    n, k = e.outputs.shape
    if len(images) != n:
        raise ValueError(f"`images` (={len(images)}) must be the {n} that `e` explains.")
    names = names if names is not None else e.classes
    if names is not None and e.layer is None and len(names) <= int(e.targets.max()):
        raise ValueError(f"`names` (={len(names)}) must name every class that `e` explains.")
    columns = 1 + k * (2 if maps else 1)
    fig = Figure(figsize=(1.9 * columns, 2.1 * n), layout="constrained")
    axes = fig.subplots(n, columns, squeeze=False)
    pictures, heat = colour(e, style=style), contributions(e)
    for row in range(n):
        axes[row, 0].imshow(photo(images[row]))
        axes[row, 0].set_title("input", fontsize=9)
        for t in range(k):
            name = target_name(e, row, t, names).encode("utf-8", "backslashreplace").decode()
            name = shortened(name, TITLE)  # a folder's name may be no text
            title = f"{name}  {e.outputs[row, t].item():.2f}"
            column = 1 + t * (2 if maps else 1)
            axes[row, column].imshow(pictures[row, t])
            axes[row, column].set_title(title, fontsize=9, parse_math=False)
            if maps:
                axes[row, column + 1].imshow(heat[row, t])
                axes[row, column + 1].set_title("contributions", fontsize=9)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    return fig


def shortened(name: str, length: int) -> str:
    """At most `length` letters of a name.

    >>> shortened("cassette player", 9)
    'cassette…'
    """
    return name if len(name) <= length else name[: length - 1].rstrip() + "…"


def target_name(e: Explanation, image: int, target: int, names: Sequence[str] | None = None) -> str:
    """What is explained, in words: a class name, a class index, or a unit of a layer."""
    index = int(e.targets[image, target])
    if e.layer is not None:
        return f"{e.layer} unit {index}" if index >= 0 else e.layer
    return names[index] if names is not None else f"class {index}"


def _relative(values: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Each map over its largest value: squares of very small or large ones are no numbers."""
    values = values if values.is_floating_point() else values.float()
    largest = values.abs().amax(dims, keepdim=True)
    return (values / torch.where(largest > 0, largest, 1)).float()


def _percentile(values: Tensor, percentile: float) -> Tensor:
    """The percentile of each map [..., H, W], broadcastable to it; 1 for a map of zeros."""
    if not 0 < percentile <= 100:
        raise ValueError(f"`percentile` (={percentile}) must be above 0 and at most 100.")
    found = np.percentile(values.flatten(-2).numpy(), percentile, axis=-1, keepdims=True)
    level = torch.from_numpy(np.asarray(found, dtype=np.float32)).unsqueeze(-1)
    largest = values.amax((-2, -1), keepdim=True)
    level = torch.where(level > 0, level, largest)  # all but a few pixels are 0
    return torch.where(level > 0, level, 1.0)


def _bytes(values: Tensor) -> np.ndarray:
    return (values * 255).round().clamp(0, 255).to(torch.uint8).numpy()
