"""The command that starts the explorer: `serve`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from torchbcos._arguments import missing_package
from torchbcos.cli_common import Device, ModelName, errors, output

OFFERED = 100  # images on the page


def serve(
    images: Annotated[
        list[str] | None, typer.Argument(help="Images to offer: files, folders or globs.")
    ] = None,
    model: ModelName = "",
    host: Annotated[
        str,
        typer.Option(help="Where to listen; 0.0.0.0 admits other machines, without a password."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any free one.", min=0, max=65535)] = 8000,
    browse: Annotated[bool, typer.Option(help="Open the page in a browser.")] = False,
    device: Device = "cpu",
) -> None:
    """Explore a model on a page: classes, contributions, differences and inner units of images."""
    from torchbcos.checkpoint import default_name, load
    from torchbcos.images import check_image, find_images

    for package in ("fastapi", "uvicorn", "python_multipart"):
        if find_spec(package) is None:
            raise ValueError(missing_package("the page", package.replace("_", "-"), "web"))
    from torchbcos.web.explorer import Explorer
    from torchbcos.web.server import serve as answer

    found = find_images(images or [])
    if len(found) > OFFERED:
        errors.print(
            f"Only the first {OFFERED} of {len(found)} images are offered; drop others on the page."
        )
    samples = tuple(found[:OFFERED])
    for path in samples:
        check_image(path)
    name = model or default_name()
    explorer = Explorer(load(name, device=device), Path(name).name, samples)
    answer(
        explorer,
        host,
        port,
        browse=browse,
        announce=lambda address: output.print(f"Open {address} (Ctrl+C ends it).", soft_wrap=True),
    )
