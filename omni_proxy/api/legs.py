"""The two legs of a request on the data road: each sends one HTTP request to a worker and turns its answer into events.

The core hears that a leg was sent, that its first token passed, and how it ended. Everything between goes straight
from the worker's socket to the client's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from omni_proxy.api.exchange import Answer, Exchange
from omni_proxy.api.http_out import passed_on
from omni_proxy.api.sse import StreamScan, WithUsage, read_usage, splice
from omni_proxy.messages import (
    DecodeDone,
    Event,
    Failure,
    FailureKind,
    FirstToken,
    Lease,
    LegFailed,
    LegSent,
    PrefillDone,
    Usage,
)
from omni_proxy.workers.connectors.base import Connector, GarbageAnswer
from omni_proxy.workers.http import Headers, Ticket

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

Post = Callable[[Event], None]

MAX_ANSWER_BYTES: Final = 256 << 20
"""Largest unstreamed answer that is held in memory."""
_ANSWER = msgspec.json.Decoder(WithUsage)
_STREAM_HEADERS: Final = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Leg(ABC):
    """What both legs share: the ticket, the clock of the last sign of life, the buffered answer."""

    __slots__ = ("_body", "_post", "_size", "exchange", "headers", "last_sign", "lease", "loop", "status", "ticket")

    def __init__(self, exchange: Exchange, lease: Lease, post: Post, loop: AbstractEventLoop) -> None:
        self.exchange = exchange
        self.lease = lease
        self.loop = loop
        self.ticket: Ticket | None = None
        self.status = 0
        """The worker's status; 0: its answer has not begun."""
        self.headers: Headers = []
        self.last_sign = loop.time()
        self._post = post
        self._body: list[bytes] = []
        self._size = 0

    def on_sent(self) -> None:
        self._post(LegSent(self.lease))

    def on_head(self, status: int, headers: Headers) -> None:
        self.last_sign = self.loop.time()
        self.status = status
        self.headers = headers

    def on_data(self, data: bytes) -> None:
        self.last_sign = self.loop.time()
        self._size += len(data)
        if self._size > MAX_ANSWER_BYTES:
            self.cut(Failure(FailureKind.GARBAGE, "the answer is too large", answered=True))
        else:
            self._body.append(data)

    @abstractmethod
    def on_end(self) -> None: ...

    def on_failure(self, failure: Failure) -> None:
        self._ended(LegFailed(self.lease, failure))

    def cut(self, failure: Failure) -> None:
        """End the leg from our side and report it."""
        if self.ticket is not None:
            self.ticket.abort()
        self.on_failure(failure)

    def _ended(self, event: Event) -> None:
        self.exchange.legs.pop(self.lease.attempt, None)
        self._post(event)

    def _body_bytes(self) -> bytes:
        return self._body[0] if len(self._body) == 1 else b"".join(self._body)

    def _failed_with_status(self) -> None:
        answer = Answer(self.status, passed_on(self.headers), self._body_bytes())
        self.exchange.answers[self.lease.attempt] = answer
        detail = f"status {self.status}"
        self._ended(LegFailed(self.lease, Failure(FailureKind.STATUS, detail, self.status, answered=True)))


class PrefillLeg(Leg):
    """Asks P for the prompt's KV; its answer is small and never shown to a client."""

    __slots__ = ("_connector",)

    def __init__(
        self, exchange: Exchange, lease: Lease, post: Post, loop: AbstractEventLoop, connector: Connector
    ) -> None:
        super().__init__(exchange, lease, post, loop)
        self._connector = connector

    def on_end(self) -> None:
        if self.status != 200:
            self._failed_with_status()
            return
        try:
            answer = self._connector.read_prefill(self._body_bytes())
        except GarbageAnswer as exc:
            self._ended(LegFailed(self.lease, Failure(FailureKind.GARBAGE, str(exc), 200, answered=True)))
            return
        self.exchange.handoff = answer.handoff
        self.exchange.handoff_from = self.lease.worker
        self.exchange.prefill_cached = answer.usage.cached_tokens
        self._ended(PrefillDone(self.lease, answer.handoff is not None, usage=answer.usage))


class DecodeLeg(Leg):
    """Asks D for the answer and relays it: a stream as it comes, an object when it is whole."""

    __slots__ = ("_cached", "_forced", "_scan")

    def __init__(
        self, exchange: Exchange, lease: Lease, post: Post, loop: AbstractEventLoop, *, handed_over: bool, forced: bool
    ) -> None:
        super().__init__(exchange, lease, post, loop)
        self._cached = exchange.prefill_cached if handed_over else None
        self._forced = forced
        self._scan: StreamScan | None = None
        """Looks at the stream; None where the answer is not one."""

    def on_head(self, status: int, headers: Headers) -> None:
        super().on_head(status, headers)
        content_type = next((value for name, value in headers if name == b"content-type"), b"")
        if status == 200 and content_type.startswith(b"text/event-stream"):
            self._scan = StreamScan(strip_usage=self._forced, cached_tokens=self._cached)

    def on_data(self, data: bytes) -> None:
        scan = self._scan
        if scan is None:
            super().on_data(data)
            return
        self.last_sign = self.loop.time()
        seen = scan.first_content
        data = scan.feed(data)
        if data:
            self._relay(data)
        if scan.first_content and not seen:
            self._post(FirstToken(self.lease))

    def on_end(self) -> None:
        if self._scan is not None:
            self._end_stream(self._scan)
        elif self.status != 200:
            self._failed_with_status()
        else:
            self._end_object()

    def on_failure(self, failure: Failure) -> None:
        if self._scan is not None:
            self._relay(self._scan.flush())
        super().on_failure(failure)

    def _relay(self, data: bytes) -> None:
        """The head goes out with the first bytes of the body: until then another worker may still take over."""
        exchange = self.exchange
        if not exchange.committed and data:
            kept = [header for header in passed_on(self.headers) if header[0] != b"cache-control"]
            exchange.open_stream(200, [*kept, *_STREAM_HEADERS])
        exchange.send(data)

    def _end_stream(self, scan: StreamScan) -> None:
        self._relay(scan.flush())
        if not scan.done:
            detail = "the stream ended without [DONE]"
            self._ended(LegFailed(self.lease, Failure(FailureKind.CLOSED, detail, answered=True)))
            return
        self.exchange.end_stream()
        self.exchange.complete = True
        self._ended(DecodeDone(self.lease, scan.usage))

    def _end_object(self) -> None:
        body = self._body_bytes()
        usage, patched = Usage(), None
        try:
            raw = _ANSWER.decode(body).usage
            if bytes(raw) != b"null":
                usage, patched = read_usage(raw, self._cached)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self._ended(LegFailed(self.lease, Failure(FailureKind.GARBAGE, "not a JSON answer", 200, answered=True)))
            return
        if patched is not None:
            body = splice(body, bytes(raw), patched)
        self.exchange.respond(200, passed_on(self.headers), body)
        self.exchange.complete = True
        self._ended(DecodeDone(self.lease, usage))
