"""The command `torchbcos neurons` and its `show`: wiring only."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from torchbcos.cli_common import AsJson, Device, ModelName, as_text, check_file, errors, output

if TYPE_CHECKING:
    from torchbcos.data import ImageSet, Split
    from torchbcos.models import BcosModel
    from torchbcos.neurons import Neurons, Ranked

app = typer.Typer()


@app.callback(
    invoke_without_command=True,
    epilog="Example: torchbcos neurons --model cifar10 --data data/cifar10 --out units.safetensors",
)
def neurons(
    context: typer.Context,
    data: Annotated[str, typer.Option(help="'shapes', a CIFAR-10 folder, or class folders.")] = "",
    model: ModelName = "",
    layers: Annotated[
        str, typer.Option(help="Names or patterns, comma-separated; else all B-cos layers.")
    ] = "",
    top: Annotated[int, typer.Option(help="Keep the K best images of each unit.", min=1)] = 50,
    split: Annotated[str, typer.Option(help="Which images: 'test' or 'train'.")] = "test",
    active_above: Annotated[
        float, typer.Option(help="A unit counts as active above this value.")
    ] = 0.0,
    batch: Annotated[
        int | None,
        typer.Option(help="Images at once; else 64, or fewer large ones on a CPU.", min=1),
    ] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("neurons.safetensors"),
    resume: Annotated[bool, typer.Option(help="Continue a run that was interrupted.")] = False,
    device: Device = "cpu",
    devices: Annotated[
        int | None, typer.Option(help="Processes on each machine; else 1, or torchrun's.", min=1)
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(help="Machines that share the work; else 1, or torchrun's.", min=1)
    ] = None,
) -> None:
    """Record what every unit responds to over a data set; then look at it with `show`."""
    if context.invoked_subcommand is not None:
        return
    from torchbcos.checkpoint import default_name
    from torchbcos.neurons import collect

    if not data:
        raise ValueError("`--data` is needed: name the images, as in --data shapes.")
    check_file(out)
    fabric = _fabric(device, devices, nodes)
    where = device if fabric is None else str(fabric.device)
    name = model or default_name()
    network, opened, images = _open(name, data, split, where)
    try:
        found = collect(
            network,
            images,
            out,
            layers=[part.strip() for part in layers.split(",") if part.strip()] or None,
            top=top,
            batch=batch,
            active_above=active_above,
            classes=opened.classes,
            fabric=fabric,
            resume=resume,
            about={"model": _place(name, is_model=True), "data": _place(data), "split": split},
            progress=errors,
        )
    except KeyboardInterrupt as error:
        errors.print(f"torchbcos: {str(error) or 'interrupted.'}", soft_wrap=True)
        raise typer.Exit(130) from error
    if fabric is None or fabric.is_global_zero:
        output.print(str(found), soft_wrap=True)


@app.command(
    epilog="Example: torchbcos neurons show units.safetensors --skewed 20 --out page.html",
)
def show(
    file: Annotated[Path, typer.Argument(help="A file that torchbcos neurons wrote.")],
    layer: Annotated[str, typer.Option(help="Units of this layer; else of all.")] = "",
    unit: Annotated[str, typer.Option(help="These units: numbers, comma-separated.")] = "",
    skewed: Annotated[int, typer.Option(help="The N most class-skewed units.", min=0)] = 0,
    top: Annotated[int, typer.Option(help="The N highest units of each layer.", min=0)] = 0,
    second: Annotated[bool, typer.Option(help="Second-highest places, too.")] = False,
    crop: Annotated[int, typer.Option(help="Pixels of a picture; 0: what a unit sees.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("neurons.html"),
    model: Annotated[str, typer.Option(help="Where the model is now, if it moved.")] = "",
    data: Annotated[str, typer.Option(help="Where the images are now, if they moved.")] = "",
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """A page with the best images of units, what each saw in them, and their classes."""
    from torchbcos.checkpoint import write_atomically
    from torchbcos.neurons import Neurons, build_page, sheets

    check_file(out)
    found = Neurons(file)
    chosen = _chosen(found, layer, unit, skewed, top)
    about = {"model": model, "data": data}
    name, path = (about[key] or found.about.get(key, "") for key in ("model", "data"))
    if not name or not path:
        raise ValueError(f"{file} does not say where model and images are: add --model and --data.")
    network, _, images = _open(name, path, found.about.get("split", "test"), device)
    drawn = track(
        sheets(network, images, found, chosen, second=second, size=crop or None),
        "explaining",
        total=len(chosen),
        console=errors,
        disable=not errors.is_terminal,
        transient=True,
    )
    page = build_page(f"{len(chosen)} unit{'s'[: len(chosen) != 1]}", found, images, drawn)
    write_atomically(out, page.encode("utf-8", "backslashreplace"))
    rows = [_row(found, each.layer, each.unit) for each in chosen]
    if as_json:
        sys.stdout.write(json.dumps({"page": str(out), "units": rows}, indent=1) + "\n")
        return
    table = Table("layer", "unit", "highest", "mean", "bits", "q", "best images")
    for row in rows:
        numbers = (f"{row[key]:.4g}" for key in ("highest", "mean", "bits", "q"))
        share = f"{row['images_of_it']} {row['most_common_class']}"
        table.add_row(as_text(row["layer"]), str(row["unit"]), *numbers, as_text(share))
    output.print(table)
    output.print(f"Open {out}", soft_wrap=True)


def _place(name: str, *, is_model: bool = False) -> str:
    """A path that is true from any folder, if it is one: the page may be made in another.

    A model is a file; a folder of its name, as of the data it knows, is another thing.
    """
    path = Path(name)
    return str(path.resolve()) if (path.is_file() if is_model else path.exists()) else name


def _open(name: str, data: str, split: str, device: str) -> tuple[BcosModel, Split, ImageSet]:
    from torchbcos.checkpoint import load
    from torchbcos.evaluate import open_as_trained

    if split not in ("test", "train"):
        raise ValueError(f"`--split` (={split!r}) must be 'test' or 'train'.")
    network = load(name, device=device)
    opened = open_as_trained(network, data, only=split, console=errors)
    images = opened.test if split == "test" else opened.train
    return network, opened, images.to(device)


def _fabric(device: str, devices: int | None, nodes: int | None) -> Any:
    """A launched Fabric, or None where one process does it all."""
    from torchbcos.processes import make_fabric

    if (devices or 1) * (nodes or 1) == 1 and "LOCAL_WORLD_SIZE" not in os.environ:
        return None
    fabric = make_fabric(devices=devices, nodes=nodes, accelerator=device.split(":")[0])
    fabric.launch()
    return fabric


def _chosen(found: Neurons, layer: str, unit: str, skewed: int, top: int) -> list[Ranked]:
    from torchbcos.neurons import Ranked

    if sum(map(bool, (unit, skewed, top))) != 1:
        raise ValueError("choose units by one of --unit (with --layer), --skewed and --top.")
    if layer:
        found.units(layer)  # a sentence if there is no such layer
    names = [layer] if layer else list(found.layers)
    if skewed:
        chosen = found.most_skewed(skewed, names)
        if not chosen and found.top >= found.count:
            raise ValueError(
                f"{found.path} keeps all {found.count} images for each unit, so that none can be "
                "skewed: collect again, with a --top well below that."
            )
        if not chosen:
            raise ValueError(
                f"no unit of {found.path} is class-skewed beyond chance: show the highest ones, "
                "with --top N."
            )
        return chosen
    if top:
        return [each for name in names for each in found.most_active(name, top)]
    if not layer:
        raise ValueError(f"`--unit` (={unit!r}) needs --layer: the layer it is in.")
    try:
        numbers = [int(part) for part in unit.split(",")]
    except ValueError:
        raise ValueError(f"`--unit` (={unit!r}) must be numbers, as in 3,17.") from None
    return [Ranked(layer, number, 0.0) for number in numbers]


def _row(found: Neurons, layer: str, unit: int) -> dict[str, Any]:
    units, skew = found.units(layer), found.skew[layer]
    counts = found.histogram(layer)[unit]
    most = int(counts.argmax())
    return {
        "layer": layer,
        "unit": unit,
        "highest": units.values[unit, 0].item(),
        "mean": units.mean[unit].item(),
        "active": units.active[unit].item(),
        "bits": skew.divergence[unit].item(),
        "p": skew.p[unit].item(),
        "q": skew.q[unit].item(),
        "most_common_class": found.classes[most],
        "images_of_it": int(counts[most]),
    }
