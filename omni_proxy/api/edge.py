"""The edge: carries the core's effects out and brings their outcomes back as events.

Everything here runs in callbacks of one event loop. No state of the core is kept here; what is kept (exchanges, legs,
sockets) can be lost without the core losing count, because every outcome comes back under a lease.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, assert_never

from omni_proxy.api.exchange import ClientSide, Exchange
from omni_proxy.api.foresight import Foresight
from omni_proxy.api.intake import Intake
from omni_proxy.api.legs import Leg, Post, PrefillLeg
from omni_proxy.api.resumable import ResumeRule
from omni_proxy.api.served import ServedModels
from omni_proxy.api.sse import MARKS
from omni_proxy.api.starting import Starter
from omni_proxy.api.trace_context import TraceContexts
from omni_proxy.call import Call
from omni_proxy.errors import ErrorCode, Rejected
from omni_proxy.lifecycle.enums import COMPLETED, PREWARM_LEG
from omni_proxy.messages import (
    Abort,
    Cancelled,
    Close,
    Effect,
    Failure,
    FailureKind,
    Foresee,
    Forget,
    Lease,
    Prewarm,
    StartDecode,
    StartPrefill,
    Tokenize,
    Tokenized,
)
from omni_proxy.observe.edge_counts import EdgeCounts
from omni_proxy.observe.edge_news import EdgeNews
from omni_proxy.relay.pump import pump_of
from omni_proxy.workers.upstream import Upstream

_LAST_DIGITS: Final = [f"{number:02x}" for number in range(256)]


class CountTokens(Protocol):
    """Counts a call's prompt off the event loop and reports `Tokenized`."""

    def __call__(self, rid: str, call: Call) -> None: ...


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """Seconds that a worker or a client may keep us waiting."""

    first_byte_s: float = 600.0
    inter_chunk_s: float = 300.0
    client_send_s: float = 60.0
    tokenize_s: float = 10.0
    """After this a request goes on with an estimate of its length: tokenising is a help, not a condition."""


class Edge:
    """All exchanges of one front process."""

    def __init__(
        self,
        post: Post,
        upstreams: Mapping[str, Upstream],
        count_tokens: CountTokens | None,
        limits: EdgeLimits,
        on_closed: Callable[[Exchange, Close], None],
        on_rejected: Callable[[Exchange, Rejected], None],
        prefix: str = "",
        served: ServedModels | None = None,
    ) -> None:
        self.post = post
        self.exchanges: dict[str, Exchange] = {}
        self.prefix = prefix or secrets.token_hex(4)
        """In front of every rid of this process, so that fronts never collide."""
        self.counted = EdgeCounts()
        self.traces: TraceContexts | None = None
        """Begins the trace context of each request; None: there are no traces."""
        self._upstreams = upstreams
        self._count_tokens = count_tokens
        self._limits = limits
        self._on_closed = on_closed
        self._on_rejected = on_rejected
        self._serial = 0
        self._rid_begin = self.prefix + "000000"
        """What the next ids begin with: all but their last two digits."""
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        served = ServedModels(others_counted=True) if served is None else served
        self.foresight = Foresight(post, self._loop, count_tokens)
        self.intake = Intake(self, upstreams, served, on_rejected, self._loop)
        self.starter = Starter(self.exchanges, upstreams, post, self.foresight, self.counted, self._time)

    def start_pump(self) -> None:
        """Move streams without Python from now on, where that can be done."""
        self.starter.pump = pump_of(self._loop, MARKS)

    def stop_pump(self) -> None:
        """No stream is left."""
        pump, self.starter.pump = self.starter.pump, None
        if pump is not None:
            pump.close()

    def news(self) -> EdgeNews | None:
        """What has been counted since the last time; None: nothing."""
        if self.starter.pump is not None:
            self.counted.gaps(*self.starter.pump.gaps())
        return self.counted.take()

    @property
    def counts(self) -> bool:
        """Is there somebody who counts tokens?"""
        return self._count_tokens is not None

    @property
    def first_byte_s(self) -> float:
        """How long a worker may take for the first byte of its answer."""
        return self._limits.first_byte_s

    def resume(self, rule: ResumeRule) -> None:
        """Say whose streams are continued when their worker dies, from the next decode leg on."""
        self.starter.resume = rule

    def foresee(self, on: bool, priority: int | None) -> None:
        """Say whether answers are kept for what next turns begin with, and with what priority that is computed."""
        self.foresight.on, self.foresight.priority = on, priority

    def limit(self, limits: EdgeLimits) -> None:
        """Use other time limits from now on, also for what runs."""
        self._limits = limits

    # ---------------------------------------------------------------- from clients

    def new_rid(self) -> str:
        """An id that no other request of any front has."""
        self._serial += 1
        last = self._serial & 255
        if last == 0:
            self._rid_begin = self.prefix + hex(self._serial >> 8)[2:].rjust(6, "0")
        return self._rid_begin + _LAST_DIGITS[last]

    def new_exchange(self, client: ClientSide, request_id: bytes, kept_alive: bool, chunked: bool) -> Exchange:
        """Begin an exchange; it is known to others once its call has been parsed."""
        rid = self.new_rid()
        return Exchange(rid, request_id or rid.encode(), client, kept_alive, chunked)

    def reject(self, exchange: Exchange, rejected: Rejected) -> None:
        """The client's fault, found before the core hears of the request."""
        exchange.more_headers += rejected.headers
        exchange.respond_error(rejected.code, rejected.message, rejected.param, rejected.retry_after_s)
        client, exchange.client = exchange.client, None
        if client is not None:
            client.finished(close=not exchange.kept_alive)
        self._on_rejected(exchange, rejected)

    def client_left(self, exchange: Exchange) -> None:
        """The client's connection ended before the response did."""
        exchange.client = None
        encoding, exchange.encoding = exchange.encoding, None
        if encoding is not None:
            encoding.stop()
            self._on_rejected(exchange, Rejected(ErrorCode.CLIENT_GONE, "The client left."))
        elif exchange.family is not None:
            exchange.family.left()
        elif exchange.rid in self.exchanges:
            self.post(Cancelled(exchange.rid))

    def client_slow(self, exchange: Exchange) -> None:
        """The client does not keep up: stop reading from the worker."""
        exchange.slow_since = self._time()
        if exchange.family is not None:
            for part in exchange.family.parts:
                self.client_slow(part)
        for leg in list(exchange.legs.values()):  # the pause of one may bring its end
            if leg.ticket is not None:
                leg.ticket.pause()

    def client_ready(self, exchange: Exchange) -> None:
        """The client has caught up."""
        exchange.slow_since = None
        if exchange.family is not None:
            for part in exchange.family.parts:
                self.client_ready(part)
        for leg in exchange.legs.values():
            leg.last_sign = self._time()
            if leg.ticket is not None:
                leg.ticket.resume()

    # ---------------------------------------------------------------- from the core

    def perform(self, effect: Effect) -> None:
        """Carry out one effect of the core."""
        # What every request brings, by the exact type: a class pattern costs a call for each that does not fit.
        if type(effect) is StartPrefill:
            self.starter.start_prefill(effect.lease, effect.peer)
        elif type(effect) is StartDecode:
            self.starter.start_decode(effect.lease, effect.peer, effect.pull_until)
        elif type(effect) is Close:
            self._close(effect)
        else:
            self._perform_other(effect)

    def _perform_other(self, effect: Abort | Tokenize | Foresee | Forget | Prewarm) -> None:
        match effect:
            case Abort(lease):
                if lease.leg is PREWARM_LEG:
                    self.foresight.abort(lease)
                else:
                    self._abort(lease)
            case Tokenize(rid):
                self._tokenize(rid)
            case Foresee(rid):
                self.foresight.foresee(self.exchanges.get(rid), rid)
            case Forget(rid):
                self.foresight.forget(rid)
            case Prewarm(lease):
                self.foresight.prewarm(lease, self._upstreams.get(lease.worker), self._limits.first_byte_s)
            case _:
                assert_never(effect)

    def _tokenize(self, rid: str) -> None:
        exchange = self.exchanges.get(rid)
        if exchange is not None and exchange.call is not None and self._count_tokens is not None:
            exchange.tokenizing_since = self._time()
            self._count_tokens(rid, exchange.call)

    def _abort(self, lease: Lease) -> None:
        exchange = self.exchanges.get(lease.rid)
        leg = exchange.legs.pop(lease.attempt, None) if exchange is not None else None
        if exchange is not None and isinstance(leg, PrefillLeg):
            self.starter.forget_asking(exchange)
        if leg is not None:
            leg.close()

    def _close(self, close: Close) -> None:
        exchange = self.exchanges.pop(close.rid, None)
        if exchange is None:
            return
        self.starter.forget_asking(exchange)
        exchange.close(close)
        self._release_kv(exchange, close)
        self._on_closed(exchange, close)
        exchange.call = exchange.resumption = exchange.kept = (
            None  # an idle connection remembers its last exchange; these are large
        )

    def _release_kv(self, exchange: Exchange, close: Close) -> None:
        """P answered and D will not come: what P keeps is of no use to anybody."""
        if close.outcome is not COMPLETED:
            self.starter.give_up_kv(exchange)

    # -------------------------------------------------------------------- time limits

    def sweep(self) -> None:
        """End what has kept us waiting for too long; called a few times a second."""
        now = self._time()
        self.foresight.sweep(now)
        for exchange in list(self.exchanges.values()):
            client = exchange.client
            if client is not None and client.has_left():
                client.drop()
            elif exchange.slow_since is not None:
                if now - exchange.slow_since > self._limits.client_send_s and client is not None:
                    client.drop()
            else:
                self._check_tokenizing(exchange, now)
                for leg in list(exchange.legs.values()):
                    self._check_leg(leg, now)

    def _check_tokenizing(self, exchange: Exchange, now: float) -> None:
        since = exchange.tokenizing_since
        if since is not None and now - since > self._limits.tokenize_s:
            exchange.tokenizing_since = None
            self.post(Tokenized(exchange.rid, None))

    def _check_leg(self, leg: Leg, now: float) -> None:
        """The head alone is no answer yet: engines send it before they have computed anything."""
        if leg.held_up:
            return
        waited = now - leg.heard_at()
        if not leg.begun and waited > self._limits.first_byte_s:
            detail = f"no answer within {self._limits.first_byte_s:g} s"
            leg.cut(Failure(FailureKind.TIMEOUT, detail, answered=leg.status != 0))
        elif leg.begun and waited > self._limits.inter_chunk_s:
            detail = f"nothing more within {self._limits.inter_chunk_s:g} s"
            leg.cut(Failure(FailureKind.TIMEOUT, detail, answered=True))
