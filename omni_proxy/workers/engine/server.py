"""The worker's HTTP API: routes, body limits, streams, disconnects. The wire shape is the one of real vLLM.

A generating route reads the body, has `CallBuilder` turn it into engine requests, and hands them to a `Relay`. A
connection that closes ends the engine's work, whatever the call is waiting for.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from omni_proxy import __version__
from omni_proxy.workers.engine.calls import Call, CallBuilder
from omni_proxy.workers.engine.generation import ClientGone, EngineApi, Generation, Inbox
from omni_proxy.workers.engine.http_io import json_response, read_body
from omni_proxy.workers.engine.openai_api import (
    ApiError,
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ReleaseRequest,
    TokenizeRequest,
    bad_value,
    parse_body,
)
from omni_proxy.workers.engine.relay import Reader, Relay
from omni_proxy.workers.engine.server_metrics import CONTENT_TYPE, ServerMetrics

_log = logging.getLogger(__name__)


class WorkerServer:
    """Everything that the routes share. Lives on one event loop."""

    def __init__(self, engine: EngineApi, builder: CallBuilder, metrics: ServerMetrics) -> None:
        self.engine: Final = engine
        self.builder: Final = builder
        self.metrics: Final = metrics
        self._inbox = Inbox(asyncio.get_running_loop())
        self._running: set[Generation] = set()
        self._draining = False

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/v1/chat/completions", _Completions(self, self._chat), methods=["POST"]),
            Route("/v1/completions", _Completions(self, self._completion), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/version", self._version),
            Route("/kv_event_sources", self._kv_event_sources),
            Route("/load", self._load),
            Route("/metrics", self._metrics),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/reset_prefix_cache", self._reset_prefix_cache, methods=["POST"]),
            Route("/sleep", self._sleep, methods=["POST"]),
            Route("/wake_up", self._wake_up, methods=["POST"]),
            Route("/is_sleeping", self._is_sleeping),
            Route("/omni/experts", self._experts),
            Route("/omni/release", self._release, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {
            ApiError: _on_api_error,
            HTTPException: _on_http_error,
            Exception: _on_surprise,
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    def drain(self) -> None:
        """Take no new work; what runs goes on."""
        self._draining = True

    def stop_all(self) -> None:
        """End what still runs with an error that its client can read."""
        for generation in self._running:
            generation.stop("the worker is shutting down")

    def check_ready(self) -> None:
        """Raise a 503 where new work cannot be taken."""
        if self._draining:
            raise ApiError(503, "the worker is shutting down")
        if not self.engine.alive:
            raise ApiError(503, "the engine has stopped")

    @asynccontextmanager
    async def generation(self, receive: Receive) -> AsyncIterator[Generation]:
        """A call's run that ends with its connection at the latest."""
        generation = Generation(self.engine, self._inbox)
        self._running.add(generation)
        watcher = asyncio.create_task(_watch_disconnect(receive, generation.client_gone))
        try:
            yield generation
        finally:
            watcher.cancel()
            self._running.discard(generation)
            generation.close()

    async def _chat(self, data: bytes, request_id: str | None) -> Call:
        body = parse_body(data, ChatRequest)
        own_id = request_id or body.request_id or uuid.uuid4().hex
        return await self.builder.chat(body, own_id, int(time.time()))

    async def _completion(self, data: bytes, request_id: str | None) -> Call:
        body = parse_body(data, CompletionRequest)
        own_id = request_id or body.request_id or uuid.uuid4().hex
        return await self.builder.completion(body, own_id, int(time.time()))

    async def _models(self, request: Request) -> Response:
        card = self.builder.card
        entries = [card.entry(name) for name in card.names]
        return json_response({"object": "list", "data": entries})

    async def _health(self, request: Request) -> Response:
        self.check_ready()
        return Response()

    async def _version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def _kv_event_sources(self, request: Request) -> Response:
        return json_response(self.engine.kv_event_sources())

    async def _load(self, request: Request) -> Response:
        return json_response({"server_load": len(self._running)})

    async def _metrics(self, request: Request) -> Response:
        return Response(self.metrics.exposition(), media_type=CONTENT_TYPE)

    async def _tokenize(self, request: Request) -> Response:
        body = await self._body(request, TokenizeRequest)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: give either prompt or messages", "prompt")
        if body.prompt is None:
            tokens = await self.builder.chat_tokens(body)
        else:
            special = body.add_special_tokens is not False
            tokens = await self.builder.prompt_tokens(body.prompt, special)
        text = self.builder.tokenizer.token_text
        strings = [text(token) for token in tokens] if body.return_token_strs else None
        limit = self.builder.card.max_model_len
        answer = {"count": len(tokens), "max_model_len": limit, "tokens": tokens}
        return json_response({**answer, "token_strs": strings})

    async def _detokenize(self, request: Request) -> Response:
        body = await self._body(request, DetokenizeRequest)
        self.builder.card.check_name(body.model)
        tokens = await self.builder.prompt_tokens(tuple(body.tokens), False)
        text = self.builder.tokenizer.decode(tokens, skip_special_tokens=False)
        return json_response({"prompt": text})

    async def _reset_prefix_cache(self, request: Request) -> Response:
        done = await asyncio.to_thread(self.engine.reset_prefix_cache)  # waits for the engine's thread
        return json_response({"success": done})

    async def _sleep(self, request: Request) -> Response:
        """Level 1 as vLLM has it, but for the weights, which stay; refused while requests or leases are here."""
        level = request.query_params.get("level", "1")
        if level != "1":
            raise bad_value("level", level, "this engine can only free its KV cache (level 1)")
        if not await asyncio.to_thread(self.engine.sleep):
            raise ApiError(409, "requests are running, or KV is kept for others: the engine cannot sleep")
        return Response()

    async def _wake_up(self, request: Request) -> Response:
        if not await asyncio.to_thread(self.engine.wake_up):
            raise ApiError(503, "the engine has stopped")
        return Response()

    async def _is_sleeping(self, request: Request) -> Response:
        return json_response({"is_sleeping": self.engine.asleep})

    async def _experts(self, request: Request) -> Response:
        """What the metrics say of experts, in a form that is quickly read: a table for each large model's gateway."""
        stats = self.engine.stats()
        return json_response({"tokens": stats.expert_tokens, "imbalance": stats.expert_imbalance})

    async def _release(self, request: Request) -> Response:
        body = await self._body(request, ReleaseRequest)
        self.engine.release(body.request_id)
        return json_response({})

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        return parse_body(await read_body(request), kind)


class _Completions:
    """One generating endpoint, as an ASGI application."""

    def __init__(self, server: WorkerServer, read: Reader) -> None:
        self._server = server
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            data = await read_body(request)
        except ClientDisconnect:
            return
        relay = Relay(self._server.metrics, scope, send, request.headers.get("x-request-id"))
        async with self._server.generation(receive) as generation:
            try:
                self._server.check_ready()
                await relay.serve(generation, self._read, data)
            except ApiError as exc:
                await relay.reply(exc.body(), exc.status)
            except ClientGone:
                relay.count_aborted()


async def _watch_disconnect(receive: Receive, gone: Callable[[], None]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    gone()


async def _on_api_error(request: Request, exc: ApiError) -> Response:
    return json_response(exc.body(), exc.status)


async def _on_http_error(request: Request, exc: HTTPException) -> Response:
    error = ApiError(exc.status_code, f"{request.method} {request.url.path}: {exc.detail}")
    return json_response(error.body(), error.status, dict(exc.headers or {}))


async def _on_surprise(request: Request, exc: Exception) -> Response:
    """Our fault: the client learns that it happened, the log learns what (Starlette raises it on)."""
    _log.error("%s %s failed", request.method, request.url.path)
    return json_response(ApiError(500, "internal error of the worker").body(), 500)
