"""The commands that evaluate explanations: `localise` and `toy`."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from torchbcos.cli_common import (
    AsJson,
    Device,
    ModelName,
    as_text,
    check_folder,
    errors,
    output,
)

if TYPE_CHECKING:
    from torch import nn

    from torchbcos.data import Split
    from torchbcos.localise_run import Played


def localise(
    data: Annotated[str, typer.Option(help="'shapes', a CIFAR-10 folder, or class folders.")],
    model: ModelName = "",
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            help="Another model (may be repeated): a file or name as above, or a conventional "
            "network as torchvision/NAME=WEIGHTS, with normalised images."
        ),
    ] = None,
    methods: Annotated[
        str, typer.Option(help="'all', or names, comma-separated: ours,ixg,gradcam,…")
    ] = "all",
    grids: Annotated[int, typer.Option(help="How many grids.", min=1)] = 500,
    n: Annotated[int, typer.Option("--n", help="Cells per side.", min=2)] = 3,
    preset: Annotated[
        str, typer.Option(help="Grids as in the 'paper', or as in its code, 'released'.")
    ] = "paper",
    setting: Annotated[
        str, typer.Option(help="'grid', or cells disconnected: 'difull', 'dipart'.")
    ] = "grid",
    derive: Annotated[
        str,
        typer.Option(
            help="By what other methods derive B-cos models: the encoding's 'channels', or "
            "'colours', as the authors' code does."
        ),
    ] = "channels",
    smooth: Annotated[
        int, typer.Option(help="Smoothing window in pixels, 0 for none; -1: by size.", min=-1)
    ] = -1,
    size: Annotated[int, typer.Option(help="Pixels of a cell; 0: the model's.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Of the random choice of classes.", min=0)] = 42,
    batch: Annotated[
        int | None, typer.Option(help="Grids at once; else as the memory allows.", min=1)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for scores, plots, page.")] = Path("localise"),
    as_json: AsJson = False,
    device: Device = "cpu",
) -> None:
    """Play the grid pointing game: do explanations point at the image of their class?

    Scores that are in the folder already are not computed again, so a run that was interrupted goes
    on where it was.
    """
    from torchbcos.checkpoint import default_name
    from torchbcos.localise_page import write_report
    from torchbcos.localise_run import Game, play
    from torchbcos.models import BcosModel
    from torchbcos.posthoc import choose_methods

    check_folder(out)
    game = Game(grids, n, preset, setting, None if smooth < 0 else smooth, seed, derive)
    wanted = [m.strip() for m in methods.split(",") if m.strip()]
    names = [model or default_name(), *(baseline or [])]
    titles = _titles(names)
    played, networks, suitable, sets = [], [], [], []
    for name in names:  # all is checked before the first game
        network, opened = _network(name, device)
        # Ours needs a B-cos model; beside one, a conventional network does without it.
        chosen = choose_methods(wanted, network)
        chosen = [m for m in chosen if isinstance(network, BcosModel) or not m.inherent]
        for method in chosen:
            method.check(network)
        split = opened(data, size)
        networks.append(network)
        suitable.append([m.name for m in chosen])
        sets.append(split.test.to(device))
    for title, network, method_names, images in zip(titles, networks, suitable, sets, strict=True):
        errors.print(f"{title}: {len(images)} images")
        played.append(
            play(
                network,
                images,
                method_names,
                game,
                name=title,
                data=data,
                classes=len(split.classes),
                out=out / "scores" / title,
                batch=batch,
                console=errors,
            )
        )
    page = write_report(played, networks, sets, split.classes, game, out)
    if as_json:
        sys.stdout.write(json.dumps([p.as_json() for p in played], indent=1) + "\n")
        return
    _print(played)
    output.print(f"Open {page}", soft_wrap=True)


def toy(
    out: Annotated[Path, typer.Option(help="Folder for toy.json and toy.png.")] = Path("toy"),
    b: Annotated[str, typer.Option("--b", help="Exponents, comma-separated.")] = "1,2,4,10,30",
    points: Annotated[int, typer.Option(help="Points in each cluster.", min=1)] = 100,
    seed: Annotated[int, typer.Option(help="Of the random points.", min=0)] = 0,
    as_json: AsJson = False,
) -> None:
    """One B-cos unit in the plane: where do its best weights point, as B grows?"""
    from torchbcos.toy import RED_ANGLE, solve, write

    try:
        exponents = [float(text) for text in b.split(",")]
    except ValueError:
        raise ValueError(f"`--b` (={b!r}) must be numbers, as in 1,2,4,10.") from None
    check_folder(out)
    found = solve(exponents, count=points, seed=seed)
    files = write(found, out)
    if as_json:
        document = found.as_json()
        short = {k: document[k] for k in ("red_degrees", "exponents", "best_degrees")}
        sys.stdout.write(json.dumps(short, indent=1) + "\n")
        return
    table = Table("B", *(p.name for p in found.problems), title="Best angle of w in degrees")
    for exponent, row in zip(found.exponents, found.best.T, strict=True):
        table.add_row(f"{exponent:g}", *(f"{v:.1f}" for v in row))
    output.print(table)
    output.print(f"The red cluster is at {RED_ANGLE:.1f} degrees.")
    output.print(f"Wrote {files[0]} and {files[1]}", soft_wrap=True)


def _network(name: str, device: str) -> tuple[nn.Module, Callable[[str, int], Split]]:
    """A model as methods see it, and what opens test images for it, of its size if given 0."""
    from torchbcos.baseline import how_tested, load_baseline, to_explain
    from torchbcos.checkpoint import load
    from torchbcos.data import open_data
    from torchbcos.evaluate import open_as_trained

    if name.startswith("torchvision/"):
        arch = name.removeprefix("torchvision/")
        network = load_baseline(arch, device)
        own, part = how_tested(arch, network)
        return network, lambda data, size: open_data(data, size or own, part=part, only="test")
    model = load(name, device=device)

    def opened(data: str, size: int) -> Split:
        split = open_as_trained(model, data, size, console=errors)
        if model.classes is not None and model.classes != split.classes:
            raise ValueError(f"`--data` (={data!r}) has not the classes that {name} was made for.")
        return split

    return to_explain(model), opened


def _titles(names: list[str]) -> list[str]:
    """Short names for plots and folders, numbered where two are the same."""
    titles: list[str] = []
    for name in names:
        path = Path(name.split("=")[0])
        stem = path.parent.name if path.stem == "model" and path.parent.name else path.stem
        numbered = (f"{stem}-{number}" for number in itertools.count(2))
        titles.append(next(t for t in itertools.chain([stem], numbered) if t not in titles))
    return titles


def _print(played: list[Played]) -> None:
    for p in played:
        table = Table(title=as_text(f"{p.name}: {p.accuracy:.1%} accurate"), title_justify="left")
        table.add_column("method")
        for column in ("mean", "95 % interval", "quartiles", "seconds"):
            table.add_column(column, justify="right")
        for m in p.methods:
            s = m.summary
            table.add_row(
                m.label,
                f"{s.mean:.3f}",
                "{:.3f} – {:.3f}".format(*s.interval),
                "{:.3f} {:.3f} {:.3f}".format(*s.quartiles),
                f"{m.seconds:.1f}",
            )
        output.print(table)
