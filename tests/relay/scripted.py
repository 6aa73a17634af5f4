"""A worker that does what a script says, byte for byte, and remembers what it was asked. On real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Seen:
    """One request as the worker got it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the other side has closed the connection."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, status: int, body: bytes, content_type: str = "application/json", extra: str = "") -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n{extra}\r\n"
        await self.send(head.encode() + body)

    async def open_stream(self, extra: str = "") -> None:
        await self.send(
            f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n{extra}"
            "transfer-encoding: chunked\r\n\r\n".encode()
        )

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def end_stream(self) -> None:
        await self.send(b"0\r\n\r\n")

    def reset(self) -> None:
        """Close with RST, as a killed process does."""
        self.writer.transport.abort()


Script = Callable[[Seen], Awaitable[None]]


class ScriptedWorker:
    """Listens on a port of its own; GETs are answered as a healthy vLLM would, POSTs go to the script."""

    def __init__(self, script: Script, models: tuple[str, ...] = ("m",), max_model_len: int = 100_000) -> None:
        self.script = script
        self.seen: list[Seen] = []
        self.healthy = True
        self.gets: dict[str, bytes] = {}
        """What it answers to other GETs, by path."""
        self.connections = 0
        self._models = models
        self._max_model_len = max_model_len
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections from now on and break those that are open."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        seen = Seen(method, path, headers, body, writer, reader)
        if method == "GET":
            await self._probe(seen)
            return True
        self.seen.append(seen)
        watcher = asyncio.create_task(_watch(seen))
        try:
            await self.script(seen)
        except ConnectionError:
            seen.gone.set()
            raise
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
        return not writer.is_closing()

    async def _probe(self, seen: Seen) -> None:
        if seen.path == "/health":
            await seen.answer(200 if self.healthy else 503, b"")
        elif (told := self.gets.get(seen.path)) is not None:
            await seen.answer(200, told)
        elif seen.path == "/v1/models":
            data = [{"id": m, "object": "model", "max_model_len": self._max_model_len} for m in self._models]
            await seen.answer(200, json.dumps({"object": "list", "data": data}).encode())
        else:
            await seen.answer(404, b"{}")


async def _watch(seen: Seen) -> None:
    """Notice that the other side left, without eating a next request (peek at EOF only)."""
    while not seen.reader.at_eof() and seen.reader.exception() is None:
        await asyncio.sleep(0.005)
    seen.gone.set()


# ------------------------------------------------------------------------------------ usual answers


HANDOFF = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2]],
    "remote_engine_id": "P0",
    "remote_request_id": "r-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5601,
    "big": 9223372036854775807,
}


def prefill_answer(cached: int | None = 3, prompt: int = 10, params: object = HANDOFF, finish: str = "length") -> bytes:
    """P's answer with KV parameters, as vLLM writes it."""
    details = None if cached is None else {"cached_tokens": cached}
    return json.dumps(
        {
            "id": "cmpl-p",
            "object": "chat.completion",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "X"}, "finish_reason": finish}],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": 1,
                "total_tokens": prompt + 1,
                "prompt_tokens_details": details,
            },
            "kv_transfer_params": params,
        }
    ).encode()


def decode_answer(text: str = "Hello", cached: int | None = 9, **extra: object) -> bytes:
    """D's unstreamed answer."""
    details = None if cached is None else {"cached_tokens": cached}
    return json.dumps(
        {
            "id": "chatcmpl-d",
            "object": "chat.completion",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}],
            "usage": {
                "prompt_tokens": 10,
                "completion_tokens": 2,
                "total_tokens": 12,
                "prompt_tokens_details": details,
            },
            **extra,
        }
    ).encode()


def event(content: str | None = None, *, role: str | None = None, finish: str | None = None) -> bytes:
    """One chat chunk as an SSE event."""
    delta: dict[str, str] = {}
    if role is not None:
        delta["role"] = role
    if content is not None:
        delta["content"] = content
    chunk = {
        "id": "chatcmpl-d",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def usage_event(completion: int = 3, cached: int | None = 9) -> bytes:
    """The usage chunk that ends a stream with `include_usage`."""
    details = None if cached is None else {"cached_tokens": cached}
    usage = {
        "prompt_tokens": 10,
        "completion_tokens": completion,
        "total_tokens": 10 + completion,
        "prompt_tokens_details": details,
    }
    chunk = {"id": "chatcmpl-d", "object": "chat.completion.chunk", "choices": [], "usage": usage}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def prefill_ok(seen: Seen) -> None:
    """A script: P that hands over."""
    await seen.answer(200, prefill_answer())


async def decode_stream(seen: Seen) -> None:
    """A script: D that streams three tokens (or answers at once when not asked to stream)."""
    body = seen.json
    if not body.get("stream"):
        await seen.answer(200, decode_answer())
        return
    await seen.open_stream()
    await seen.chunk(event(role="assistant", content=""))
    for text in ("Hel", "lo", "!"):
        await seen.chunk(event(text))
    await seen.chunk(event("", finish="stop"))
    if (body.get("stream_options") or {}).get("include_usage"):
        await seen.chunk(usage_event())
    await seen.chunk(DONE)
    await seen.end_stream()
