"""A light HTTP/1.1 client for one server: a pool of kept connections, a callback per event of an answer.

Made for load: it costs a few microseconds for each read of a stream, where general clients cost hundreds.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final, Protocol, cast
from urllib.parse import urlsplit

import httptools

_IDLE_LIMIT: Final = 4.0
"""Seconds after which a kept connection is not used again: servers close theirs after 5."""


class ClientFault(Exception):
    """The connection failed, or what came is no HTTP; the text says what."""


class Handler(Protocol):
    """Hears one answer: a head, data, then exactly one of `on_end` and `on_fault`."""

    def on_head(self, status: int) -> None: ...

    def on_data(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_fault(self, fault: str) -> None: ...


class _Connection(asyncio.Protocol):
    def __init__(self, pool: HttpPool) -> None:
        self._pool = pool
        self.transport: asyncio.Transport | None = None
        self.handler: Handler | None = None
        self.exchange: Exchange | None = None
        self.idle_since = 0.0
        self._request: bytes | None = None
        """What to send again if a kept connection turns out to be dead."""
        self._parser = httptools.HttpResponseParser(self)
        self._whole = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass of it

    def send(self, request: bytes, exchange: Exchange, kept: bool) -> None:
        assert self.transport is not None
        self.exchange = exchange
        self.handler = exchange.handler
        self._request = request if kept else None
        self._parser = httptools.HttpResponseParser(self)
        self._whole = False
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._request = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._fault(f"not HTTP ({exc})")
            self.close()
            return
        if self._whole:
            self._ended()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        self.transport = None
        if self._request is not None and self.handler is not None and self.exchange is not None:
            self.handler = None
            self._pool.again(self._request, self.exchange)
            return
        self._fault("connection closed before the end" if exc is None else f"connection lost ({exc})")

    def on_headers_complete(self) -> None:
        if self.handler is not None:
            self.handler.on_head(self._parser.get_status_code())

    def on_body(self, data: bytes) -> None:
        if self.handler is not None:
            self.handler.on_data(data)

    def on_message_complete(self) -> None:
        self._whole = True

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def _ended(self) -> None:
        handler, self.handler = self.handler, None
        if self._parser.should_keep_alive():
            self._pool.give_back(self)
        else:
            self.close()
        if handler is not None:
            handler.on_end()

    def _fault(self, fault: str) -> None:
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.on_fault(fault)


class Exchange:
    """One request under way; after `abort` nothing more is heard of it."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self._task: asyncio.Task[None] | None = None
        self._connection: _Connection | None = None

    def runs_on(self, connection: _Connection) -> None:
        self._connection = connection

    def connects_in(self, task: asyncio.Task[None]) -> None:
        self._task = task

    def abort(self) -> None:
        """End it, and the connection with it."""
        if self._task is not None:
            self._task.cancel()
        connection = self._connection
        if connection is not None and connection.handler is self.handler:
            connection.handler = None
            connection.close()


class HttpPool:
    """Connections to one server. Raises ValueError for a URL that names none."""

    def __init__(self, url: str, connect_s: float = 10.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} must be http://HOST:PORT or https://HOST:PORT")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.prefix = parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._netloc = parts.netloc.rpartition("@")[2]
        self._connect_s = connect_s
        self._idle: list[_Connection] = []
        self._live: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()

    def request(self, method: str, path: str, body: bytes, handler: Handler, headers: str = "") -> Exchange:
        """Send a request; `headers` are whole lines, each with its line end."""
        kind = "content-type: application/json\r\n" if body else ""
        head = f"{method} {self.prefix}{path} HTTP/1.1\r\nhost: {self._netloc}\r\n{kind}{headers}"
        whole = f"{head}content-length: {len(body)}\r\n\r\n".encode("latin-1") + body
        exchange = Exchange(handler)
        connection = self._take_idle()
        if connection is not None:
            exchange.runs_on(connection)
            connection.send(whole, exchange, kept=True)
        else:
            self.again(whole, exchange)
        return exchange

    def again(self, request: bytes, exchange: Exchange) -> None:
        """Send a request on a new connection."""
        task = self._loop.create_task(self._connect(request, exchange))
        exchange.connects_in(task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def fetch(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """A whole answer: status and body. Raises ClientFault."""
        handler = _Whole(self._loop.create_future())
        exchange = self.request(method, path, body, handler)
        try:
            return await handler.done
        except asyncio.CancelledError:
            exchange.abort()
            raise

    def give_back(self, connection: _Connection) -> None:
        """A connection that may carry the next request."""
        connection.idle_since = self._loop.time()
        self._idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        """A connection that is gone."""
        self._live.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def close(self) -> None:
        """End all connections."""
        for task in list(self._tasks):
            task.cancel()
        for connection in list(self._live):
            connection.close()
        await asyncio.sleep(0)

    async def _connect(self, request: bytes, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(self._connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self), self.host, self.port, ssl=self._tls
                )
        except (OSError, TimeoutError) as exc:
            exchange.handler.on_fault(f"cannot connect ({exc or type(exc).__name__})")
            return
        self._live.add(connection)
        exchange.runs_on(connection)
        connection.send(request, exchange, kept=False)

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is not None and self._loop.time() - connection.idle_since < _IDLE_LIMIT:
                return connection
            connection.close()
        return None


class _Whole:
    """Collects one answer for `fetch`."""

    def __init__(self, done: asyncio.Future[tuple[int, bytes]]) -> None:
        self.done = done
        self._status = 0
        self._body: list[bytes] = []

    def on_head(self, status: int) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        self._body.append(data)

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result((self._status, b"".join(self._body)))

    def on_fault(self, fault: str) -> None:
        if not self.done.done():
            self.done.set_exception(ClientFault(fault))
