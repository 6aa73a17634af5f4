"""The ASGI app of a front process: passes what is not hot on to the scheduler's app over its socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import httpx
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from omni_proxy.api.http_out import error_json
from omni_proxy.errors import ErrorCode, http_status

_KEPT: Final = (
    "content-type",
    "retry-after",
    "cache-control",
    "content-security-policy",
    "cross-origin-opener-policy",
    "cross-origin-resource-policy",
    "referrer-policy",
    "x-accel-buffering",
    "x-content-type-options",
    "x-frame-options",
)


class PassOn:
    """`/health` is answered here, so that a front is alive also while its scheduler starts."""

    def __init__(self, socket_path: Path) -> None:
        transport = httpx.AsyncHTTPTransport(uds=str(socket_path))
        self._stop = asyncio.Event()
        self._client = httpx.AsyncClient(transport=transport, base_url="http://scheduler", timeout=10.0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        await (await self._answer(request))(scope, receive, send)

    def end_streams_on(self, stop: asyncio.Event) -> None:
        """From then on streams end, so that they hold nobody up who drains."""
        self._stop = stop

    async def close(self) -> None:
        await self._client.aclose()

    async def _answer(self, request: Request) -> Response:
        if request.url.path == "/health" and request.method == "GET":
            return Response(b'{"status":"ok"}', media_type="application/json")
        headers = {"accept": request.headers.get("accept", "*/*")}
        target = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        body = await request.body()
        try:
            asked = self._client.build_request(request.method, target, headers=headers, content=body)
            answer = await self._client.send(asked, stream=True)
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                await answer.aread()
        except (TimeoutError, httpx.HTTPError):
            code = ErrorCode.NO_WORKER
            message = "The scheduler is not there; it is being started."
            return Response(error_json(code, message), http_status(code), media_type="application/json")
        kept = {name: answer.headers[name] for name in _KEPT if name in answer.headers}
        if not answer.is_closed:
            return StreamingResponse(self._stream(answer), answer.status_code, kept)
        return Response(answer.content, answer.status_code, kept)

    async def _stream(self, answer: httpx.Response) -> AsyncIterator[bytes]:
        try:
            async for chunk in answer.aiter_raw():
                yield chunk
                if self._stop.is_set():
                    return
        except httpx.HTTPError:
            return  # the scheduler is gone; whoever listens asks again
        finally:
            await answer.aclose()
