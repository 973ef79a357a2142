"""The command `torchbcos`: wiring only."""

from __future__ import annotations

import json
import re
import sys
import warnings
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.table import Table

from torchbcos import cli_bench, cli_localise, cli_reproduce, cli_serve
from torchbcos._version import __version__
from torchbcos.cli_common import (
    AsJson,
    Device,
    ModelName,
    as_text,
    check_folder,
    complain,
    errors,
    output,
)
from torchbcos.cli_neurons import app as neurons_app

app = typer.Typer(
    help="Vision networks that explain themselves.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.add_typer(neurons_app, name="neurons")
HERE = Path(__file__).parent  # whose warnings are words for users, too


def main() -> None:
    """The entry point: a user's mistake is one sentence and exit code 2, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # where it knows no γ or ⁺
            stream.reconfigure(errors="backslashreplace")
    as_usual = warnings.showwarning
    warnings.showwarning = lambda words, kind, file, *rest: (
        complain(str(words))
        if Path(file).is_relative_to(HERE)
        else as_usual(words, kind, file, *rest)
    )
    try:
        app()
    except (ValueError, TypeError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}." if error.filename else str(error))
    except (MemoryError, RuntimeError) as error:
        size = re.search(r"(?i)allocate ([\d.]+ ?\w+)", str(error))  # torch says it so
        if size is None:
            raise
        fail(f"there is no memory for {size[1]} more: use smaller images or batches.")


def fail(sentence: str) -> NoReturn:
    complain(sentence)
    sys.exit(2)


def _tell_version(asked: bool) -> None:
    if asked:
        output.print(f"torchbcos {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_tell_version, is_eager=True),
    ] = False,
) -> None:
    """Vision networks that explain themselves."""


@app.command(
    epilog="Example: torchbcos explain photos/*.jpg --top 3 --out explained",
)
def explain(
    images: Annotated[list[str], typer.Argument(help="Image files, folders or globs.")],
    model: ModelName = "",
    classes: Annotated[
        str, typer.Option(help="Explain these: names or numbers, comma-separated.")
    ] = "",
    top: Annotated[
        int | None,
        typer.Option(help="Explain the K most likely classes.", min=1, show_default="1"),
    ] = None,
    layer: Annotated[str, typer.Option(help="Explain a unit of this layer instead.")] = "",
    unit: Annotated[str, typer.Option(help="The unit: a channel, or channel,y,x.")] = "",
    delta: Annotated[
        bool, typer.Option(help="Also show where the first class is ahead of the second.")
    ] = False,
    style: Annotated[
        str, typer.Option(help="Pictures as in the 'paper', or smoothed as its code 'released'.")
    ] = "paper",
    size: Annotated[int, typer.Option(help="Pixels; 0 for the model's own size.", min=0)] = 0,
    out: Annotated[Path, typer.Option(help="Folder for pictures and page.")] = Path("out"),
    as_json: AsJson = False,
    device: Device = "cpu",
) -> None:
    """Explain images: a table of classes, pictures, and a page that shows them side by side."""
    from torchbcos.album import Request, make_album
    from torchbcos.checkpoint import default_name, load

    names = tuple(c.strip() for c in classes.split(",") if c.strip())
    if classes and not names:
        fail(f"`--classes` (={classes!r}) names none: write them as in cat,dog.")
    request = Request(
        classes=names,
        top=top,
        layer=layer or None,
        unit=_unit(unit),
        delta=delta,
        style=style,
        size=size or None,
    )
    check_folder(out)
    network = load(model or default_name(), device=device)
    run = make_album(images, network, request, out, errors)
    if as_json:
        sys.stdout.write(json.dumps(run.as_json(), indent=1) + "\n")
    else:
        for result in run.results:
            table = Table(title=as_text(str(result.file)), title_justify="left")
            for column in ("explained", "probability", "output", "residual"):
                table.add_column(column, justify="left" if column == "explained" else "right")
            for row in result.rows:
                table.add_row(*map(as_text, row.cells()))
            output.print(table)
        if run.page is not None:
            output.print(f"Open {run.page}", soft_wrap=True)
    for sentence in run.refused:
        complain(sentence)
    if run.refused:
        raise typer.Exit(2)


def _unit(text: str) -> int | tuple[int, int, int] | None:
    if not text:
        return None
    try:
        parts = [int(p) for p in text.split(",")]
        if len(parts) == 1:
            return parts[0]
        channel, y, x = parts
        return channel, y, x
    except ValueError:
        raise ValueError(
            f"`--unit` (={text!r}) must be a channel, as in 17, or channel,y,x, as in 17,3,4."
        ) from None


@app.command(
    epilog="Example: torchbcos convert mobilenet_v3_small --max-out 1",
)
def convert(
    arch: Annotated[
        str, typer.Argument(help="A name: cifar9, a torchvision network, or timm/NAME.")
    ],
    b: Annotated[float, typer.Option("--b", help="The exponent B.")] = 2.0,
    max_out: Annotated[int, typer.Option(help="MaxOut units.")] = 2,
    norm: Annotated[str, typer.Option(help="'none' to remove norms, or 'uncentred'.")] = "none",
    head: Annotated[
        str, typer.Option(help="Classify before pooling ('conv') or after ('pool').")
    ] = "conv",
    num_classes: Annotated[
        int | None, typer.Option(help="How many classes; else the architecture's.", min=1)
    ] = None,
    allow: Annotated[
        bool, typer.Option(help="Keep operations that break W(x)·x + bias = output.")
    ] = False,
    each: Annotated[bool, typer.Option(help="List every operation, not only how many.")] = False,
    as_json: AsJson = False,
) -> None:
    """Convert an architecture and print what became of each of its operations."""
    from torchbcos.models import create_model

    if norm not in ("none", "uncentred"):
        fail(f"`--norm` (={norm!r}) must be 'none' or 'uncentred'.")
    model = create_model(
        arch,
        num_classes=num_classes,
        b=b,
        max_out=max_out,
        norm=None if norm == "none" else norm,
        head=head,
        strict=not allow,
    )
    report = model.report
    if report is None:
        fail(f"`arch` (={arch!r}) is not converted, so there is nothing to report: name another.")
    parameters = sum(p.numel() for p in model.parameters())
    if as_json:
        document = {
            "architecture": report.architecture,
            "parameters": parameters,
            "dynamic_linear": report.dynamic_linear,
            "breaks": list(report.breaks),
            "note": report.note,
            "changes": [vars(change) for change in report.changes],
        }
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
        return
    if each:
        table = Table("place", "operation", "became")
        for change in report.changes:
            table.add_row(*map(as_text, (change.place, change.operation, change.became)))
        output.print(table)
    output.print(str(report))
    output.print(f"{parameters / 1e6:.1f} million parameters.")


@app.command(
    epilog="Example: torchbcos train shapes --out runs/shapes epochs=4 lr=2e-3",
)
def train(
    recipe: Annotated[
        str, typer.Argument(help="A recipe's name (--list shows them) or a TOML file.")
    ] = "",
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            help="Settings to change, as in lr=3e-4 options.b=1.5.", metavar="KEY=VALUE"
        ),
    ] = None,
    data: Annotated[
        str,
        typer.Option(help="Class folders, a CIFAR-10 folder, or 'shapes'; else the recipe's."),
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder for the model and its metrics.")] = Path("run"),
    resume: Annotated[
        bool, typer.Option(help="Continue the training in --out, or begin it.")
    ] = False,
    start_from: Annotated[
        str, typer.Option("--from", help="Fine-tune this model; head_only=true for its head alone.")
    ] = "",
    pictures: Annotated[
        int, typer.Option(help="Draw explanations every K epochs, once tested.", min=0)
    ] = 0,
    workers: Annotated[
        int | None, typer.Option(help="Processes that read streamed images.", min=0)
    ] = None,
    devices: Annotated[int | None, typer.Option(help="Devices on this machine.", min=1)] = None,
    nodes: Annotated[int | None, typer.Option(help="Machines.", min=1)] = None,
    strategy: Annotated[str, typer.Option(help="For several devices: ddp or fsdp.")] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the last metrics as JSON.")
    ] = False,
    show_list: Annotated[bool, typer.Option("--list", help="Show all recipes.")] = False,
) -> None:
    """Train a network by a recipe, from the paper's or your own."""
    from torchbcos.processes import make_fabric
    from torchbcos.recipe import list_recipes, read_recipe
    from torchbcos.train import TrainError
    from torchbcos.train import train as run_training

    if show_list:
        for name, words in list_recipes().items():
            output.print(f"{name:<40}{words}", soft_wrap=True)
        return
    if not recipe:
        fail("a recipe is missing: torchbcos train --list shows all, or name a TOML file.")
    more = [f"start_from={json.dumps(start_from, ensure_ascii=False)}"] if start_from else []
    config = read_recipe(recipe, data, [*(changes or []), *more])
    check_folder(out)
    fabric = make_fabric(config.precision, devices, nodes, strategy)
    try:
        model = run_training(
            config,
            out,
            fabric=fabric,
            console=errors,
            resume=resume,
            pictures=pictures,
            workers=workers,
        )
    except TrainError as error:
        fail(str(error))
    except KeyboardInterrupt as error:
        errors.print(f"torchbcos: {str(error) or 'interrupted.'}", soft_wrap=True)
        raise typer.Exit(130) from error
    if not fabric.is_global_zero:
        return
    metrics = model.provenance["metrics"]
    if as_json:
        sys.stdout.write(json.dumps(metrics) + "\n")
    else:
        accuracy = metrics["test_accuracy"]
        output.print(f"{out}/model.safetensors: {accuracy:.2%}", soft_wrap=True)


@app.command(
    epilog="Example: torchbcos evaluate --model cifar10 --data data/cifar10",
)
def evaluate(
    data: Annotated[str, typer.Option(help="'shapes', a CIFAR-10 folder, or class folders.")],
    model: ModelName = "",
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """The accuracy of a model on the test images of a data set."""
    from torchbcos.checkpoint import default_name, load
    from torchbcos.evaluate import evaluate_classes as measure
    from torchbcos.evaluate import open_as_trained

    network = load(model or default_name(), device=device)
    split = open_as_trained(network, data, console=errors)
    if network.classes is not None and network.classes != split.classes:
        fail(f"the model's classes ({', '.join(network.classes[:4])}, …) are not those of {data}.")
    if network.num_classes not in (None, len(split.classes)):
        fail(
            f"{data} has {len(split.classes)} classes, and the model has {network.num_classes} "
            "outputs: name images of the classes that it learned."
        )
    found = measure(network, split.test, split.classes, console=errors)
    if as_json:
        sys.stdout.write(json.dumps(found.as_json()) + "\n")
    else:
        output.print(str(found), soft_wrap=True)


app.command(
    epilog="Example: torchbcos localise --model cifar10 --data data/cifar10 --methods ours,ixg",
)(cli_localise.localise)
app.command(epilog="Example: torchbcos toy --out toy --b 1,2,4,10")(cli_localise.toy)
app.command(
    epilog="Example: torchbcos reproduce cifar10 --data data/cifar10 --out out/cifar10 --jobs 8",
)(cli_reproduce.reproduce)


@app.command(epilog="Example: torchbcos export --model imagenette --out imagenette.onnx")
def export(
    model: ModelName = "",
    out: Annotated[Path, typer.Option(help="The ONNX file.")] = Path("model.onnx"),
    size: Annotated[
        int, typer.Option(help="Pixels of its images; 0 for the model's own size.", min=0)
    ] = 0,
    explanation: Annotated[
        bool, typer.Option(help="Also W(x), contributions and picture of a class.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Write a model as ONNX, which explains images without torch; checked with onnxruntime."""
    from torchbcos.checkpoint import default_name, load
    from torchbcos.export import ExportError
    from torchbcos.export import export as write

    network = load(model or default_name())
    try:
        with errors.status("writing ONNX; large networks take minutes"):
            done = write(network, out, size=size or None, explanation=explanation)
    except ExportError as error:
        complain(str(error))
        sys.exit(1)
    if as_json:
        sys.stdout.write(json.dumps(done.as_json(), indent=1) + "\n")
        return
    table = Table("", "name", "shape")
    for kind, shapes in (("takes", done.inputs), ("gives", done.outputs)):
        for name, shape in shapes.items():
            table.add_row(kind, name, " × ".join(map(str, shape)))
    output.print(table)
    output.print(
        f"Wrote {done.path}: {done.bytes / 2**20:.1f} MiB, opset {done.opset}; onnxruntime differs "
        f"by {done.difference:.0e}.",
        soft_wrap=True,
    )


app.command(epilog="Example: torchbcos serve examples/photos/church.jpg --browse")(cli_serve.serve)


app.command(epilog="Example: torchbcos bench --device cuda --only training,captured")(
    cli_bench.bench
)
