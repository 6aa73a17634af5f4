"""The client's connection: takes whole hot requests as they are read, and holds the way back to the client.

A hot request never becomes an ASGI scope, a task or a queue. What is no whole hot request is given to the protocol
behind the connection (`front`): that parses it, and hands hot requests back as soon as they have been read.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, Final, Protocol

from uvicorn.protocols.utils import get_remote_addr

from omni_proxy.access.gate import Gate
from omni_proxy.api.bounds import Bounds, Crowd
from omni_proxy.api.edge import Edge
from omni_proxy.api.guard import Guard
from omni_proxy.api.hot import HotRequest, clean_id, let_go, whole_request
from omni_proxy.api.said import Said, said_in
from omni_proxy.api.whole import WholeHead, WholeRequest, read_whole
from omni_proxy.relay.pump import Passage

_RESET: Final = struct.pack("ii", 1, 0)
"""SO_LINGER for a close that the other side cannot take for a clean end."""


class Parser(Protocol):
    """What stands behind a connection and takes all that is not a whole hot request."""

    def data_received(self, data: bytes) -> None: ...

    def follows(self, hot: HotRequest) -> None:
        """A request is being answered that the parser has not seen: what it reads next is behind that."""

    def on_response_complete(self) -> None:
        """An answer is whole: the next request's turn."""

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...

    def shutdown(self) -> None: ...

    def close_if_too_slow(self, now: float) -> None: ...

    def has_left(self) -> bool: ...


class ClientConnection:
    """One client connection.

    An asyncio protocol by its methods, not by its base: without one its attributes compile to struct fields.
    """

    __slots__ = (
        "_among",
        "_answering",
        "_closing_since",
        "_crowd",
        "_idle_since",
        "_last_head",
        "_loop",
        "_parser",
        "_parser_for",
        "_said",
        "_writing_paused",
        "bounds",
        "edge",
        "gate",
        "guard",
        "passage",
        "peer",
        "transport",
    )

    transport: asyncio.Transport
    """From `connection_made` on."""

    def __init__(
        self,
        edge: Edge,
        gate: Gate,
        guard: Guard,
        bounds: Bounds,
        crowd: Crowd,
        among: set[Any],
        parser_for: Callable[[ClientConnection], Parser],
    ) -> None:
        self.edge = edge
        self.gate = gate
        self.guard = guard
        self.bounds = bounds
        self._crowd = crowd
        self._among = among
        """All connections of the server, which ends them."""
        self._parser_for = parser_for
        self._parser: Parser | None = None
        """None until something comes that is no whole hot request."""
        self._loop = asyncio.get_running_loop()
        self._answering: HotRequest | None = None
        self._idle_since: float | None = None
        self._closing_since: float | None = None
        self._writing_paused = False
        self.peer = ""
        self.passage: Passage | None = None
        """The pump writes to the socket; it is asked to stop before anybody else does."""
        self._last_head: WholeHead | None = None
        self._said: Said | None = None
        """What the headers said that were read last."""

    # ---------------------------------------------------------------- asyncio protocol

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._among.add(self)
        self.transport = transport
        self._idle_since = self._loop.time()
        address = get_remote_addr(transport)
        self.peer = "" if address is None else address[0]
        if not self._crowd.enter(self.peer):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._among.discard(self)
        self._leave_pump()
        self._crowd.leave(self.peer)
        hot, self._answering = self._answering, None
        if hot is not None:
            let_go(hot, self.gate)
            self.edge.client_left(hot.exchange)
        parser, self._parser = self._parser, None
        if parser is not None:
            parser.connection_lost(exc)

    def eof_received(self) -> None:
        """The client sends no more: as if it had left."""

    def data_received(self, data: bytes) -> None:
        if self._idle_since is not None:
            whole = read_whole(data, self._last_head)
            if whole is not None and self._takes(whole, len(data)):
                self._take(whole)
                return
        parser = self._parser
        if parser is None:
            parser = self._parser = self._parser_for(self)
            if self._writing_paused:
                parser.pause_writing()
            if self._answering is not None:
                parser.follows(self._answering)
        parser.data_received(data)

    def pause_writing(self) -> None:
        self._writing_paused = True
        if self._parser is not None:
            self._parser.pause_writing()
        if self._answering is not None:
            self.edge.client_slow(self._answering.exchange)

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._parser is not None:
            self._parser.resume_writing()
        if self._answering is not None:
            self.edge.client_ready(self._answering.exchange)

    # ---------------------------------------------------------------- the server's wishes

    def shutdown(self) -> None:
        """The server ends: close now, or as soon as what was asked has been answered."""
        if self._parser is not None:
            self._parser.shutdown()
        elif self._answering is not None:
            self._answering.keep_alive = False
        else:
            self.transport.close()

    def close_if_idle(self, before: float) -> None:
        """Close a connection on which nothing has happened since an instant of the loop's clock."""
        if self._idle_since is not None and self._idle_since < before and not self.transport.is_closing():
            self.transport.close()

    def close_if_too_slow(self, now: float) -> None:
        """Give up a request that trickles in: each part came in time, and all of it does not."""
        if self._parser is not None:
            self._parser.close_if_too_slow(now)

    def drop_if_stuck(self, now: float, patience_s: float) -> None:
        """End a connection that is to be closed and whose client does not take what is left for it."""
        if not self.transport.is_closing():
            return
        if self._closing_since is None:
            self._closing_since = now
        elif now - self._closing_since > patience_s:
            self.transport.abort()

    # ---------------------------------------------------------------------- hot requests

    @property
    def answering(self) -> HotRequest | None:
        """The hot request whose answer is due or under way."""
        return self._answering

    def _takes(self, whole: WholeRequest, size: int) -> bool:
        """Is a whole request within the bounds? Others are refused by the parser, which knows how."""
        bounds, body = self.bounds, len(whole.body)
        return (
            len(whole.head.headers) < bounds.headers  # the length is none of them
            and size - body <= bounds.head_bytes
            and body <= bounds.body_bytes
            and not self.transport.is_closing()
        )

    def _take(self, whole: WholeRequest) -> None:
        """Between two messages a whole request has come: the parser never sees it."""
        self._idle_since = None
        head = self._last_head = whole.head
        exchange = self.edge.new_exchange(self, clean_id(head.request_id), True, chunked=True)
        hot = whole_request(exchange, whole)
        if self._parser is not None:
            self._parser.follows(hot)
        self.start(hot)

    def start(self, hot: HotRequest) -> None:
        """Serve a request that has been read."""
        self._answering = hot
        said = self._said = said_in(hot.headers, self.peer, self.gate.on, self._said)
        # It may not have taken the answers before this one.
        self.edge.intake.start(hot, said, self.gate, self.guard, self._writing_paused)

    def begin(self) -> None:
        """The parser has begun to read a message."""
        self._idle_since = None

    def rest(self) -> None:
        """Nothing is read or answered. Idle time is swept (`close_if_idle`): a timer a request would cost more."""
        self._idle_since = self._loop.time()

    # ------------------------------------------------------------- the exchange's client

    def write(self, data: bytes) -> None:
        if self.passage is not None:
            self.passage.stop()
        self.transport.write(data)

    def bare_fd(self) -> int:
        """The socket, where another may write to it now: nothing of ours waits, and nothing is encrypted; -1 where
        not."""
        transport = self.transport
        if transport.get_extra_info("sslcontext") or transport.is_closing() or transport.get_write_buffer_size():
            return -1
        fd: int = transport.get_extra_info("socket").fileno()
        return fd

    def has_left(self) -> bool:
        """Did the client hang up while nobody reads from it? Asked of connections with pipelined requests only."""
        return self._parser is not None and self._parser.has_left()

    def finished(self, close: bool) -> None:
        self._leave_pump()
        hot, self._answering = self._answering, None
        if hot is None:
            return
        let_go(hot, self.gate)
        if close or not hot.keep_alive:
            self.transport.close()
        if self._parser is not None:
            self._parser.on_response_complete()
        else:
            self.rest()

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

    def _leave_pump(self) -> None:
        if self.passage is not None:
            self.passage.end()
