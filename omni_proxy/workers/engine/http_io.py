"""Reading bodies and writing JSON answers; what both the generating and the other routes need."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from omni_proxy.workers.engine.openai_api import ApiError

MAX_BODY_BYTES: Final = 64 << 20
_MAX_DISCARD_BYTES: Final = 256 << 20
"""A body over the limit is read on and thrown away up to this size, so that the client gets to read the answer."""


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    data = msgspec.json.encode(body)
    return Response(data, status, headers=headers, media_type="application/json")


async def read_body(request: Request) -> bytes:
    """The whole body; raises ApiError 413 over the limit and ClientDisconnect if the client leaves first."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= MAX_BODY_BYTES:
            parts.append(part)
        else:
            parts.clear()
        if size > _MAX_DISCARD_BYTES:
            break
    if size > MAX_BODY_BYTES:
        limit = MAX_BODY_BYTES >> 20
        raise ApiError(413, f"the body is larger than the limit of {limit} MiB")
    return b"".join(parts)
