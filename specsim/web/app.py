"""The planner page as an ASGI application: its files, and a planner behind a few addresses.

    GET  choices        models, boxes, engines, methods
    POST predict        a request of `planner`: all that the page shows
    POST around         the same request: the chart of draft lengths around it
    POST document, csv  the same request: what is downloaded
    POST file/KIND      a dropped file as it is (model, draft or hardware; its name in the header x-name)

Errors are `{"error": "one line"}`: 4xx with the text of the command line, 500 with none of what went wrong.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from specsim.errors import InputError
from specsim.files import parse_json
from specsim.web.guard import Application
from specsim.web.planner import FILE_BYTES, Missing, Planner

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

FOLDER = Path(__file__).parent
FILES = (
    "index.html",
    "app.js",
    "charts.js",
    "style.css",
    "icon.svg",
    *(f"vendor/{n}.min.js" for n in ("vega", "vega-lite", "vega-embed")),
)
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
REQUEST_BYTES = 2**17
PATIENCE_S = 20  # for a body to arrive


def assets() -> dict[str, tuple[bytes, str]]:
    """(content, media type) of each file of the page by its address: what is not in this table is not served."""
    found = {f"/{name}": ((FOLDER / name).read_bytes(), TYPES[Path(name).suffix]) for name in FILES}
    found["/"] = found.pop("/index.html")
    return found


def application(planner: Planner) -> Application:
    """The application, to be put behind a `Guard`."""
    from starlette.responses import Response
    from starlette.routing import Route, Router

    def said(body: bytes, status: int = 200) -> Response:
        return Response(body, status, {"cache-control": "no-store"}, "application/json")

    def endpoint(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            try:
                return await answer(request)
            except Missing as error:
                return said(json.dumps({"error": str(error), "missing": error.kinds}).encode(), 409)
            except TooLarge as error:
                return said(json.dumps({"error": str(error)}).encode(), 413)
            except InputError as error:
                return said(json.dumps({"error": str(error)}).encode(), 422)

        return answered

    slow = asyncio.Semaphore(1)  # maps and large files: one at a time, in a thread beside the predictions

    async def choices(request: Request) -> Response:
        return said(json.dumps(planner.choices()).encode())

    async def predict(request: Request) -> Response:
        return said(planner.answer(await _json(request)))

    async def around(request: Request) -> Response:
        body = await _json(request)
        async with slow:
            return said(await asyncio.to_thread(planner.around, body))

    async def document(request: Request) -> Response:
        return _download(planner.document(await _json(request)), "application/json", "specsim-prediction.json")

    async def table(request: Request) -> Response:
        return _download(planner.table(await _json(request)), "text/csv", "specsim-prediction.csv")

    async def file(request: Request) -> Response:
        raw = await _body(request, FILE_BYTES)
        name = unquote(request.headers.get("x-name", ""))
        async with slow:
            kept = await asyncio.to_thread(planner.add_file, request.path_params["kind"], name, raw)
        return said(json.dumps(kept).encode())

    def page(content: bytes, media: str) -> Callable[[Request], Awaitable[Response]]:
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        headers = {"cache-control": "no-cache", "etag": tag}

        async def served(request: Request) -> Response:
            if request.headers.get("if-none-match") == tag:
                return Response(None, 304, headers)
            return Response(content, 200, headers, media)

        return served

    posted = {"/predict": predict, "/around": around, "/document": document, "/csv": table, "/file/{kind}": file}
    # Looked through in this order: what every move of a slider asks comes first.
    routes = [Route(address, endpoint(answer), methods=["POST"]) for address, answer in posted.items()]
    routes.append(Route("/choices", endpoint(choices), methods=["GET"]))
    routes += [Route(address, page(*asset), methods=["GET"]) for address, asset in assets().items()]
    return Router(routes, redirect_slashes=False)


class TooLarge(InputError):
    """A body that is larger than its kind may be."""


async def _body(request: Request, limit: int) -> bytes:
    """The body of a request, of which no more than `limit` bytes are read. Raises TooLarge."""
    length = request.headers.get("content-length", "0")
    raw = bytearray()
    if not length.isdigit() or int(length[:12]) > limit:
        raise TooLarge(f"is larger than {limit >> 10} KiB", where="file")

    async def read() -> None:
        async for part in request.stream():
            raw.extend(part)
            if len(raw) > limit:
                raise TooLarge(f"is larger than {limit >> 10} KiB", where="file")

    from starlette.requests import ClientDisconnect

    try:
        await asyncio.wait_for(read(), PATIENCE_S)
    except (asyncio.TimeoutError, ClientDisconnect):
        raise InputError("did not arrive in time", where="request", mend="send it again") from None
    return bytes(raw)


async def _json(request: Request) -> Any:
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise InputError("is not application/json", where="request")
    raw = await _body(request, REQUEST_BYTES)
    try:
        return parse_json(raw.decode(), "request", "request")
    except UnicodeDecodeError:
        raise InputError("is not UTF-8 text", where="request") from None


def _download(text: str, media: str, name: str) -> Response:
    from starlette.responses import Response

    headers = {"cache-control": "no-store", "content-disposition": f'attachment; filename="{name}"'}
    return Response(text, 200, headers, media)
