"""The edge: carries the core's effects out and brings their outcomes back as events.

Everything here runs in callbacks of one event loop. No state of the core is kept here; what is kept (exchanges, legs,
sockets) can be lost without the core losing count, because every outcome comes back under a lease.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, assert_never

import msgspec

from omni_proxy.api.bodies import RETURN_IDS, USAGE_ON_DEMAND, for_worker, forced_usage
from omni_proxy.api.decode_leg import DecodeLeg
from omni_proxy.api.encoding import with_encoded
from omni_proxy.api.exchange import ClientSide, Exchange, renamed_id, renames
from omni_proxy.api.foresight import Foresight
from omni_proxy.api.intake import Intake
from omni_proxy.api.legs import Leg, Post, PrefillLeg
from omni_proxy.api.resumable import ResumeRule
from omni_proxy.api.resumption import Resumption
from omni_proxy.api.served import ServedModels
from omni_proxy.api.sse import MARKS
from omni_proxy.api.timing import DECODE, PREFILL
from omni_proxy.api.trace_context import TraceContexts
from omni_proxy.call import Call, append_fields
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
    LegFailed,
    Prewarm,
    StartDecode,
    StartPrefill,
    Tokenize,
    Tokenized,
)
from omni_proxy.observe.edge_counts import EdgeCounts
from omni_proxy.relay.pump import Pump, pump_of
from omni_proxy.workers.connectors.base import Connector, Order
from omni_proxy.workers.connectors.pair import Pair
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
        self._resume = ResumeRule()
        self._on_closed = on_closed
        self._on_rejected = on_rejected
        self.callback_url = ""
        """Where workers that go first ask for their prefill; empty until somebody listens there."""
        self._asking: dict[bytes, Exchange] = {}
        """By the id under which D may ask."""
        self._serial = 0
        self._rid_begin = self.prefix + "000000"
        """What the next ids begin with: all but their last two digits."""
        self._random = random.Random(secrets.randbits(128))
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        served = ServedModels(others_counted=True) if served is None else served
        self.foresight = Foresight(post, self._loop, count_tokens)
        self.intake = Intake(self, upstreams, served, on_rejected, self._loop)
        self.pump: Pump | None = None
        """Moves streams that nobody has to look at; None: Python does."""

    def start_pump(self) -> None:
        """Move streams without Python from now on, where that can be done."""
        self.pump = pump_of(self._loop, self.counted.gap, MARKS)

    def stop_pump(self) -> None:
        """No stream is left."""
        pump, self.pump = self.pump, None
        if pump is not None:
            pump.close()

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
        self._resume = rule

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
        for leg in exchange.legs.values():
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
            self._start_prefill(effect.lease, effect.peer)
        elif type(effect) is StartDecode:
            self._start_decode(effect.lease, effect.peer, effect.pull_until)
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

    def _start_prefill(self, lease: Lease, peer: str | None) -> None:
        exchange, upstream = self.exchanges.get(lease.rid), self._upstreams.get(lease.worker)
        if exchange is None or exchange.call is None:
            return
        if upstream is None:
            self.post(LegFailed(lease, Failure(FailureKind.CONNECT, "no such worker")))
            return
        if exchange.timing is not None:
            exchange.timing.mark(PREFILL)
        self._give_up_kv(exchange)
        asked = self._to_ask(exchange, exchange.call, fresh=True)
        exchange.prefill_pending = peer is not None
        if peer is not None or exchange.room == 0 or asked is not exchange.call:
            exchange.room = self._random.getrandbits(63)
        connector = upstream.connector
        pair = self._pair(exchange, upstream, self._upstreams.get(peer) if peer is not None else None)
        call = for_worker(asked, connector, upstream.name_of(asked.model))
        leg = PrefillLeg(exchange, lease, self.post, self._time, connector)
        if pair.together and connector.order is Order.DECODE_FIRST:
            self._let_ask(exchange, connector.request_id(pair))
            _park(leg, partial(self._send_prefill, leg, upstream, call, pair))
        else:
            self._send_prefill(leg, upstream, call, pair, None)

    def _send_prefill(
        self, leg: PrefillLeg, upstream: Upstream, call: Call, pair: Pair, asked: msgspec.Raw | None
    ) -> None:
        connector = upstream.connector
        body = connector.prefill_body(call, pair, asked)
        if leg.exchange.encoded:
            body = with_encoded(body, leg.exchange.encoded)
        self._send(leg, upstream, _request_id(upstream, pair), body)

    def _start_decode(self, lease: Lease, peer: str | None, pull_until: float | None) -> None:
        exchange, upstream = self.exchanges.get(lease.rid), self._upstreams.get(lease.worker)
        if exchange is None or exchange.call is None:
            return
        if upstream is None:
            self.post(LegFailed(lease, Failure(FailureKind.CONNECT, "no such worker")))
            return
        if exchange.timing is not None:
            exchange.timing.mark(DECODE)
        prefill = self._upstreams.get(peer) if peer is not None else None
        if peer is None:
            self._give_up_kv(exchange)
        connector = upstream.connector
        exchange.kept = self.foresight.watch(exchange.call, prefill) if self.foresight.on else None
        call = self._to_ask(exchange, exchange.call, fresh=peer is None)
        pair = self._pair(exchange, prefill, upstream)
        extra = connector.decode_fields(call, pair, exchange.handoff)
        forced = call.stream and not call.wants_usage and call.path in USAGE_ON_DEMAND
        name = upstream.name_of(call.model)
        exchange.renames = renames(name, call.asked)
        call = for_worker(call, connector, name)
        if forced:
            extra = [*extra, forced_usage(call)]
        if self._watch(exchange, exchange.call, connector):
            extra = [*extra, RETURN_IDS]
        body = call.body if call.form else append_fields(call, extra)
        if peer is None and exchange.encoded:
            body = with_encoded(body, exchange.encoded)
        leg = DecodeLeg(
            exchange,
            lease,
            self.post,
            self._time,
            handed_over=peer is not None,
            forced=forced,
            counts=self.counted,
            pump=self.pump,
        )
        request_id = _request_id(upstream, pair)
        if request_id != exchange.request_id:
            exchange.renames += renamed_id(request_id, exchange.request_id)
        if pair.together and connector.order is Order.PREFILL_FIRST:
            _park(leg, partial(self._send, leg, upstream, request_id, body))
        else:
            self._send(leg, upstream, request_id, body, not_after=pull_until)

    def _to_ask(self, exchange: Exchange, call: Call, fresh: bool) -> Call:
        """What a worker is asked: the client's call, or one for the rest of its answer. `fresh`: its prompt is next."""
        resumption = exchange.resumption
        if resumption is None or not resumption.resumed:
            return call
        return resumption.continuation() if fresh or resumption.call is None else resumption.call

    def _watch(self, exchange: Exchange, call: Call, connector: Connector) -> bool:
        """Note the stream that begins now, if somebody else may have to go on with it. True: ask for its token ids."""
        resumption = exchange.resumption
        if resumption is not None and resumption.resumed:
            return False
        reports = connector.token_reports
        exchange.resumption = None if reports is None or not self._resume.covers(call) else Resumption(call, reports)
        return exchange.resumption is not None

    def _pair(self, exchange: Exchange, prefill: Upstream | None, decode: Upstream | None) -> Pair:
        return Pair(
            exchange.worker_id,
            exchange.room,
            None if prefill is None else prefill.peer,
            None if decode is None else decode.peer,
            prefill is not None and exchange.prefill_pending,
            self.callback_url,
        )

    def _send(
        self,
        leg: Leg,
        upstream: Upstream,
        request_id: bytes,
        body: bytes,
        _said: msgspec.Raw | None = None,
        not_after: float | None = None,
    ) -> None:
        exchange = leg.exchange
        exchange.legs[leg.lease.attempt] = leg
        call = exchange.leg_call
        assert call is not None
        if upstream.aborts_by_call:
            leg.tell_end = partial(upstream.abort, request_id)
        data = upstream.request(call.path.encode(), exchange.forward, request_id, body, call.content_type)
        leg.ticket = upstream.pool.request(data, leg, not_after)
        if exchange.slow_since is not None:
            leg.ticket.pause()

    def _abort(self, lease: Lease) -> None:
        exchange = self.exchanges.get(lease.rid)
        leg = exchange.legs.pop(lease.attempt, None) if exchange is not None else None
        if exchange is not None and exchange.ask_id and isinstance(leg, PrefillLeg):
            self._asking.pop(exchange.ask_id, None)
        if leg is not None:
            leg.close()

    # ------------------------------------------------------------ D asks for its prefill

    def asked(self, ids: Iterable[bytes], said: msgspec.Raw) -> bool:
        """D asks for its prefill, under one of these ids. False: no request of now has one of them.

        Who asks again is told yes and nothing else happens: his first call has arrived, only its answer has not.
        """
        exchange = next((self._asking[name] for name in ids if name in self._asking), None)
        if exchange is None:
            return False
        for leg in list(exchange.legs.values()):
            if isinstance(leg, PrefillLeg):
                leg.unpark(said)
        return True

    def _let_ask(self, exchange: Exchange, ask_id: bytes) -> None:
        self._asking.pop(exchange.ask_id, None)
        exchange.ask_id = ask_id
        self._asking[ask_id] = exchange

    def _close(self, close: Close) -> None:
        exchange = self.exchanges.pop(close.rid, None)
        if exchange is None:
            return
        if exchange.ask_id:
            self._asking.pop(exchange.ask_id, None)
        exchange.close(close)
        self._release_kv(exchange, close)
        self._on_closed(exchange, close)
        exchange.call = exchange.resumption = exchange.kept = (
            None  # an idle connection remembers its last exchange; these are large
        )

    def _release_kv(self, exchange: Exchange, close: Close) -> None:
        """P answered and D will not come: what P keeps is of no use to anybody."""
        if close.outcome is not COMPLETED:
            self._give_up_kv(exchange)

    def _give_up_kv(self, exchange: Exchange) -> None:
        """Free P's blocks now where the engine has a call for it, and take P's parameters for gone."""
        handoff, exchange.handoff = exchange.handoff, None
        if handoff is None:
            return
        upstream = self._upstreams.get(exchange.handoff_from or "")
        if upstream is not None:
            upstream.release(handoff)

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


def _request_id(upstream: Upstream, pair: Pair) -> bytes:
    """The id under which a leg is sent."""
    return upstream.connector.request_id(pair) if upstream.names_requests else pair.request_id


def _park(leg: Leg, send: Callable[[msgspec.Raw | None], None]) -> None:
    """Send a leg only when the other side is ready for it."""
    leg.parked = send
    leg.exchange.legs[leg.lease.attempt] = leg
