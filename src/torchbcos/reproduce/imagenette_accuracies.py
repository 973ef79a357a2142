"""The part of the page on Imagenette that tells accuracies, and how far equal runs are apart."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from torchbcos.reproduce.imagenet import ARCHITECTURES
from torchbcos.reproduce.localised import more_accurate_first
from torchbcos.reproduce.results import Result, Results
from torchbcos.reproduce.tables import accuracy, difference, table

__all__ = ["accuracies"]

NEAR = 1.0  # points of accuracy that a B-cos network may lose


def accuracies(found: Results, repeats: Sequence[Result]) -> str:
    """The section: `found` in a table beside the paper's, then what `repeats` of them had."""
    rows, better = [], {}
    for arch, (title, paper_conventional, paper_bcos) in ARCHITECTURES.items():
        base, *both = (found.get(arch + end) for end in ("-conventional", "", "-norm"))
        cells = [title, accuracy(base)]
        for r in both:
            cells += [accuracy(r), difference(r, base)]
        if base and any(both):
            better[title] = more_accurate_first(found, arch)[0].accuracy - base.accuracy
        off = f"{paper_bcos - paper_conventional:+.1f}"
        rows.append([*cells, f"{paper_conventional}", f"{paper_bcos}", off])
    header = [
        "network", "conventional, %", "B-cos, no norms", "difference", "B-cos, norms", "difference",
        "paper, ImageNet: conventional", "B-cos", "difference",
    ]  # fmt: skip
    parts = ["## Accuracy (Tab. 2)", table(header, rows)]
    if better:
        near = sum(round(off, 2) >= -NEAR for off in better.values())
        each = ", ".join(f"{title} {off:+.2f}" for title, off in better.items())
        parts.append(
            f"The better of the two B-cos networks is above the conventional one or at most {NEAR} "
            f"points below in {near} of {len(better)} architectures: {each}."
        )
    parts += _repeated(found, repeats)
    networks = [r for name, r in found.items() if not name.endswith("-conventional")]
    if networks:
        best = max(networks, key=lambda r: r.accuracy)
        parts.append(f"The best B-cos network: {best.experiment.what}, {best.accuracy:.2f} %.")
    other = found.get("vgg11_bn-conventional")
    if other:
        parts.append(
            "The paper's VGG-11 has no norms. With batch norms the conventional one has "
            f"{other.accuracy:.2f} %."
        )
    return "\n\n".join(parts)


def _repeated(found: Results, repeats: Sequence[Result]) -> list[str]:
    """What was trained more than once, and between which bounds the differences lie then."""
    runs = {
        name: [r, *(x for x in repeats if x.experiment.name == name)] for name, r in found.items()
    }
    rows = [
        [name, ", ".join(map(accuracy, same)), ", ".join(filter(None, map(_median, same))) or "–"]
        for name, same in runs.items()
        if len(same) > 1
    ]
    if not rows:
        return []
    parts = [
        "Trained more than once with the same settings and seed, the first as above:",
        table(["network", "accuracies, %", "medians of ours in the pointing game"], rows),
    ]
    bounds = []
    for arch, (title, _, _) in ARCHITECTURES.items():
        better, base = more_accurate_first(found, arch), runs.get(f"{arch}-conventional", [])
        if better and base:
            pairs = product(runs[better[0].experiment.name], base)
            apart = sorted(r.accuracy - other.accuracy for r, other in pairs)
            if len(apart) > 1:
                mean = sum(apart) / len(apart)
                bounds.append(
                    f"{title} from {apart[0]:+.2f} to {apart[-1]:+.2f}, on average {mean:+.2f}"
                )
    if bounds:
        parts.append(
            "Between all such runs, the better B-cos network differs from the conventional one by: "
            f"{'; '.join(bounds)}."
        )
    return parts


def _median(r: Result) -> str:
    return f"{r.methods['ours']['quartiles'][1]:.3f}" if "ours" in r.methods else ""
