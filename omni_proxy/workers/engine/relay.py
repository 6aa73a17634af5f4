"""The way of one generating call through the server: from its body to its last byte.

The status is sent only when the first output is there, so that a failure before it has its own status; a failure
after it is a stream event and the stream ends without `[DONE]`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.types import Scope, Send

from omni_proxy.workers.engine.api_error import abandoned
from omni_proxy.workers.engine.calls import Call
from omni_proxy.workers.engine.choice import Choice, Delta
from omni_proxy.workers.engine.generation import Generation
from omni_proxy.workers.engine.http_io import json_response
from omni_proxy.workers.engine.kv_params import handoff_params
from omni_proxy.workers.engine.openai_api import ApiError
from omni_proxy.workers.engine.respond import DONE, event, running_usage
from omni_proxy.workers.engine.server_metrics import ServerMetrics
from omni_proxy.workers.engine.types import FinishReason, InvalidRequest

_FAILURES: Final = frozenset({FinishReason.ERROR.value, FinishReason.ABORT.value, FinishReason.ABANDONED.value})

Reader = Callable[[bytes, str | None], Awaitable[Call]]
"""From a body and the x-request-id header to a call; raises ApiError."""


class Relay:
    """One call on its way. Serves once."""

    def __init__(self, metrics: ServerMetrics, scope: Scope, send: Send, request_id: str | None) -> None:
        self._metrics = metrics
        self._scope = scope
        self._send = send
        self._request_id = request_id
        self._arrived = asyncio.get_running_loop().time()
        self._call: Call | None = None

    async def serve(self, generation: Generation, read: Reader, data: bytes) -> None:
        """Answer the call; raises ApiError while no byte has been sent, and ClientGone at any time."""
        call = self._call = await read(data, self._request_id)
        try:
            generation.start(call.choices)
        except InvalidRequest as exc:
            field = call.prompt_field if exc.field == "prompt" else exc.field
            raise ApiError(400, f"{field}: {exc.detail}", field) from exc
        except RuntimeError as exc:
            raise ApiError(503, str(exc)) from exc
        if call.stream:
            await self._stream(call, generation)
        else:
            await self._whole(call, generation)
        generation.told()

    async def reply(self, body: Any, status: int = 200) -> None:
        """Send a whole JSON answer."""
        response = json_response(body, status, self._headers())
        await response(self._scope, _receive_nothing, self._send)

    def count_aborted(self) -> None:
        """Count the choices that the client's leaving has ended."""
        for choice in self._call.choices if self._call is not None else ():
            if choice.finish_reason is None:
                self._metrics.ended(FinishReason.ABORT.value)

    async def _whole(self, call: Call, generation: Generation) -> None:
        while not generation.ended:
            _raise_failure(await self._next(generation))
        params = _kv_params(call.choices[0])
        generation.raise_if_gone()
        await self.reply(call.format.whole(call.head, call.choices, call.per_prompt, params))

    async def _stream(self, call: Call, generation: Generation) -> None:
        news = await self._next(generation)
        _raise_failure(news)
        openings = [call.format.opening(call.head, choice) for choice in call.choices]
        data = b"".join(event(opening) for opening in openings if opening is not None)
        await self._send(self._stream_start())
        while True:
            events, failure = self._events(call, news)
            data += events
            if failure is not None:
                return await self._send_part(data + event(failure.body()), more=False)
            if generation.ended:
                return await self._send_part(data + self._stream_end(call), more=False)
            if data:
                await self._send_part(data, more=True)
            data = b""
            news = await self._next(generation)

    async def _next(self, generation: Generation) -> list[tuple[Choice, Delta]]:
        news = await generation.deltas()
        now = asyncio.get_running_loop().time()
        for choice, delta in news:
            self._metrics.observe(choice, delta, self._arrived, now)
        return news

    def _events(self, call: Call, news: list[tuple[Choice, Delta]]) -> tuple[bytes, ApiError | None]:
        """The stream events for some deltas up to the first failed one, and its error."""
        head = call.head
        shown = head.token_ids or head.logprobs is not None
        events: list[bytes] = []
        for choice, delta in news:
            failure = _failure(choice, delta)
            if failure is not None:
                return b"".join(events), failure
            if not (delta.text or delta.calls or delta.finish_reason or (shown and delta.token_ids)):
                continue
            chunk = call.format.chunk(head, choice, delta)
            if head.running_usage:
                chunk["usage"] = running_usage(choice, delta)
            if delta.finish_reason and choice.handoff is not None:
                chunk["kv_transfer_params"] = _kv_params(choice)
            events.append(event(chunk))
        return b"".join(events), None

    def _stream_end(self, call: Call) -> bytes:
        if not call.head.include_usage:
            return DONE
        return event(call.format.usage_chunk(call.head, call.choices, call.per_prompt)) + DONE

    def _stream_start(self) -> dict[str, Any]:
        headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            **self._headers(),
        }
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        return {"type": "http.response.start", "status": 200, "headers": raw}

    async def _send_part(self, data: bytes, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def _headers(self) -> dict[str, str]:
        return {} if self._request_id is None else {"x-request-id": self._request_id}


def _failure(choice: Choice, delta: Delta) -> ApiError | None:
    """The error that ended a choice, if one did: 500 for a failure, 503 where the worker gave it up."""
    if delta.finish_reason not in _FAILURES:
        return None
    message = delta.error or f"the engine ended request {choice.request.request_id}"
    return ApiError(500, message) if delta.finish_reason == FinishReason.ERROR.value else abandoned(message)


def _raise_failure(news: list[tuple[Choice, Delta]]) -> None:
    for choice, delta in news:
        failure = _failure(choice, delta)
        if failure is not None:
            raise failure


def _kv_params(choice: Choice) -> dict[str, Any] | None:
    return None if choice.handoff is None else handoff_params(choice.handoff, time.time())


async def _receive_nothing() -> dict[str, Any]:
    raise AssertionError("a plain response reads nothing")
