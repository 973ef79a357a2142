"""The part of a page that tells how well explanations localise, for several architectures each
trained in several kinds, as in the paper's Fig. 5, B1 and B2.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from torchbcos.plots import score_boxes
from torchbcos.posthoc import METHODS
from torchbcos.reproduce.imagenet import ARCHITECTURES
from torchbcos.reproduce.results import Result, Results, method_rank
from torchbcos.reproduce.tables import MISSING, grids, listed, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Kinds", "draw_boxes", "localisation", "median", "more_accurate_first"]

#: How the name of an experiment ends, and what such a network is called.
Kinds = Mapping[str, str]
CONVENTIONAL = "-conventional"
HIGH = 0.9  # a good median


def more_accurate_first(found: Results, arch: str) -> list[Result]:
    """The B-cos networks of an architecture, the more accurate first."""
    both = [found[arch + end] for end in ("", "-norm") if arch + end in found]
    return sorted(both, key=lambda r: -r.accuracy)


# A picture.


def draw_boxes(found: Results, kinds: Kinds, end: str) -> Figure | None:
    """All methods on the networks of one kind; beside conventional ones stands ours (Fig. B2)."""
    panels, means = {}, {}
    for arch, (title, _, _) in ARCHITECTURES.items():
        r = found.get(arch + end)
        if r is None:
            continue
        most = max((m["grids"] for m in r.methods.values()), default=0)
        drawn = {m["label"] + "*" * (m["grids"] < most): m for m in r.methods.values()}
        bcos = next((b for b in more_accurate_first(found, arch) if "ours" in b.methods), None)
        if end == CONVENTIONAL and bcos is not None:
            kind = kinds[bcos.experiment.name.removeprefix(arch)]
            drawn = {f"Ours ({kind})": bcos.methods["ours"], **drawn}
        if len(drawn) > 1:
            name = f"{title}, {kinds[end]}, {r.accuracy:.1f} % accurate"
            panels[name] = {label: np.array(m["percentiles"]) for label, m in drawn.items()}
            means[name] = {label: m["mean"] for label, m in drawn.items()}
    return score_boxes(panels, means=means, chance=1 / 9) if panels else None


# Words and tables.


def localisation(found: Results, kinds: Kinds, shown: Kinds) -> str:
    """The section; `shown` are the files of the pictures that there are, by the ends of `kinds`."""
    parts = [
        "## Localisation (Fig. 5, B1 and B2)",
        "Medians over all cells of all grids. Slow methods are scored on fewer grids, the first "
        "ones, which are those of the most confident images; in brackets is what ours has on these "
        "alone. Maps of methods that perturb images are not smoothed, as in the paper.",
    ]
    for end, file in shown.items():
        parts.append(f"![Localisation of every method, {kinds[end]}](pictures/{file})")
    if shown:
        beside = "of a B-cos network"
        if len(kinds) > 2:
            beside += ": of the more accurate one of the two, if ours was scored there"
        parts.append(
            "Boxes are quartiles of all cells' scores, whiskers 5 % to 95 %, dots means, the "
            "dashed line chance; a star marks methods that were scored on fewer grids than others. "
            f"Beside the conventional networks stands ours {beside}."
        )
    for arch, (title, _, _) in ARCHITECTURES.items():
        networks = {end: found.get(arch + end) for end in kinds}
        labels: dict[str, str] = {}
        for r in filter(None, networks.values()):
            labels |= {key: m["label"] for key, m in r.methods.items()}
        parts.append(f"### {title}")
        if not labels:
            parts.append("Missing.")
            continue
        rows = [
            [label, *(median(r, key) for r in networks.values()), grids(key, *networks.values())]
            for key, label in sorted(labels.items(), key=lambda pair: method_rank(pair[0]))
        ]
        parts.append(table(["method", *kinds.values(), "grids"], rows))
        parts.append(_unscored(networks, kinds))
        verdict = " ".join(_verdicts(networks, kinds))
        if verdict:
            parts.append(verdict)
    return "\n\n".join(parts)


def _unscored(networks: Mapping[str, Result | None], kinds: Kinds) -> str:
    """Which methods a dash in the table, or no row, stands for."""
    each = []
    for end, r in networks.items():
        if r is None:
            continue
        suitable = [m for m in METHODS.values() if end != CONVENTIONAL or not m.inherent]
        labels = [m.label for m in suitable if m.name not in r.methods]
        if labels:
            named = "all methods" if len(labels) == len(suitable) else ", ".join(labels)
            each.append(f"{named} ({kinds[end]})")
    words = "–: not applicable, or not scored."
    return f"{words} Not scored: {'; '.join(each)}." if each else words


def _verdicts(networks: Mapping[str, Result | None], kinds: Kinds) -> Iterator[str]:
    """Each B-cos network's own maps, beside the best post-hoc method there and elsewhere."""
    conventional = networks[CONVENTIONAL]
    for end, r in networks.items():
        if r is None or "ours" not in r.methods:
            continue
        own = r.methods["ours"]["quartiles"][1]
        words = f"{kinds[end]}: ours has {own:.3f}"
        words += "" if own >= HIGH else f", below {HIGH}"
        for where, other in (("the same network", r), ("the conventional one", conventional)):
            leads = _leads(r, other) if other is not None else {}
            if other is not None and leads:
                best, lead = min(leads.items(), key=lambda pair: pair[1])
                above = sum(value > 0 for value in leads.values())
                words += (
                    f"; on {where} it is above {above} of {len(leads)} post-hoc methods, the "
                    f"nearest of which, {best}, is {abs(lead):.3f} "
                    f"{'below' if lead > 0 else 'above'}{_unequal(r, other)}"
                )
        yield words + "."


def _unequal(ours: Result, other: Result) -> str:
    """Words for methods that were scored on more or fewer grids than ours: further grids are of
    less confident images.
    """
    own = ours.methods["ours"]
    equal = {own["grids"], own["first"]}
    others = sorted({m["grids"] for m in other.methods.values()} - equal)
    if not others:
        return ""
    counts = listed(map(str, others), "or")
    return f" (some scored on {counts} grids, ours on {own['grids']})"


def _leads(ours: Result, other: Result) -> dict[str, float]:
    """By how much the median of ours is above that of each method, on as many grids if it can be:
    else see `_unequal`.
    """
    own = ours.methods["ours"]
    leads = {}
    for key, m in other.methods.items():
        if key != "ours":
            mine = own["median_of_first"] if m["grids"] == own["first"] else own["quartiles"][1]
            leads[m["label"]] = float(mine - m["quartiles"][1])
    return leads


def median(r: Result | None, method: str) -> str:
    """Of ours with that of the first grids, where other methods have fewer."""
    if r is None:
        return MISSING
    if method not in r.methods:
        return "–"
    m = r.methods[method]
    fewer = any(other["grids"] < m["grids"] for other in r.methods.values())
    first = f" ({m['median_of_first']:.3f})" if method == "ours" and fewer else ""
    return f"{m['quartiles'][1]:.3f}{first}"
