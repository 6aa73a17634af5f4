"""The client's connection: takes the hot routes over below ASGI, leaves the rest to uvicorn and FastAPI.

A subclass of uvicorn's own protocol, so that parsing, keep-alive, shutdown and every route that is not hot stay
uvicorn's business. A hot request never becomes an ASGI scope, a task or a queue: the parser's callbacks collect its
body, and the answer's bytes are written to the transport as they come from the worker.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.config import Config as UvicornConfig
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from omni_proxy.api.edge import Edge
from omni_proxy.api.exchange import Exchange
from omni_proxy.api.http_out import HOP_BY_HOP, JSON_TYPE, error_json, head
from omni_proxy.call import HOT_PATHS, Call, parse_call
from omni_proxy.errors import ErrorCode, Rejected
from omni_proxy.messages import Arrived, RequestSpec

_HOT: Final = frozenset(path.encode() for path in HOT_PATHS)
_STAYS_HERE: Final = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"content-type",
    b"accept-encoding",
    b"expect",
    b"x-request-id",
    b"x-forwarded-for",
    b"x-data-parallel-rank",
}
"""Headers that are ours to set, or about this connection only; all others go on to the workers."""

MAX_REQUEST_ID: Final = 128
BYTES_PER_TOKEN: Final = 4
"""For estimates of a prompt's length where nobody tokenises it."""
LINGER_S: Final = 10.0
"""How long a refused body is read and thrown away, so that its sender gets to see the refusal."""


class _NoEvent:
    """Stands for the event on which uvicorn wakes an ASGI task; a hot request has none."""

    def set(self) -> None:
        return


class _HotRequest:
    """A hot request while it is read and answered. Stands where uvicorn keeps its cycle."""

    __slots__ = (
        "body",
        "disconnected",
        "exchange",
        "headers",
        "keep_alive",
        "message_event",
        "path",
        "queued",
        "read",
        "refused",
        "response_complete",
        "size",
    )

    def __init__(self, exchange: Exchange, path: bytes, headers: list[tuple[bytes, bytes]], keep_alive: bool) -> None:
        self.exchange = exchange
        self.path = path
        self.headers = headers
        self.keep_alive = keep_alive
        self.body: list[bytes] = []
        self.size = 0
        self.read = False
        self.queued = False
        """Another request on this connection is being answered (pipelining)."""
        self.refused = False
        self.response_complete = False
        self.disconnected = False
        self.message_event = _NoEvent()


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
        max_body_bytes: int,
        body_timeout_s: float = 60.0,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._edge = edge
        self._max_body_bytes = max_body_bytes
        self._body_timeout_s = body_timeout_s
        self._answering: _HotRequest | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._in_message = False
        self._idle_since: float | None = None
        self.peer = ""

    # ---------------------------------------------------------------- asyncio protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self.peer = self.client[0] if self.client else ""

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_body_timer()
        hot, self._answering = self._answering, None
        if hot is not None:
            self._edge.client_left(hot.exchange)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_message or self._body_timer is not None:
            self._stop_body_timer()
            if self._in_message and not self.transport.is_closing():
                self._body_timer = self.loop.call_later(self._body_timeout_s, self._body_too_slow)

    def on_response_complete(self) -> None:
        """The next request's turn. Idle time is swept (`close_if_idle`): a timer a request would cost more."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._idle_since = self.loop.time()

    def close_if_idle(self, before: float) -> None:
        """Close a connection on which nothing has happened since an instant of the loop's clock."""
        if self._idle_since is not None and self._idle_since < before and not self.transport.is_closing():
            self.transport.close()

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
        self._idle_since = None

    def on_headers_complete(self) -> None:
        if self.parser.get_method() == b"POST" and self.url.partition(b"?")[0] in _HOT:
            self._begin_hot()
            return
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers.extend(headers)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        hot = self.cycle
        if not isinstance(hot, _HotRequest):
            super().on_body(body)
            return
        if hot.refused:
            return
        hot.size += len(body)
        if hot.size > self._max_body_bytes:
            self._refuse_body(hot)
        else:
            hot.body.append(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        hot = self.cycle
        if not isinstance(hot, _HotRequest):
            super().on_message_complete()
            return
        hot.read = True
        if hot.refused:
            self.transport.close()
        elif not hot.queued:
            self._start_hot(hot)

    # ------------------------------------------------------------------- hot requests

    def _begin_hot(self) -> None:
        version = self.parser.get_http_version()
        keep_alive = version != "1.0" and self.parser.should_keep_alive()
        request_id = next((value for name, value in self.headers if name == b"x-request-id"), b"")
        exchange = self._edge.new_exchange(self, _clean_id(request_id), keep_alive, chunked=version != "1.0")
        hot = _HotRequest(exchange, self.url.partition(b"?")[0], self.headers, keep_alive)
        before = self.cycle
        self.cycle = hot  # type: ignore[assignment]
        if before is not None and not before.response_complete:
            hot.queued = True
            self.flow.pause_reading()
            self.pipeline.appendleft((hot, self.app))  # type: ignore[arg-type]
            return
        length = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if int(length) > self._max_body_bytes:
            self._refuse_body(hot)
        elif self.expect_100_continue:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """The turn of a request has come; uvicorn calls this for pipelined ones too."""
        if not isinstance(cycle, _HotRequest):
            super()._start_asgi_task(cycle, app)
            return
        cycle.queued = False
        if cycle.read:
            self._start_hot(cycle)

    def _start_hot(self, hot: _HotRequest) -> None:
        exchange = hot.exchange
        self._answering = hot
        body = hot.body[0] if len(hot.body) == 1 else b"".join(hot.body)
        hot.body = []
        exchange.kept_alive = hot.keep_alive
        exchange.path = hot.path
        exchange.forward, exchange.user_agent = self._forwarded(hot.headers)
        try:
            call = parse_call(hot.path.decode(), body)
        except Rejected as exc:
            self._edge.reject(exchange, exc)
            return
        exchange.call = call
        self._edge.add(exchange)
        exchange.spec = spec = _spec(exchange, call, len(body), self._edge.counts_tokens)
        self._edge.post(Arrived(exchange.rid, spec))

    def _forwarded(self, headers: list[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
        """Header lines for the workers, and the user agent for the access log."""
        lines = [b"%b: %b\r\n" % header for header in headers if header[0] not in _STAYS_HERE]
        sources = [value for name, value in headers if name == b"x-forwarded-for"]
        lines.append(b"x-forwarded-for: %b\r\n" % b", ".join([*sources, self.peer.encode()]))
        return b"".join(lines), next((value for name, value in headers if name == b"user-agent"), b"")

    # ------------------------------------------------------------- the exchange's client

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def finished(self, close: bool) -> None:
        hot, self._answering = self._answering, None
        if hot is None:
            return
        hot.response_complete = True
        if close or not hot.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def abort(self) -> None:
        """End the connection without the last chunk, after what was written has gone out."""
        if not self.transport.is_closing():
            self.transport.close()

    def drop(self) -> None:
        """End the connection at once; what was not sent is thrown away."""
        self.transport.abort()

    # -------------------------------------------------------------------------- refusals

    def send_400_response(self, msg: str) -> None:
        """uvicorn found something that is not HTTP; in the middle of an answer only the connection can end."""
        if self._answering is None and not self.transport.is_closing():
            body = error_json(ErrorCode.INVALID_HEADER, msg)
            framing = b"content-length: %d\r\n" % len(body)
            self.transport.write(head(400, [JSON_TYPE], b"-", framing, close=True) + body)
        self.transport.close()

    def _refuse_body(self, hot: _HotRequest) -> None:
        hot.refused = True
        hot.body = []
        hot.keep_alive = hot.exchange.kept_alive = False
        message = f"The request body is larger than {self._max_body_bytes} bytes."
        self._answering = None
        self._edge.reject(hot.exchange, Rejected(ErrorCode.BODY_TOO_LARGE, message))
        self.loop.call_later(LINGER_S, self.abort)

    def _body_too_slow(self) -> None:
        self._body_timer = None
        if self._answering is None:
            self.transport.close()

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None


def _clean_id(value: bytes) -> bytes:
    """A client's request id if it can stand in a header and a log line, else nothing."""
    usable = 0 < len(value) <= MAX_REQUEST_ID and value.isascii() and value.decode().isprintable() and b" " not in value
    return value if usable else b""


def _spec(exchange: Exchange, call: Call, size: int, counts_tokens: bool) -> RequestSpec:
    return RequestSpec(
        model=call.model,
        endpoint=call.path,
        prompt_tokens=max(1, size // BYTES_PER_TOKEN),
        max_tokens=call.max_tokens,
        stream=call.stream,
        priority=call.priority,
        tokenize=counts_tokens,
        whole=call.whole,
        external_id=exchange.request_id.decode(),
    )
