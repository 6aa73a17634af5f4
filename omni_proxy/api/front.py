"""What stands behind a client's connection: parses what is no whole hot request.

A subclass of uvicorn's own protocol, so that parsing, keep-alive, shutdown and every route that is not hot stay
uvicorn's business. Of a hot request the parser's callbacks collect the body; the connection (`client`) has it served.
"""

from __future__ import annotations

import asyncio
import logging
import select
import sys
from typing import Any, Final

import httptools
from uvicorn.config import Config as UvicornConfig
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from omni_proxy.api.client import ClientConnection
from omni_proxy.api.hot import HotRequest, clean_id, let_in
from omni_proxy.api.http_out import JSON_LINE, error_json, head
from omni_proxy.call import HOT_PATHS
from omni_proxy.errors import ErrorCode, Rejected, http_status

logger = logging.getLogger(__name__)

_HOT: Final = frozenset(path.encode() for path in HOT_PATHS)
_GONE: Final = getattr(select, "POLLRDHUP", select.POLLHUP)
_OFFER: Final = frozenset({b"upgrade", b"connection", b"http2-settings"})
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LINGER_S: Final = 10.0
"""How long a refused body is read and thrown away, so that its sender gets to see the refusal."""


class FrontProtocol(HttpToolsProtocol):
    """The parser of one client connection."""

    def __init__(
        self,
        connection: ClientConnection,
        *,
        config: UvicornConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._connection = connection
        self._bounds = connection.bounds
        self._message_since = 0.0
        self._message_bytes = 0
        self._body_timer: asyncio.TimerHandle | None = None
        self._in_message = False
        self._in_head = False
        self._head_bytes = 0
        self._data = b""
        """What the parser works on."""
        self.connection_made(connection.transport)
        self.connections.discard(self)  # the connection itself is among them

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_body_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._data = data
        super().data_received(data)
        self._data = b""
        if self._in_message or self._body_timer is not None:
            self._stop_body_timer()
            if self._in_message and not self.transport.is_closing():
                self._time_body()
                self._message_bytes += len(data)
                if self._in_head:
                    self._bound_head(len(data))

    def follows(self, hot: HotRequest) -> None:
        """A request is being answered that the parser has not seen: what it reads next is behind that."""
        self.cycle = hot  # type: ignore[assignment]

    def on_response_complete(self) -> None:
        """The next request's turn."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            # Not from here: a row of short answers would call itself once for each.
            self.loop.call_soon(self._next_in_line)
        elif self._in_message:
            self._message_since, self._message_bytes = self.loop.time(), 0
            self._time_body()
        else:
            self._connection.rest()

    def close_if_too_slow(self, now: float) -> None:
        """Give up a request that trickles in: each part came in time, and all of it does not."""
        if not self._in_message or self._busy() or self.flow.read_paused or self.transport.is_closing():
            return
        if self._bounds.too_slow(self._in_head, now - self._message_since, self._message_bytes):
            self._refuse_connection(ErrorCode.REQUEST_TIMEOUT, "The request came too slowly.")

    def has_left(self) -> bool:
        """Did the client hang up while nobody reads from it? Asked of connections with pipelined requests only."""
        if not self.flow.read_paused or self.transport.is_closing():
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _GONE)
        return bool(poll.poll(0))

    def _busy(self) -> bool:
        """Is a hot request being answered?"""
        return self._connection.answering is not None

    # ---------------------------------------------------------------- parser callbacks

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._in_message = True
        self._in_head = True
        self._head_bytes = 0
        self._message_since, self._message_bytes = self.loop.time(), 0
        self._connection.begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._check_head()
        if self.parser.should_upgrade():
            return
        if self.parser.get_method() == b"POST" and self.url.partition(b"?")[0] in _HOT:
            self._begin_hot()
            return
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers.extend(headers)
        super().on_headers_complete()
        self.headers = []  # for trailers: they are no part of the head

    def on_body(self, body: bytes) -> None:
        hot = self.cycle
        if not isinstance(hot, HotRequest):
            super().on_body(body)
            return
        if hot.refused:
            return
        hot.size += len(body)
        if hot.size <= self._bounds.body_bytes:
            hot.body.append(body)
        elif hot.queued:
            hot.refused = True
            hot.body = []
        else:
            self._refuse_body(hot)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_message = False
        hot = self.cycle
        if not isinstance(hot, HotRequest):
            super().on_message_complete()
            return
        hot.read = True
        if hot.queued:
            return
        if hot.refused:
            self.transport.close()
        else:
            self._connection.start(hot)

    # ------------------------------------------------------------------- hot requests

    def _begin_hot(self) -> None:
        version = self.parser.get_http_version()
        keep_alive = version != "1.0" and self.parser.should_keep_alive()
        request_id = next((value for name, value in self.headers if name == b"x-request-id"), b"")
        connection = self._connection
        exchange = connection.edge.new_exchange(connection, clean_id(request_id), keep_alive, version != "1.0")
        hot = HotRequest(exchange, self.url.partition(b"?")[0], self.headers, keep_alive)
        headers, self.headers = self.headers, []  # for trailers: they are no part of the head
        before = self.cycle
        self.cycle = hot  # type: ignore[assignment]
        hot.expects = self.expect_100_continue and version != "1.0"
        try:
            let_in(hot, connection.gate, connection.guard)
        except Rejected as exc:
            hot.refused, hot.refusal = True, exc
        if before is not None and not before.response_complete:
            hot.queued = True
            self.flow.pause_reading()
            self.pipeline.appendleft((hot, self.app))  # type: ignore[arg-type]
            return
        if hot.refusal is not None:
            self._refuse_body(hot)
            return
        length = next((value for name, value in headers if name == b"content-length"), b"0")
        if int(length) > self._bounds.body_bytes:
            self._refuse_body(hot)
        elif hot.expects:
            self.transport.write(_CONTINUE)

    def _next_in_line(self) -> None:
        if self.pipeline and not self.transport.is_closing():
            self._start_asgi_task(*self.pipeline.pop())

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """The turn of a request has come; uvicorn calls this for pipelined ones too."""
        if not isinstance(cycle, HotRequest):
            super()._start_asgi_task(cycle, app)
            return
        cycle.queued = False
        if cycle.refused:
            self._refuse_body(cycle)
            if cycle.read:
                self.transport.close()
        elif cycle.read:
            self._connection.start(cycle)
        else:
            self._message_since, self._message_bytes = self.loop.time(), 0
            self._time_body()
            if cycle.expects and not cycle.size:
                self.transport.write(_CONTINUE)

    # -------------------------------------------------------------------------- refusals

    def send_400_response(self, msg: str) -> None:
        """uvicorn found something that is not HTTP, or a fault of ours ended the parser's work."""
        code = ErrorCode.INVALID_HEADER
        fault = sys.exc_info()[1]
        if isinstance(fault, httptools.HttpParserCallbackError) and isinstance(fault.__context__, Rejected):
            code, msg = fault.__context__.code, fault.__context__.message
        elif isinstance(fault, httptools.HttpParserCallbackError):
            logger.error("a request could not be taken in", exc_info=fault.__context__)
            code, msg = ErrorCode.INTERNAL, "The gateway failed on this request."
        self._refuse_connection(code, msg)

    def _refuse_connection(self, code: ErrorCode, msg: str) -> None:
        """Say why, where no other answer has begun, and end the connection.

        A good request that is being answered gets its answer; what came behind it cannot be told apart any more.
        """
        hot = self._connection.answering
        if hot is not None:
            hot.keep_alive = hot.exchange.kept_alive = False
            self.pipeline.clear()
            return
        if not self._asgi_has_begun() and not self.transport.is_closing():
            body = error_json(code, msg)
            framing = b"content-length: %d\r\n" % len(body)
            self.transport.write(head(http_status(code), JSON_LINE, b"-", framing, close=True) + body)
        self.transport.close()

    def _asgi_has_begun(self) -> bool:
        cycle = self.cycle
        if cycle is None or isinstance(cycle, HotRequest):
            return False
        return cycle.response_started and not cycle.response_complete

    def _unsupported_upgrade_warning(self) -> None:
        """A client offers another protocol and asks in HTTP/1.1 all the same (curl --http2, Java's HttpClient).

        The parser stops behind such a head, also where a body follows. The offer is taken out and the rest is read by
        a parser that has never seen it.
        """
        offer = sys.exc_info()[1]
        assert isinstance(offer, httptools.HttpParserUpgrade)
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        if method == b"CONNECT":
            self.send_400_response("There are no tunnels here.")
            return
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] not in _OFFER]
        if any(b"close" in value.lower() for name, value in self.headers if name == b"connection"):
            lines.append(b"connection: close\r\n")
        head_again = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, b"".join(lines))
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(head_again + self._data[offer.args[0] :])

    def _bound_head(self, size: int) -> None:
        """Count what comes to an unfinished head after the read in which it began."""
        self._head_bytes += size if self._head_bytes else 1
        if self._head_bytes > self._bounds.head_bytes:
            self._refuse_connection(ErrorCode.HEAD_TOO_LARGE, self._bounds_of_heads())

    def _check_head(self) -> None:
        """Is a whole head within its bounds? Raises Rejected, which ends the parser's work."""
        headers = self.headers
        size = len(self.url) + sum([len(name) + len(value) + 4 for name, value in headers])
        if size > self._bounds.head_bytes or len(headers) > self._bounds.headers:
            raise Rejected(ErrorCode.HEAD_TOO_LARGE, self._bounds_of_heads())
        if self.parser.get_http_version() not in ("1.1", "1.0"):
            raise Rejected(ErrorCode.INVALID_HEADER, "The request is not HTTP/1.1.")

    def _bounds_of_heads(self) -> str:
        bounds = self._bounds
        return f"The request head is larger than {bounds.head_bytes} bytes, or has more than {bounds.headers} lines."

    def _refuse_body(self, hot: HotRequest) -> None:
        hot.refused = True
        hot.body = []
        hot.keep_alive = hot.exchange.kept_alive = False
        message = f"The request body is larger than {self._bounds.body_bytes} bytes."
        self._connection.edge.reject(hot.exchange, hot.refusal or Rejected(ErrorCode.BODY_TOO_LARGE, message))
        self.loop.call_later(LINGER_S, self._connection.abort)

    def _body_too_slow(self) -> None:
        self._body_timer = None
        if not self._busy():  # else the next request's time begins when this one has been answered
            self.transport.close()

    def _time_body(self) -> None:
        self._stop_body_timer()
        self._body_timer = self.loop.call_later(self._bounds.body_s, self._body_too_slow)

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
