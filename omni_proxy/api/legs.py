"""The legs of a request on the data road: each sends one HTTP request to a worker and turns its answer into events.

What both have in common, and the prefill leg; `decode_leg` has the other one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from msgspec import Raw

from omni_proxy.api.exchange import Answer, Exchange
from omni_proxy.api.sse import abandons
from omni_proxy.api.timing import HANDOFF, QUEUE
from omni_proxy.messages import Event, Failure, FailureKind, Lease, LegFailed, LegSent, PrefillDone, Usage
from omni_proxy.workers.answer import Head
from omni_proxy.workers.connectors.answers import GarbageAnswer, PrefillAnswer
from omni_proxy.workers.connectors.base import Connector
from omni_proxy.workers.http import Ticket

if TYPE_CHECKING:
    pass

Post = Callable[[Event], None]
Clock = Callable[[], float]

MAX_ANSWER_BYTES: Final = 256 << 20
"""Largest unstreamed answer that is held in memory."""


class Leg(ABC):
    """What both legs share: the ticket, the clock of the last sign of life, the buffered answer."""

    __slots__ = (
        "_body",
        "_post",
        "_size",
        "exchange",
        "head",
        "last_sign",
        "lease",
        "parked",
        "status",
        "tell_end",
        "ticket",
        "time",
    )

    def __init__(self, exchange: Exchange, lease: Lease, post: Post, time: Clock) -> None:
        self.exchange = exchange
        self.lease = lease
        self.time = time
        """The loop's clock."""
        self.ticket: Ticket | None = None
        self.parked: Callable[[Raw | None], None] | None = None
        """Sends the leg, with what the other side said; None: it was sent."""
        self.tell_end: Callable[[], None] | None = None
        """Has its worker end the request; None: closing the connection does."""
        self.status = 0
        """The worker's status; 0: its answer has not begun."""
        self.head: Head | None = None
        """None: its answer has not begun."""
        self.last_sign = time()
        self._post = post
        self._body: list[bytes] = []
        self._size = 0

    def on_sent(self) -> None:
        self._post(LegSent(self.lease))

    def on_head(self, head: Head) -> None:
        self.last_sign = self.time()
        self.status = head.status
        self.head = head

    def on_data(self, data: bytes) -> None:
        self.last_sign = self.time()
        self._size += len(data)
        if self._size > MAX_ANSWER_BYTES:
            self.cut(Failure(FailureKind.GARBAGE, "the answer is too large", answered=True))
        else:
            self._body.append(data)

    def heard_at(self) -> float:
        """When there was a last sign of life."""
        return self.last_sign

    @property
    def begun(self) -> bool:
        """Has a part of the answer's body come?"""
        return self._size > 0

    @property
    def held_up(self) -> bool:
        """Does this leg wait for the other one? Then the other one's time limits are the ones that count."""
        return self.parked is not None

    def unpark(self, said: Raw | None) -> None:
        """The other side is ready for it: send a leg that was not sent. `said`: what it told, where it did."""
        send, self.parked = self.parked, None
        if send is not None:
            self.last_sign = self.time()
            send(said)

    def prefill_answered(self) -> None:
        """The P leg beside this one has succeeded."""
        return

    @abstractmethod
    def on_end(self) -> None: ...

    def on_failure(self, failure: Failure) -> None:
        if self.exchange.timing is not None:
            self.exchange.timing.mark(QUEUE)
        self._ended(LegFailed(self.lease, failure))

    def cut(self, failure: Failure) -> None:
        """End the leg from our side and report it."""
        self.close()
        self.on_failure(failure)

    def close(self) -> None:
        """End the request under the leg, as its engine understands it; nothing more is heard of it."""
        ticket, self.ticket = self.ticket, None
        if ticket is None or ticket.done:
            return
        ticket.abort()
        if self.tell_end is not None and ticket.sent_at:
            self.tell_end()

    def _ended(self, event: Event) -> None:
        legs, attempt = self.exchange.legs, self.lease.attempt
        if attempt in legs:
            del legs[attempt]
        # The ticket knows us: without this every leg would be a cycle for the collector.
        self.ticket = None
        self._post(event)

    def _garbage(self, detail: str) -> None:
        self._ended(LegFailed(self.lease, Failure(FailureKind.GARBAGE, detail, self.status, answered=True)))

    def _lines(self) -> bytes:
        """What the client gets of the answer's head."""
        return b"" if self.head is None else self.head.lines

    def _body_bytes(self) -> bytes:
        return self._body[0] if len(self._body) == 1 else b"".join(self._body)

    def _failed_with_status(self) -> None:
        if self.status < 400:
            # Redirects name internal addresses, and nothing else below 400 is an answer.
            self._garbage(f"status {self.status}")
            return
        answer = Answer(self.status, self._lines(), self._body_bytes())
        self.exchange.answers[self.lease.attempt] = answer
        detail = f"status {self.status}"
        if self.status == 503 and abandons(answer.body):
            # It had begun: the handoff is spent, unlike that of a worker which refuses at once.
            failure = Failure(FailureKind.GAVE_UP, detail)
        else:
            failure = Failure(FailureKind.STATUS, detail, self.status, answered=True)
        self._ended(LegFailed(self.lease, failure))


class PrefillLeg(Leg):
    """Asks P for the prompt's KV; its answer is small and never shown to a client."""

    __slots__ = ("_connector",)

    def __init__(self, exchange: Exchange, lease: Lease, post: Post, time: Clock, connector: Connector) -> None:
        super().__init__(exchange, lease, post, time)
        self._connector = connector

    def on_end(self) -> None:
        if self.status != 200:
            self._failed_with_status()
            return
        try:
            answer = self._connector.read_prefill(self._body_bytes())
        except GarbageAnswer as exc:
            self._garbage(str(exc))
            return
        self._succeeded(answer)

    def not_needed(self) -> None:
        """D makes its answer without having asked for this leg."""
        self.parked = None
        self._succeeded(PrefillAnswer(None, Usage()))

    def _succeeded(self, answer: PrefillAnswer) -> None:
        exchange = self.exchange
        exchange.handoff = answer.handoff
        exchange.handoff_from = self.lease.worker
        exchange.prefill_cached = answer.usage.cached_tokens
        exchange.prefill_pending = False
        if exchange.timing is not None:
            exchange.timing.mark(HANDOFF)
        self._ended(PrefillDone(self.lease, answer.handoff is not None, usage=answer.usage))
        if exchange.legs:
            for other in list(exchange.legs.values()):
                other.prefill_answered()
