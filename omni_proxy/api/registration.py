"""The port at which workers register themselves; an app apart from operators' and clients'."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from omni_proxy.api.admin import add_error_handlers, failure, reply
from omni_proxy.errors import ErrorCode
from omni_proxy.workers.discovery.registered import NotRegistered, RegisteredSource

_MOST_BYTES = 64 << 10


def create_registration_app(source: RegisteredSource) -> FastAPI:
    """The app without its guard."""
    app = FastAPI(title="Omni Proxy registration", docs_url=None, redoc_url=None, openapi_url=None)

    @app.post("/omni/register", summary="A worker, with fields as in the config: it is there, or still there")
    async def register(request: Request) -> Response:
        raw = await request.body()
        if len(raw) > _MOST_BYTES:
            return failure(ErrorCode.BODY_TOO_LARGE, f"The body has {len(raw)} bytes; {_MOST_BYTES} are allowed.")
        try:
            said: Any = msgspec.json.decode(raw)
        except msgspec.DecodeError as exc:
            return failure(ErrorCode.INVALID_JSON, f"The body is not JSON: {exc}.")
        if not isinstance(said, dict):
            return failure(ErrorCode.INVALID_VALUE, "The body must be a JSON object.")
        try:
            changed = source.heard(said)
        except NotRegistered as exc:
            return failure(ErrorCode.INVALID_VALUE, f"Not registered: {exc}.")
        return reply({"worker": said["name"], "changed": changed, "again_in_s": source.expire_s / 3})

    @app.delete("/omni/register/{name}", summary="It goes: no new work, what runs ends")
    async def leave(name: str) -> Response:
        return reply({"worker": name, "changed": source.gone(name)})

    add_error_handlers(app)
    return app
