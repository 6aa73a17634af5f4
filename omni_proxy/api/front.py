"""The client's connection: takes the hot routes over below ASGI, leaves the rest to uvicorn and FastAPI.

A subclass of uvicorn's own protocol, so that parsing, keep-alive, shutdown and every route that is not hot stay
uvicorn's business. A hot request never becomes an ASGI scope, a task or a queue: the parser's callbacks collect its
body, and the answer's bytes are written to the transport as they come from the worker.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import struct
import sys
from typing import Any, Final

import httptools
from uvicorn.config import Config as UvicornConfig
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from omni_proxy.access.gate import Gate
from omni_proxy.api.bounds import Bounds, Crowd
from omni_proxy.api.edge import Edge
from omni_proxy.api.guard import Guard
from omni_proxy.api.hot import HotRequest, clean_id, let_go, let_in, whole_request
from omni_proxy.api.http_out import JSON_TYPE, error_json, head
from omni_proxy.api.said import Said, said_in
from omni_proxy.api.whole import WholeHead, WholeRequest, read_whole
from omni_proxy.call import HOT_PATHS
from omni_proxy.errors import ErrorCode, Rejected, http_status
from omni_proxy.relay.pump import Passage

logger = logging.getLogger(__name__)

_HOT: Final = frozenset(path.encode() for path in HOT_PATHS)
_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER for a close that the other side cannot take for a clean end."""
_GONE: Final = getattr(select, "POLLRDHUP", select.POLLHUP)
_OFFER: Final = frozenset({b"upgrade", b"connection", b"http2-settings"})
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
LINGER_S: Final = 10.0
"""How long a refused body is read and thrown away, so that its sender gets to see the refusal."""


class FrontProtocol(HttpToolsProtocol):
    """One client connection."""

    def __init__(
        self,
        config: UvicornConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        edge: Edge,
        gate: Gate,
        guard: Guard,
        bounds: Bounds,
        crowd: Crowd,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._edge = edge
        self._gate = gate
        self._guard = guard
        self._bounds = bounds
        self._crowd = crowd
        self._message_since = 0.0
        self._message_bytes = 0
        self._answering: HotRequest | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._in_message = False
        self._in_head = False
        self._head_bytes = 0
        self._data = b""
        """What the parser works on."""
        self._idle_since: float | None = None
        self._closing_since: float | None = None
        self.peer = ""
        self.passage: Passage | None = None
        """The pump writes to the socket; it is asked to stop before anybody else does."""
        self._last_head: WholeHead | None = None
        self._said: Said | None = None
        """What the headers said that were read last."""

    # ---------------------------------------------------------------- asyncio protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self.peer = self.client[0] if self.client else ""
        if not self._crowd.enter(self.peer):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave_pump()
        self._stop_body_timer()
        self._crowd.leave(self.peer)
        hot, self._answering = self._answering, None
        if hot is not None:
            let_go(hot, self._gate)
            self._edge.client_left(hot.exchange)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._idle_since is not None and self._body_timer is None:
            whole = read_whole(data, self._last_head)
            if (
                whole is not None
                and len(whole.head.headers) < self._bounds.headers  # the length is none of them
                and len(data) - len(whole.body) <= self._bounds.head_bytes
                and not self.transport.is_closing()
            ):
                self._take_whole(whole)
                return
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

    def on_response_complete(self) -> None:
        """The next request's turn. Idle time is swept (`close_if_idle`): a timer a request would cost more."""
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
            self._idle_since = self.loop.time()

    def close_if_idle(self, before: float) -> None:
        """Close a connection on which nothing has happened since an instant of the loop's clock."""
        if self._idle_since is not None and self._idle_since < before and not self.transport.is_closing():
            self.transport.close()

    def close_if_too_slow(self, now: float) -> None:
        """Give up a request that trickles in: each part came in time, and all of it does not."""
        if not self._in_message or self._answering is not None or self.flow.read_paused or self.transport.is_closing():
            return
        if self._bounds.too_slow(self._in_head, now - self._message_since, self._message_bytes):
            self._refuse_connection(ErrorCode.REQUEST_TIMEOUT, "The request came too slowly.")

    def drop_if_stuck(self, now: float, patience_s: float) -> None:
        """End a connection that is to be closed and whose client does not take what is left for it."""
        if not self.transport.is_closing():
            return
        if self._closing_since is None:
            self._closing_since = now
        elif now - self._closing_since > patience_s:
            self.transport.abort()

    def has_left(self) -> bool:
        """Did the client hang up while nobody reads from it? Asked of connections with pipelined requests only."""
        if not self.flow.read_paused or self.transport.is_closing():
            return False
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), _GONE)
        return bool(poll.poll(0))

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._answering is not None:
            self._edge.client_slow(self._answering.exchange)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._answering is not None:
            self._edge.client_ready(self._answering.exchange)

    # ---------------------------------------------------------------- parser callbacks

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._in_message = True
        self._in_head = True
        self._head_bytes = 0
        self._message_since, self._message_bytes = self.loop.time(), 0
        self._idle_since = None

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
            self._start_hot(hot)

    # ------------------------------------------------------------------- hot requests

    def _begin_hot(self) -> None:
        version = self.parser.get_http_version()
        keep_alive = version != "1.0" and self.parser.should_keep_alive()
        request_id = next((value for name, value in self.headers if name == b"x-request-id"), b"")
        exchange = self._edge.new_exchange(self, clean_id(request_id), keep_alive, chunked=version != "1.0")
        hot = HotRequest(exchange, self.url.partition(b"?")[0], self.headers, keep_alive)
        headers, self.headers = self.headers, []  # for trailers: they are no part of the head
        before = self.cycle
        self.cycle = hot  # type: ignore[assignment]
        hot.expects = self.expect_100_continue and version != "1.0"
        try:
            let_in(hot, self._gate, self._guard)
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

    def _take_whole(self, whole: WholeRequest) -> None:
        """Between two messages a whole request has come: the parser never sees it."""
        self._idle_since = None
        head = self._last_head = whole.head
        exchange = self._edge.new_exchange(self, clean_id(head.request_id), True, chunked=True)
        hot = whole_request(exchange, whole)
        self.cycle = hot  # type: ignore[assignment]
        if len(whole.body) > self._bounds.body_bytes:
            self._refuse_body(hot)
            self.transport.close()
            return
        self._start_hot(hot)

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
            self._start_hot(cycle)
        else:
            self._message_since, self._message_bytes = self.loop.time(), 0
            self._time_body()
            if cycle.expects and not cycle.size:
                self.transport.write(_CONTINUE)

    def _start_hot(self, hot: HotRequest) -> None:
        self._answering = hot
        said = self._said = said_in(hot.headers, self.peer, self._gate.on, self._said)
        # It may not have taken the answers before this one.
        self._edge.intake.start(hot, said, self._gate, self._guard, self.flow.write_paused)

    # ------------------------------------------------------------- the exchange's client

    def write(self, data: bytes) -> None:
        if self.passage is not None:
            self.passage.stop()
        self.transport.write(data)

    def bare_fd(self) -> int:
        """The socket, where another may write to it now: nothing of ours waits, and nothing is encrypted; -1 where
        not."""
        transport = self.transport
        if self.scheme != "http" or transport.is_closing() or transport.get_write_buffer_size():
            return -1
        fd: int = transport.get_extra_info("socket").fileno()
        return fd

    def _leave_pump(self) -> None:
        if self.passage is not None:
            self.passage.end()

    def finished(self, close: bool) -> None:
        self._leave_pump()
        hot, self._answering = self._answering, None
        if hot is None:
            return
        let_go(hot, self._gate)
        if close or not hot.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def abort(self) -> None:
        """End the connection without the last chunk, after what was written has gone out.

        Where there are no chunks (HTTP/1.0) the end of the connection is the end of the answer: only a reset says
        that it is not whole.
        """
        self._leave_pump()
        if self.transport.is_closing():
            return
        if self._answering is not None and not self._answering.exchange.chunked:
            sock = self.transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.close()

    def drop(self) -> None:
        """End the connection at once; what was not sent is thrown away."""
        self._leave_pump()
        self.transport.abort()

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
        hot = self._answering
        if hot is not None:
            hot.keep_alive = hot.exchange.kept_alive = False
            self.pipeline.clear()
            return
        if not self._asgi_has_begun() and not self.transport.is_closing():
            body = error_json(code, msg)
            framing = b"content-length: %d\r\n" % len(body)
            self.transport.write(head(http_status(code), [JSON_TYPE], b"-", framing, close=True) + body)
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
        self._answering = None
        self._edge.reject(hot.exchange, hot.refusal or Rejected(ErrorCode.BODY_TOO_LARGE, message))
        self.loop.call_later(LINGER_S, self.abort)

    def _body_too_slow(self) -> None:
        self._body_timer = None
        if self._answering is None:  # else the next request's time begins when this one has been answered
            self.transport.close()

    def _time_body(self) -> None:
        self._stop_body_timer()
        self._body_timer = self.loop.call_later(self._bounds.body_s, self._body_too_slow)

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
