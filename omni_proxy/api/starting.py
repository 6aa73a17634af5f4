"""How legs begin: what a worker is asked, under which id, and when it is sent.

Where one side of a pair asks the other for its part, a leg is parked until then.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import msgspec

from omni_proxy.api.bodies import RETURN_IDS, USAGE_ON_DEMAND, for_worker, forced_usage
from omni_proxy.api.decode_leg import DecodeLeg
from omni_proxy.api.encoding import with_encoded
from omni_proxy.api.exchange import Exchange, renamed_id, renames
from omni_proxy.api.foresight import Foresight
from omni_proxy.api.legs import Clock, Leg, Post, PrefillLeg
from omni_proxy.api.resumable import ResumeRule
from omni_proxy.api.resumption import Resumption
from omni_proxy.api.timing import DECODE, PREFILL
from omni_proxy.call import Call, append_fields
from omni_proxy.messages import Failure, FailureKind, Lease, LegFailed
from omni_proxy.observe.edge_counts import EdgeCounts
from omni_proxy.relay.pump import Pump
from omni_proxy.workers.connectors.base import Connector, Order
from omni_proxy.workers.connectors.pair import Pair
from omni_proxy.workers.upstream import Upstream


class Starter:
    """Begins the legs of all exchanges of one front."""

    def __init__(
        self,
        exchanges: Mapping[str, Exchange],
        upstreams: Mapping[str, Upstream],
        post: Post,
        foresight: Foresight,
        counted: EdgeCounts,
        time: Clock,
    ) -> None:
        self._exchanges = exchanges
        self._upstreams = upstreams
        self._post = post
        self._foresight = foresight
        self._counted = counted
        self._time = time
        self._random = random.Random(secrets.randbits(128))
        self._asking: dict[bytes, Exchange] = {}
        """By the id under which D may ask."""
        self.resume = ResumeRule()
        """Whose streams are continued when their worker dies."""
        self.callback_url = ""
        """Where workers that go first ask for their prefill; empty until somebody listens there."""
        self.pump: Pump | None = None
        """Moves streams that nobody has to look at; None: Python does."""

    def start_prefill(self, lease: Lease, peer: str | None) -> None:
        """Send the P leg; `peer`: D's name where both run together."""
        exchange, upstream = self._exchanges.get(lease.rid), self._upstreams.get(lease.worker)
        if exchange is None or exchange.call is None:
            return
        if upstream is None:
            self._post(LegFailed(lease, Failure(FailureKind.CONNECT, "no such worker")))
            return
        if exchange.timing is not None:
            exchange.timing.mark(PREFILL)
        self.give_up_kv(exchange)
        asked = self._to_ask(exchange, exchange.call, fresh=True)
        exchange.prefill_pending = peer is not None
        if peer is not None or exchange.room == 0 or asked is not exchange.call:
            exchange.room = self._random.getrandbits(63)
        connector = upstream.connector
        pair = self._pair(exchange, upstream, self._upstreams.get(peer) if peer is not None else None)
        call = for_worker(asked, connector, upstream.name_of(asked.model))
        leg = PrefillLeg(exchange, lease, self._post, self._time, connector)
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

    def start_decode(self, lease: Lease, peer: str | None, pull_until: float | None) -> None:
        """Send the D leg; `peer`: P's name, `pull_until`: the instant from which P may have given up the KV."""
        exchange, upstream = self._exchanges.get(lease.rid), self._upstreams.get(lease.worker)
        if exchange is None or exchange.call is None:
            return
        if upstream is None:
            self._post(LegFailed(lease, Failure(FailureKind.CONNECT, "no such worker")))
            return
        if exchange.timing is not None:
            exchange.timing.mark(DECODE)
        prefill = self._upstreams.get(peer) if peer is not None else None
        if peer is None:
            self.give_up_kv(exchange)
        connector = upstream.connector
        exchange.kept = self._foresight.watch(exchange.call, prefill) if self._foresight.on else None
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
            self._post,
            self._time,
            handed_over=peer is not None,
            forced=forced,
            counts=self._counted,
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
        exchange.resumption = None if reports is None or not self.resume.covers(call) else Resumption(call, reports)
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

    def give_up_kv(self, exchange: Exchange) -> None:
        """Free P's blocks now where the engine has a call for it, and take P's parameters for gone."""
        handoff, exchange.handoff = exchange.handoff, None
        if handoff is None:
            return
        upstream = self._upstreams.get(exchange.handoff_from or "")
        if upstream is not None:
            upstream.release(handoff)

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

    def forget_asking(self, exchange: Exchange) -> None:
        """Nobody may ask for this exchange's prefill any more."""
        if exchange.ask_id:
            self._asking.pop(exchange.ask_id, None)


def _request_id(upstream: Upstream, pair: Pair) -> bytes:
    """The id under which a leg is sent."""
    return upstream.connector.request_id(pair) if upstream.names_requests else pair.request_id


def _park(leg: Leg, send: Callable[[msgspec.Raw | None], None]) -> None:
    """Send a leg only when the other side is ready for it."""
    leg.parked = send
    leg.exchange.legs[leg.lease.attempt] = leg
