"""A light HTTP/1.1 server: one protocol per connection, whole bodies in, bytes out. Knows no routes.

It is for many small writes: a handler gets a `Reply` and writes prepared bytes to it. A connection carries one request
at a time; a client that sends its next one early waits until the answer before has ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, cast

import httptools

MAX_BODY_BYTES: Final = 64 << 20
_REASONS: Final = {
    200: b"OK",
    400: b"Bad Request",
    404: b"Not Found",
    405: b"Method Not Allowed",
    413: b"Content Too Large",
    500: b"Internal Server Error",
    503: b"Service Unavailable",
}
STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
STREAM_END: Final = b"0\r\n\r\n"


class Incoming:
    """One request, read whole."""

    __slots__ = ("body", "headers", "method", "path", "reply", "too_large")

    def __init__(
        self, method: str, path: str, headers: dict[bytes, bytes], body: bytes, reply: Reply, too_large: bool
    ) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.body = body
        self.reply = reply
        self.too_large = too_large
        """The body was longer than `MAX_BODY_BYTES` and is not here."""


class Reply:
    """The answer to one request. Whole with `send`, or a stream of `open`, `write` and `end`."""

    __slots__ = ("_connection", "on_gone", "open")

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection
        self.on_gone: Callable[[], None] | None = None
        """Called once when the client leaves before the end."""
        self.open = False
        """The head of a stream has been sent."""

    def send(self, status: int, body: bytes, content_type: bytes = b"application/json") -> None:
        """A whole answer."""
        head = b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
        self._write(head % (status, _REASONS.get(status, b""), content_type, len(body)) + body)
        self._done()

    def begin_stream(self) -> None:
        """The head of an event stream."""
        self.open = True
        self._write(STREAM_HEAD)

    def write(self, chunk: bytes) -> None:
        """Bytes of a stream, framed by `chunked`."""
        self._write(chunk)

    def end_stream(self, last: bytes = b"") -> None:
        """The rest of a stream, framed, and its end."""
        self._write(last + STREAM_END)
        self._done()

    def gone(self) -> None:
        """The client has left."""
        self._connection = None
        on_gone, self.on_gone = self.on_gone, None
        if on_gone is not None:
            on_gone()

    def _write(self, data: bytes) -> None:
        if self._connection is not None and self._connection.transport is not None:
            self._connection.transport.write(data)

    def _done(self) -> None:
        connection, self._connection, self.on_gone = self._connection, None, None
        if connection is not None:
            connection.answered()


def chunked(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    """Parses requests and hands them to `handle` one after another."""

    def __init__(self, handle: Callable[[Incoming], None], live: set[Connection]) -> None:
        self.transport: asyncio.Transport | None = None
        self._handle = handle
        self._live = live
        self._parser = httptools.HttpRequestParser(self)
        self._pending: deque[Incoming] = deque()
        self._current: Reply | None = None
        self._closing = False
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._size = 0

    # ------------------------------------------------------------ asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it
        self._live.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._live.discard(self)
        self._pending.clear()
        if self._current is not None:
            self._current.gone()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()

    def close(self) -> None:
        """End the connection now."""
        if self.transport is not None:
            self.transport.close()

    def close_when_answered(self) -> None:
        """End the connection after the answer that is under way."""
        self._closing = True
        if self._current is None:
            self.close()

    # ----------------------------------------------------------- httptools' callbacks

    def on_message_begin(self) -> None:
        self._url, self._headers, self._body, self._size = b"", {}, [], 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= MAX_BODY_BYTES:
            self._body.append(data)

    def on_message_complete(self) -> None:
        reply = Reply(self)
        if not self._parser.should_keep_alive():
            self._closing = True
        path = self._url.partition(b"?")[0].decode("latin-1")
        body = b"".join(self._body)
        method = self._parser.get_method().decode("latin-1")
        too_large = self._size > MAX_BODY_BYTES
        self._pending.append(Incoming(method, path, self._headers, body, reply, too_large))
        self._next()

    # --------------------------------------------------------------------- one by one

    def answered(self) -> None:
        """The answer under way has ended."""
        self._current = None
        if self._closing and not self._pending:
            self.close()
        else:
            self._next()

    def _next(self) -> None:
        if self._current is None and self._pending:
            incoming = self._pending.popleft()
            self._current = incoming.reply
            self._handle(incoming)
