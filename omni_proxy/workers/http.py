"""The HTTP/1.1 client for the two legs: bytes out, callbacks in, a pool of idle connections for each worker.

Written on asyncio protocols because a task and a queue for each chunk would cost more than relaying it. One
connection carries one request at a time; there is no pipelining. Idle connections are used last in, first out, and
dropped before the engine's own keep-alive time ends.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, Protocol, cast

from omni_proxy.messages import Failure, FailureKind
from omni_proxy.tls import ClientTls
from omni_proxy.workers.answer import AnswerReader, BadAnswer, Head

if TYPE_CHECKING:
    from omni_proxy.relay.pump import Passage

FAIR_BYTES: Final = 32 << 10
"""A read of this size says that the worker sends faster than we relay."""


class Handler(Protocol):
    """Who waits for an answer. After `on_end` or `on_failure` no other call comes; neither after `Ticket.abort`."""

    def on_sent(self) -> None:
        """The whole request was handed to the connection."""

    def on_head(self, head: Head) -> None: ...

    def on_data(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_failure(self, failure: Failure) -> None: ...


class Ticket:
    """One request to a worker on its way; `abort` ends it without a further call to its handler."""

    __slots__ = ("connection", "data", "done", "handler", "not_after", "paused", "pool", "reused", "sent_at", "task")

    def __init__(self, pool: WorkerPool, data: bytes, handler: Handler, not_after: float | None = None) -> None:
        self.pool = pool
        self.data = data
        self.handler = handler
        self.not_after = not_after
        """The instant of the monotonic clock from which it must not be sent any more."""
        self.connection: WorkerConnection | None = None
        self.task: asyncio.Task[None] | None = None
        self.reused = False
        self.paused = False
        self.sent_at = 0.0
        self.done = False

    @property
    def framed(self) -> bytes:
        """The data that was read last, as the one whole chunk that it came in; empty where it did not."""
        return self.connection.reader.framed if self.connection is not None else b""

    def abort(self) -> None:
        """Close the connection under the request: engines take that as the end of it."""
        if self.done:
            return
        self.done = True
        if self.task is not None:
            self.task.cancel()
        if self.connection is not None:
            self.connection.close()

    def pause(self) -> None:
        """The reader of the answer is slow: stop reading from the worker."""
        self.paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        """Go on reading."""
        self.paused = False
        if self.connection is not None:
            self.connection.resume()

    def finish(self) -> None:
        """The answer is whole."""
        if not self.done:
            self.done = True
            self.handler.on_end()

    def fail(self, failure: Failure) -> None:
        """There will be no whole answer."""
        if not self.done:
            self.done = True
            self.handler.on_failure(failure)


class WorkerConnection:
    """One connection to a worker: parses the answer of the ticket that it carries.

    An asyncio protocol by its methods, not by its base: without one its attributes compile to struct fields.
    """

    __slots__ = ("answered", "idle_since", "passage", "paused", "pool", "reader", "ticket", "told", "transport")

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.reader = AnswerReader()
        self.transport: asyncio.Transport | None = None
        self.ticket: Ticket | None = None
        self.answered = False
        """A byte of the answer has come."""
        self.told = False
        """The handler knows of the answer's head."""
        self.paused = False
        self.idle_since = 0.0
        self.passage: Passage | None = None
        """The pump reads from the socket; it is asked to stop before anything else is done with it."""

    # ------------------------------------------------------------------ sending

    def send(self, ticket: Ticket, now: float) -> None:
        """Carry a ticket; the connection must be idle."""
        assert self.transport is not None
        self.ticket = ticket
        ticket.connection = self
        self.answered = self.told = False
        self.reader.reset()
        ticket.sent_at = now
        self.transport.write(ticket.data)
        if ticket.paused:
            self.pause()
        ticket.handler.on_sent()

    def close(self) -> None:
        self.ticket = None
        self._leave_pump()
        if self.transport is not None:
            self.transport.abort()

    def pause(self) -> None:
        if self.passage is not None:
            self.passage.stop()
            if self.ticket is None:
                return  # what it came back with was the end of the answer
        self.lend()

    def resume(self) -> None:
        if self.passage is None and self.paused and self.transport is not None and not self.transport.is_closing():
            self.paused = False
            self.transport.resume_reading()

    # ----------------------------------------------------------------- the pump's worker

    def bare_fd(self) -> int:
        """The socket, where another may read from it now: whole chunks come next, and nobody waits; -1 where not."""
        transport, ticket = self.transport, self.ticket
        if transport is None or transport.is_closing() or ticket is None or ticket.paused or self.pool.secured:
            return -1
        if not self.reader.between_chunks:
            return -1
        return cast("int", transport.get_extra_info("socket").fileno())

    def lend(self) -> None:
        """Stop reading; another may."""
        if not self.paused and self.transport is not None and not self.transport.is_closing():
            self.paused = True
            self.transport.pause_reading()

    def go_on(self, rest: bytes) -> None:
        """The pump has stopped: take what it read and did not pass on, and read on."""
        if rest:
            try:
                self.data_received(rest)
            except BaseException:
                if self.transport is not None:
                    self.transport.abort()  # as the loop does where it is the one that called
                raise
        self._read_on()

    def _leave_pump(self) -> None:
        if self.passage is not None:
            self.passage.end()

    # ---------------------------------------------------------- asyncio protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's is one without saying so

    def data_received(self, data: bytes) -> None:
        ticket = self.ticket
        if ticket is None:
            # An answer that nobody asked for: this connection is out of step.
            self.pool.forget(self)
            self.close()
            return
        if not self.answered:
            self.answered = True
            ticket.data = b""  # it will not be sent again
        reader, fault = self.reader, ""
        bodies: list[bytes] = []
        try:
            reader.feed(data, bodies)
        except BadAnswer as exc:
            fault = f"not HTTP/1.1 ({exc})"
        if not self.told and reader.status and reader.head is not None:
            self.told = True
            ticket.handler.on_head(reader.head)
        if bodies and not ticket.done:
            ticket.handler.on_data(bodies[0] if len(bodies) == 1 else b"".join(bodies))
        if len(data) >= FAIR_BYTES:
            self._let_others_read()
        if fault:
            self._garbage(ticket, fault)
        elif reader.complete:
            self._complete(ticket)

    def _let_others_read(self) -> None:
        """A socket that is never empty would keep the loop to itself: one large read a turn is its share."""
        if not self.paused:
            self.pause()
            self.pool.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if self.ticket is None or not self.ticket.paused:
            self.resume()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        """A large body takes its time; it lies in memory in any case."""

    def resume_writing(self) -> None:
        return

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave_pump()
        self.pool.forget(self)
        ticket, self.ticket = self.ticket, None
        if ticket is None or ticket.done:
            return
        if not self.answered and ticket.reused and self.pool.time() - ticket.sent_at < self.pool.stale_s:
            self.pool.resend(ticket)
        elif self.reader.until_eof and exc is None:
            ticket.finish()
        else:
            reason = str(exc) if exc is not None else "connection closed"
            ticket.fail(Failure(FailureKind.CLOSED, reason, answered=self.answered))

    # -------------------------------------------------------------------- internals

    def _complete(self, ticket: Ticket) -> None:
        """Free the connection first: what the handler does next may need one."""
        self.ticket = None
        self.resume()
        if self.reader.keep and not self.reader.excess and not ticket.done:
            self.pool.put_back(self)
        else:
            self.close()
        ticket.finish()

    def _garbage(self, ticket: Ticket, detail: str) -> None:
        self.close()
        ticket.fail(Failure(FailureKind.GARBAGE, detail, answered=True))


class WorkerPool:
    """The connections to one worker."""

    def __init__(
        self,
        host: str,
        port: int,
        tls: ClientTls | None = None,
        *,
        idle_s: float = 4.0,
        max_idle: int = 1024,
        connect_s: float = 5.0,
        stale_s: float = 1.0,
    ) -> None:
        self.host = host
        self.port = port
        self.stale_s = stale_s
        """A reused connection that dies this soon was closed before the request came; later, the worker had it."""
        self.secured = tls is not None
        self._tls = tls
        self._server_name = None if tls is None else tls.server_name or host
        self._idle: list[WorkerConnection] = []
        """The one that was used last is the last."""
        self._idle_s = idle_s
        self._max_idle = max_idle
        self._connect_s = connect_s
        self.loop = asyncio.get_running_loop()
        self.time = self.loop.time
        self._closed = False

    def configure(self, idle_s: float, max_idle: int, connect_s: float) -> None:
        """Use other settings from now on."""
        self._idle_s, self._max_idle, self._connect_s = idle_s, max_idle, connect_s

    def request(self, data: bytes, handler: Handler, not_after: float | None = None) -> Ticket:
        """Send a whole request; the handler hears what comes of it, possibly before this returns."""
        ticket = Ticket(self, data, handler, not_after)
        now = self.time()
        oldest = now - self._idle_s
        while self._idle:
            connection = self._idle.pop()
            transport = connection.transport
            if connection.idle_since >= oldest and transport is not None and not transport.is_closing():
                ticket.reused = True
                self._carry(connection, ticket, now)
                return ticket
            connection.close()
        self._open(ticket)
        return ticket

    def resend(self, ticket: Ticket) -> None:
        """A reused connection died before any byte of an answer: nothing was processed, use a new one."""
        ticket.reused = False
        ticket.connection = None
        self._open(ticket)

    def put_back(self, connection: WorkerConnection) -> None:
        """Keep an idle connection for the next request."""
        if self._closed or len(self._idle) >= self._max_idle:
            connection.close()
            return
        connection.idle_since = self.time()
        self._idle.append(connection)

    def forget(self, connection: WorkerConnection) -> None:
        """A connection ended; it may have been idle."""
        if connection.ticket is None and self._idle:
            try:
                self._idle.remove(connection)
            except ValueError:
                return

    def expire(self) -> None:
        """Close what has been idle for too long; certificates that have changed are for the next connections."""
        if self._tls is not None and self._tls.refresh():
            self._close_idle()
        oldest, expired = self.time() - self._idle_s, 0
        for connection in self._idle:
            if connection.idle_since >= oldest:
                break
            expired += 1
        closing, self._idle = self._idle[:expired], self._idle[expired:]
        for connection in closing:
            connection.close()

    def close(self) -> None:
        """Close idle connections and take none back; running requests end by themselves."""
        self._closed = True
        self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _carry(self, connection: WorkerConnection, ticket: Ticket, now: float) -> None:
        """Send on a connection that is there, unless getting one has taken too long for this request."""
        if ticket.not_after is not None and time.monotonic() >= ticket.not_after:
            self.put_back(connection)
            ticket.fail(Failure(FailureKind.LATE, "no connection in time for what was to be pulled"))
        else:
            connection.send(ticket, now)

    def _open(self, ticket: Ticket) -> None:
        ticket.task = self.loop.create_task(self._connect(ticket))

    async def _connect(self, ticket: Ticket) -> None:
        try:
            async with asyncio.timeout(self._connect_s):
                _, made = await self.loop.create_connection(
                    lambda: cast("asyncio.Protocol", WorkerConnection(self)),
                    self.host,
                    self.port,
                    ssl=None if self._tls is None else self._tls.context,
                    server_hostname=self._server_name,
                )
        except TimeoutError:
            ticket.fail(Failure(FailureKind.CONNECT, "no connection in time"))
            return
        except OSError as exc:
            ticket.fail(Failure(FailureKind.CONNECT, exc.strerror or type(exc).__name__))
            return
        connection = cast("WorkerConnection", made)
        ticket.task = None
        if ticket.done:
            connection.close()
        elif connection.transport is None or connection.transport.is_closing():
            ticket.fail(Failure(FailureKind.CONNECT, "connection closed at once"))
        else:
            self._carry(connection, ticket, self.time())
