"""The explorer's web application: routes, and nothing that computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import FastAPI, File, Request, Response, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.base import RequestResponseEndpoint

from torchbcos.images import ImageError
from torchbcos.web.explorer import Explorer, NotThereError

__all__ = ["create_app"]

HERE = ("localhost", "127.0.0.1", "::1")
LIMIT = 32 * 2**20  # bytes of an image file


def create_app(explorer: Explorer, hosts: tuple[str, ...] = HERE) -> FastAPI:
    """`hosts` are the names by which browsers may call it; "*" stands for all."""
    app = FastAPI(title="torchbcos explorer", docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def answer_friends(request: Request, answer: RequestResponseEndpoint) -> Response:
        if "*" in hosts or _name(request) in hosts:
            return await answer(request)
        return JSONResponse({"error": "The page is not served under this name."}, 400)

    static = Path(str(resources.files("torchbcos.web") / "static"))
    app.mount("/static", StaticFiles(directory=static), name="static")
    for error, code in ((NotThereError, 404), (ImageError, 422)):
        app.add_exception_handler(error, _tells(code))
    app.add_exception_handler(HTTPException, _tells_own)
    app.add_exception_handler(RequestValidationError, _tells_argument)

    @app.get("/")
    def page() -> FileResponse:
        return FileResponse(static / "index.html")

    @app.get("/api/model")
    def model() -> dict[str, Any]:
        return explorer.about()

    @app.post("/api/images")
    def add(file: Annotated[UploadFile, File()]) -> dict[str, Any]:
        content = file.file.read(LIMIT + 1)
        name = file.filename or "this file"
        if len(content) > LIMIT:
            raise ImageError(f"{name} is too large: reduce it to less than {LIMIT >> 20} MiB.")
        return explorer.add(content, name)

    @app.post("/api/samples/{index}")
    def add_sample(index: int) -> dict[str, Any]:
        return explorer.add_sample(index)

    @app.get("/api/samples/{index}.png")
    def thumbnail(index: int) -> Response:
        return _png(explorer.thumbnail(index))

    @app.get("/api/images/{key}.png")
    def image(key: str) -> Response:
        return _png(explorer.picture_of_image(key))

    @app.get("/api/images/{key}/classes/{index}")
    def explained(key: str, index: int) -> dict[str, Any]:
        return explorer.explained(key, index)

    @app.get("/api/images/{key}/classes/{index}/colour.png")
    def colour(key: str, index: int, style: str = "paper") -> Response:
        return _png(explorer.colour(key, index, style))

    @app.get("/api/images/{key}/classes/{index}/map.png")
    def contribution_map(key: str, index: int) -> Response:
        return _png(explorer.map(key, index))

    @app.get("/api/images/{key}/classes/{index}/contributions")
    def contributions(key: str, index: int) -> Response:
        return Response(explorer.contributions(key, index), media_type="application/octet-stream")

    @app.get("/api/images/{key}/delta/{first}/{second}.png")
    def delta(key: str, first: int, second: int) -> Response:
        return _png(explorer.delta(key, first, second))

    @app.get("/api/images/{key}/layers/{layer}")
    def units(key: str, layer: str, x: float, y: float) -> dict[str, Any]:
        return explorer.units(key, layer, x, y)

    @app.get("/api/images/{key}/layers/{layer}/{unit}/{row}/{column}.png")
    def unit_picture(key: str, layer: str, unit: int, row: int, column: int) -> Response:
        return _png(explorer.unit_picture(key, layer, unit, row, column))

    return app


def _name(request: Request) -> str | None:
    """That by which the browser calls this machine."""
    with suppress(ValueError):
        return urlsplit("//" + request.headers.get("host", "")).hostname
    return None


def _png(content: bytes) -> Response:
    # Not to be kept: at the same address another model may answer later.
    return Response(content, media_type="image/png", headers={"Cache-Control": "no-store"})


def _tells(code: int) -> Callable[[Request, Exception], JSONResponse]:
    return lambda _, error: JSONResponse({"error": str(error)}, code)


def _tells_own(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": f"{error.detail}."}, error.status_code)


def _tells_argument(_: Request, error: Exception) -> JSONResponse:
    """For arguments that are no numbers, or are left out."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return JSONResponse({"error": f"`{first['loc'][-1]}`: {first['msg']}."}, 422)
