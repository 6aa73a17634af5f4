"""The routes of the page. It lies in the package and loads nothing from elsewhere; data comes by server-sent events.

The page itself holds nothing that is secret, so that a browser can open it and ask for the token; everything with data
in it is behind the token of the port.
"""

from __future__ import annotations

from importlib import resources
from typing import Final, Protocol

import msgspec
from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from omni_proxy.api.http_out import error_json
from omni_proxy.errors import ErrorCode, http_status
from omni_proxy.messages import RequestRecord
from omni_proxy.observe.explain import explain
from omni_proxy.observe.timelines import timeline
from omni_proxy.ui.feed import MAX_LISTENERS, Feed

PAGE: Final = "/omni/ui"
FILES: Final = "/omni/ui/files/"
_TYPES: Final = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def is_open(path: str) -> bool:
    """Is there no data behind a path?"""
    return path == PAGE or path.startswith(FILES)


class Requests(Protocol):
    """Who knows single requests."""

    def now(self) -> float: ...
    def wall_offset(self) -> float: ...
    def find(self, request_id: str) -> RequestRecord | None: ...


def page_files() -> dict[str, tuple[bytes, str]]:
    """All that the page consists of: name -> content and media type."""
    folder = resources.files("omni_proxy.ui") / "page"
    found = {entry.name: entry for entry in folder.iterdir() if _ending(entry.name) in _TYPES}
    return {name: (entry.read_bytes(), _TYPES[_ending(name)]) for name, entry in found.items()}


def create_router(feed: Feed, requests: Requests) -> APIRouter:
    """The page, its files, its events and the details of one request."""
    router, files = APIRouter(include_in_schema=False), page_files()

    @router.get(PAGE)
    async def page() -> Response:
        return _file(*files["index.html"])

    @router.get(FILES + "{name}")
    async def file(name: str) -> Response:
        found = files.get(name)
        return _error(ErrorCode.NOT_FOUND, f"The page has no file {name!r}.") if found is None else _file(*found)

    @router.get(PAGE + "/state")
    async def state() -> Response:
        return _json(feed.state())

    @router.get(PAGE + "/events")
    async def events() -> Response:
        if feed.full:
            return _error(ErrorCode.QUEUE_FULL, f"{MAX_LISTENERS} listeners are as many as there may be.")
        headers = HEADERS | {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(feed.listen(), media_type="text/event-stream", headers=headers)

    @router.get(PAGE + "/requests/{request_id}")
    async def request(request_id: str) -> Response:
        record = requests.find(request_id)
        if record is None:
            return _error(ErrorCode.NOT_FOUND, f"No request {request_id!r} is known (any more).", "request_id")
        now = requests.now()
        told = timeline(record, now, requests.wall_offset()) | {"explain": explain(record, now)}
        return _json(msgspec.json.encode(told))

    return router


def _ending(name: str) -> str:
    return name.rpartition(".")[2]


def _file(content: bytes, media_type: str) -> Response:
    return Response(content, media_type=media_type, headers=HEADERS)


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, HEADERS | {"cache-control": "no-store"}, "application/json")


def _error(code: ErrorCode, message: str, param: str | None = None) -> Response:
    return _json(error_json(code, message, param), http_status(code))
