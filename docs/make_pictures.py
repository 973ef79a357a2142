"""Draw the pictures of the documentation anew, from the bundled model and photos."""

from pathlib import Path

from matplotlib.figure import Figure

import torchbcos as tb
import torchbcos.toy
from torchbcos.images import read_image

ROOT = Path(__file__).parent.parent


def cat() -> None:
    model = tb.load("cifar10")
    photo = ROOT / "examples" / "photos" / "cat.jpg"
    seen = read_image(photo, model.input_size)[None]
    e = tb.explain(model, seen, ["cat", "dog"])
    maps, sums = tb.render.contributions(e)[0], e.contributions[0].sum((1, 2))
    panels = {
        "photo": read_image(photo, (300, 300)).permute(1, 2, 0).numpy(),
        "what the network sees": seen[0].permute(1, 2, 0).numpy(),
        "W(x) for cat": tb.render.colour(e)[0, 0],
        f"contributions to cat, in all {sums[0]:+.0f}": maps[0],
        f"contributions to dog, in all {sums[1]:+.0f}": maps[1],
    }
    figure = Figure(figsize=(11.2, 2.7), layout="constrained", facecolor="white")
    for axis, (title, picture) in zip(figure.subplots(1, 5), panels.items(), strict=True):
        axis.imshow(picture, interpolation="nearest")
        axis.set_title(title, fontsize=9.5)
        axis.set_xticks([])
        axis.set_yticks([])
        for spine in axis.spines.values():
            spine.set_color("#cccccc")
    figure.savefig(ROOT / "docs" / "pictures" / "cat.png", dpi=100)


def toy() -> None:
    figure = tb.toy.figure(tb.toy.solve((1.0, 2.0, 10.0)))
    figure.savefig(ROOT / "docs" / "pictures" / "toy.png", dpi=80)


if __name__ == "__main__":
    cat()
    toy()
