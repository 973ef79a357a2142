"""Inner units of a trained network: which respond most, and which to few classes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from torchbcos.checkpoint import write_atomically
from torchbcos.data import ImageSet
from torchbcos.models import BcosModel
from torchbcos.neurons import Neurons, build_page, collect, sheets

__all__ = ["describe_units"]

TOP = 100  # images of each unit that are counted by class
COUNT = 5  # units of a layer, of either kind


def describe_units(
    model: BcosModel, images: ImageSet, layers: Sequence[str], folder: Path, *, console: Console
) -> dict[str, Any]:
    """Numbers of the most active and the most class-skewed units of each layer.

    Their pictures are in `folder`, as units.html; everything about all units in units.safetensors.
    """
    top = min(TOP, len(images))
    found = collect(model, images, folder / "units.safetensors", layers=layers, top=top)
    chosen = {
        name: {
            "most_active": [u.unit for u in found.most_active(name, COUNT)],
            "most_skewed": [u.unit for u in found.most_skewed(COUNT, [name])],
        }
        for name in layers
    }
    shown = dict.fromkeys(
        (name, unit) for name, kinds in chosen.items() for units in kinds.values() for unit in units
    )
    words = f"explaining {len(shown)} units of {', '.join(layers)}"
    console.print(words, highlight=False, markup=False)
    page = build_page(
        f"{len(shown)} units", found, images, sheets(model, images, found, list(shown))
    )
    write_atomically(folder / "units.html", page.encode())
    return {
        "top": top,
        "layers": {
            name: {
                "units": found.layers[name].units,
                "map": [found.layers[name].height, found.layers[name].width],
                "skewed": int((found.skew[name].q <= 0.05).sum()),
                **{
                    kind: {str(unit): _numbers(found, name, unit) for unit in units}
                    for kind, units in kinds.items()
                },
            }
            for name, kinds in chosen.items()
        },
    }


def _numbers(found: Neurons, layer: str, unit: int) -> dict[str, Any]:
    units, skew, counts = found.units(layer), found.skew[layer], found.histogram(layer)[unit]
    order = counts.argsort(descending=True, stable=True).tolist()
    return {
        "activations": [float(f"{v:.4g}") for v in units.values[unit, :5].tolist()],
        "mean": float(f"{units.mean[unit].item():.4g}"),
        "bits": round(skew.divergence[unit].item(), 3),
        "q": float(f"{skew.q[unit].item():.2g}"),
        "classes": [[found.classes[k], int(counts[k])] for k in order if counts[k]],
    }
