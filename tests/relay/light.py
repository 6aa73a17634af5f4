"""A worker that costs next to nothing, for load: fixed answers, one clock for all its streams. On real sockets."""

from __future__ import annotations

import asyncio
import json
from typing import cast

from tests.relay.scripted import DONE, event, prefill_answer, usage_event


def _answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_HEALTH = _answer(b"{}")
_MODELS = _answer(json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode())
_PREFILL = _answer(prefill_answer())
_OPEN = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_TOKEN = _chunk(event("token "))
_END = _chunk(DONE) + b"0\r\n\r\n"
WHOLE = b'{"choices":[{"index":0,"message":{"role":"assistant","content":"all"}}],"usage":{"completion_tokens":1}}'


class LightWorker:
    """Streams as many tokens as `max_tokens` says, one each tick; unstreamed it answers at the next tick."""

    def __init__(self, decodes: bool, tick_s: float) -> None:
        self.port = 0
        self.streams: dict[_Connection, int] = {}
        """Tokens left by connection; an object is one token."""
        self.connections: set[_Connection] = set()
        self.decodes = decodes
        self.served = 0
        self._tick_s = tick_s
        self._server: asyncio.Server | None = None
        self._clock: asyncio.Task[None] | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", self.port, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]
        self._clock = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """As if the process was killed."""
        if self._server is None or self._clock is None:
            return
        self._server.close()
        self._server = None
        self._clock.cancel()
        for connection in list(self.connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            for connection, left in list(self.streams.items()):
                connection.token(left)


class _Connection(asyncio.Protocol):
    def __init__(self, worker: LightWorker) -> None:
        self._worker = worker
        self._data = b""
        self._usage = False
        self._stream = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._worker.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.connections.discard(self)
        self._worker.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, end, body = self._data.partition(b"\r\n\r\n")
        if not end:
            return
        if head.startswith(b"GET"):
            self._data = b""
            self.transport.write(_MODELS if b"/v1/models" in head else _HEALTH)
            return
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        if len(body) >= length:
            self._data = b""
            self._asked(json.loads(body))

    def _asked(self, body: dict[str, object]) -> None:
        self._worker.served += 1
        if not self._worker.decodes:
            self.transport.write(_PREFILL)
            return
        self._stream = body.get("stream") is True
        self._usage = "stream_options" in body
        if self._stream:
            self.transport.write(_OPEN)
        self._worker.streams[self] = cast("int", body.get("max_tokens", 1)) if self._stream else 1

    def token(self, left: int) -> None:
        if not self._stream:
            del self._worker.streams[self]
            self.transport.write(_answer(WHOLE))
        elif left:
            self._worker.streams[self] = left - 1
            self.transport.write(_TOKEN)
        else:
            del self._worker.streams[self]
            self.transport.write((_chunk(usage_event()) if self._usage else b"") + _END)
