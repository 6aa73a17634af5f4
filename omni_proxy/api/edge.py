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

from omni_proxy.api.division import MAX_PARTS, divide, too_many
from omni_proxy.api.encoding import EncodeFailed, Encoders, Encoding, with_encoded
from omni_proxy.api.exchange import ClientSide, Exchange, renames
from omni_proxy.api.family import Family, Part
from omni_proxy.api.hot import HotRequest, read_call, request_spec
from omni_proxy.api.http_out import JSON_TYPE
from omni_proxy.api.legs import DecodeLeg, Leg, Post, PrefillLeg
from omni_proxy.api.resumable import ResumeRule
from omni_proxy.api.resumption import Resumption
from omni_proxy.api.served import ServedModels
from omni_proxy.call import CHAT, COMPLETIONS, TOKENIZE, Call, Fields, append_fields, encode_fields, form_with_model
from omni_proxy.errors import ErrorCode, Rejected
from omni_proxy.messages import (
    Abort,
    Arrived,
    Cancelled,
    Close,
    Effect,
    Failure,
    FailureKind,
    Lease,
    LegFailed,
    Mode,
    Outcome,
    Role,
    StartDecode,
    StartPrefill,
    Tokenize,
    Tokenized,
)
from omni_proxy.prompts.media import media_of
from omni_proxy.workers.connectors.base import Connector, Order, Pair
from omni_proxy.workers.upstream import Upstream

FORCED_USAGE: Final = ("stream_options", b'{"include_usage":true}')
"""Asked of every D so that streams are counted in true tokens; taken out again before the client."""

RETURN_IDS: Final = ("return_token_ids", b"true")
"""Asked of a D whose stream may have to be continued; taken out again before the client."""

_USAGE_ON_DEMAND: Final = (CHAT, COMPLETIONS)
"""Streams of these end with usage only where it is asked for."""


AnswerHere = Callable[[Call, Callable[[bytes | Rejected], None]], bool]
"""Answers a call without a worker, later; False where it cannot."""


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
        self._upstreams = upstreams
        self._count_tokens = count_tokens
        self._served = ServedModels(others_counted=True) if served is None else served
        self._limits = limits
        self._resume = ResumeRule()
        self._on_closed = on_closed
        self._on_rejected = on_rejected
        self.callback_url = ""
        """Where workers that go first ask for their prefill; empty until somebody listens there."""
        self._asking: dict[bytes, Exchange] = {}
        """By the id under which D may ask."""
        self._serial = 0
        self._random = random.Random(secrets.randbits(128))
        self._loop = asyncio.get_running_loop()
        self._answer_here: AnswerHere | None = None
        self._encoders = Encoders(upstreams, self._loop)

    def counts_tokens(self, model: str) -> bool:
        """Are prompts of this model tokenised before anything else?"""
        return self._count_tokens is not None and self._served.counted(model)

    def serve(self, served: ServedModels) -> None:
        """Use other names of models from now on."""
        self._served = served

    def read(self, hot: HotRequest, body: bytes) -> Call:
        """What a client asks. Raises Rejected."""
        call = read_call(hot, body)
        if not call.model:
            call.model = self._only_model()
        self._served.take(call)
        call.media = media = media_of(call)
        if media:
            call.prompt_bytes = len(body) - sum([item.size for item in media])
        if call.parts > MAX_PARTS and self._must_divide(call):
            raise too_many(call)
        return call

    def _divide(self, exchange: Exchange, call: Call) -> bool:
        """Serve a call for several answers or prompts by several requests; False where one worker can do it."""
        if not self._must_divide(call):
            return False
        family = exchange.family = Family(exchange, call, self.client_left)
        for number, single in enumerate(divide(call)):
            self._serial += 1
            rid = f"{self.prefix}{self._serial:08x}"
            part = Part(family, number, rid, b"%b-%d" % (exchange.request_id, number))
            part.call, part.path = single, exchange.path
            part.forward, part.user_agent = exchange.forward, exchange.user_agent
            part.encoded, part.slow_since = exchange.encoded, exchange.slow_since
            part.spec = request_spec(part, single, len(single.body), self.counts_tokens(single.model))
            family.parts.append(part)
            self.exchanges[rid] = part
        for part in list(family.parts):
            if part.spec is not None and part.client is not None:  # an earlier one may have been refused at once
                self.post(Arrived(part.rid, part.spec))
            else:
                self.exchanges.pop(part.rid, None)
        return True

    def _must_divide(self, call: Call) -> bool:
        """Is there no worker that could make all of its answers by itself?"""
        for upstream in self._upstreams.values():
            member = upstream.member
            serves = not member.models or call.model in member.models
            if serves and member.role in (Role.MIXED, Role.DECODE) and Mode.AGGREGATED in upstream.connector.modes:
                return False
        return True

    def _only_model(self) -> str:
        """The model that is meant by a request which names none (`/tokenize` may)."""
        names = {name for upstream in self._upstreams.values() for name in upstream.member.models}
        if len(names) != 1:
            raise Rejected(ErrorCode.INVALID_VALUE, "'model' is required.", "model")
        return names.pop()

    def resume(self, rule: ResumeRule) -> None:
        """Say whose streams are continued when their worker dies, from the next decode leg on."""
        self._resume = rule

    def limit(self, limits: EdgeLimits) -> None:
        """Use other time limits from now on, also for what runs."""
        self._limits = limits

    # ---------------------------------------------------------------- from clients

    def new_exchange(self, client: ClientSide, request_id: bytes, kept_alive: bool, chunked: bool) -> Exchange:
        """Begin an exchange; it is known to others once its call has been parsed."""
        self._serial += 1
        rid = f"{self.prefix}{self._serial:08x}"
        return Exchange(rid, request_id or rid.encode(), client, kept_alive, chunked)

    def begin(self, exchange: Exchange, call: Call) -> None:
        """Serve an exchange whose call has been read."""
        if call.media and self._encoders.serve(call.model):
            then = partial(self._encoded, exchange, call)
            encoding = exchange.encoding = Encoding(exchange, call, self._encoders, then)
            encoding.start(self._limits.first_byte_s)
        elif not (call.path in TOKENIZE and self._answers_here(exchange, call)):
            self._arrive(exchange, call)

    def answer_with(self, answer: AnswerHere) -> None:
        """Have somebody answer what no worker can be asked for."""
        self._answer_here = answer

    def _answers_here(self, exchange: Exchange, call: Call) -> bool:
        if self._answer_here is None or not self._must_divide(call):
            return False
        members = [upstream.member for upstream in self._upstreams.values()]
        served = any(not member.models or call.model in member.models for member in members)
        return served and self._answer_here(call, partial(self._answered_here, exchange))

    def _answered_here(self, exchange: Exchange, result: bytes | Rejected) -> None:
        if isinstance(result, Rejected):
            self.reject(exchange, result)
            return
        exchange.respond(200, [JSON_TYPE], result)
        client, exchange.client = exchange.client, None
        if client is not None:
            client.finished(close=not exchange.kept_alive)

    def _arrive(self, exchange: Exchange, call: Call) -> None:
        if call.parts > 1 and self._divide(exchange, call):
            return
        self.exchanges[exchange.rid] = exchange
        exchange.spec = spec = request_spec(exchange, call, len(call.body), self.counts_tokens(call.model))
        self.post(Arrived(exchange.rid, spec))

    def _encoded(self, exchange: Exchange, call: Call, failure: EncodeFailed | None) -> None:
        exchange.encoding = None
        if failure is None:
            self._arrive(exchange, call)
            return
        answer, code = failure.answer, failure.code
        if answer is not None:
            exchange.respond(answer.status, answer.headers, answer.body)
            code = ErrorCode.WORKER_ERROR
        else:
            exchange.respond_error(code, failure.detail, None, None)
        client, exchange.client = exchange.client, None
        if client is not None:
            client.finished(close=not exchange.kept_alive)
        self._on_rejected(exchange, Rejected(code, failure.detail))

    def reject(self, exchange: Exchange, rejected: Rejected) -> None:
        """The client's fault, found before the core hears of the request."""
        exchange.respond_error(rejected.code, rejected.message, rejected.param, None)
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
        exchange.slow_since = self._loop.time()
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
            leg.last_sign = self._loop.time()
            if leg.ticket is not None:
                leg.ticket.resume()

    # ---------------------------------------------------------------- from the core

    def perform(self, effect: Effect) -> None:
        """Carry out one effect of the core."""
        match effect:
            case StartPrefill(lease, peer):
                self._start_prefill(lease, peer)
            case StartDecode(lease, peer):
                self._start_decode(lease, peer)
            case Close():
                self._close(effect)
            case Abort(lease):
                self._abort(lease)
            case Tokenize(rid):
                self._tokenize(rid)
            case _:
                assert_never(effect)

    def _tokenize(self, rid: str) -> None:
        exchange = self.exchanges.get(rid)
        if exchange is not None and exchange.call is not None and self._count_tokens is not None:
            exchange.tokenizing_since = self._loop.time()
            self._count_tokens(rid, exchange.call)

    def _start_prefill(self, lease: Lease, peer: str | None) -> None:
        exchange, upstream = self.exchanges.get(lease.rid), self._upstreams.get(lease.worker)
        if exchange is None or exchange.call is None:
            return
        if upstream is None:
            self.post(LegFailed(lease, Failure(FailureKind.CONNECT, "no such worker")))
            return
        self._give_up_kv(exchange)
        asked = self._to_ask(exchange, exchange.call, fresh=True)
        exchange.prefill_pending = peer is not None
        if peer is not None or exchange.room == 0 or asked is not exchange.call:
            exchange.room = self._random.getrandbits(63)
        connector = upstream.connector
        pair = self._pair(exchange, upstream, self._upstreams.get(peer) if peer is not None else None)
        call = _for_worker(asked, connector, upstream.name_of(asked.model))
        leg = PrefillLeg(exchange, lease, self.post, self._loop, connector)
        if pair.together and connector.order is Order.DECODE_FIRST:
            self._let_ask(exchange, connector.request_id(pair))
            _park(leg, partial(self._send_prefill, leg, upstream, call, pair))
        else:
            self._send_prefill(leg, upstream, call, pair, None)

    def _send_prefill(
        self, leg: PrefillLeg, upstream: Upstream, call: Call, pair: Pair, asked: msgspec.Raw | None
    ) -> None:
        connector = upstream.connector
        body = with_encoded(connector.prefill_body(call, pair, asked), leg.exchange.encoded)
        self._send(leg, upstream, connector.request_id(pair), body)

    def _start_decode(self, lease: Lease, peer: str | None) -> None:
        exchange, upstream = self.exchanges.get(lease.rid), self._upstreams.get(lease.worker)
        if exchange is None or exchange.call is None:
            return
        if upstream is None:
            self.post(LegFailed(lease, Failure(FailureKind.CONNECT, "no such worker")))
            return
        prefill = self._upstreams.get(peer) if peer is not None else None
        if peer is None:
            self._give_up_kv(exchange)
        connector = upstream.connector
        call = self._to_ask(exchange, exchange.call, fresh=peer is None)
        pair = self._pair(exchange, prefill, upstream)
        extra = connector.decode_fields(call, pair, exchange.handoff)
        forced = call.stream and not call.wants_usage and call.path in _USAGE_ON_DEMAND
        name = upstream.name_of(call.model)
        exchange.renames = renames(name, call.asked)
        call = _for_worker(call, connector, name)
        if forced:
            extra = [*extra, _forced_usage(call)]
        if self._watch(exchange, exchange.call, connector):
            extra = [*extra, RETURN_IDS]
        body = call.body if call.form else append_fields(call, extra)
        if peer is None:
            body = with_encoded(body, exchange.encoded)
        leg = DecodeLeg(exchange, lease, self.post, self._loop, handed_over=peer is not None, forced=forced)
        request_id = connector.request_id(pair)
        if pair.together and connector.order is Order.PREFILL_FIRST:
            _park(leg, partial(self._send, leg, upstream, request_id, body))
        else:
            self._send(leg, upstream, request_id, body)

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
            exchange.request_id,
            exchange.room,
            None if prefill is None else prefill.peer,
            None if decode is None else decode.peer,
            prefill is not None and exchange.prefill_pending,
            self.callback_url,
        )

    def _send(
        self, leg: Leg, upstream: Upstream, request_id: bytes, body: bytes, _said: msgspec.Raw | None = None
    ) -> None:
        exchange = leg.exchange
        exchange.legs[leg.lease.attempt] = leg
        call = exchange.leg_call
        assert call is not None
        data = upstream.request(call.path.encode(), exchange.forward, request_id, body, call.content_type)
        leg.ticket = upstream.pool.request(data, leg)
        if exchange.slow_since is not None:
            leg.ticket.pause()

    def _abort(self, lease: Lease) -> None:
        exchange = self.exchanges.get(lease.rid)
        leg = exchange.legs.pop(lease.attempt, None) if exchange is not None else None
        if exchange is not None and exchange.ask_id and isinstance(leg, PrefillLeg):
            self._asking.pop(exchange.ask_id, None)
        if leg is not None and leg.ticket is not None:
            leg.ticket.abort()
            leg.ticket = None

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
        exchange.call = exchange.resumption = None  # an idle connection remembers its last exchange; these are large

    def _release_kv(self, exchange: Exchange, close: Close) -> None:
        """P answered and D will not come: what P keeps is of no use to anybody."""
        if close.outcome is not Outcome.COMPLETED:
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
        now = self._loop.time()
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
        waited = now - leg.last_sign
        if not leg.begun and waited > self._limits.first_byte_s:
            detail = f"no answer within {self._limits.first_byte_s:g} s"
            leg.cut(Failure(FailureKind.TIMEOUT, detail, answered=leg.status != 0))
        elif leg.begun and waited > self._limits.inter_chunk_s:
            detail = f"nothing more within {self._limits.inter_chunk_s:g} s"
            leg.cut(Failure(FailureKind.TIMEOUT, detail, answered=True))


def _park(leg: Leg, send: Callable[[msgspec.Raw | None], None]) -> None:
    """Send a leg only when the other side is ready for it."""
    leg.parked = send
    leg.exchange.legs[leg.lease.attempt] = leg


def _for_worker(call: Call, connector: Connector, name: str = "") -> Call:
    """The call as a worker gets it: the model by its name there, token ids where they are known and it takes them."""
    field = connector.ids_fields.get(call.path) if call.token_ids else None
    renamed = call.asked != "" and call.asked != name
    if field is None and not renamed:
        return call
    if call.form:
        return msgspec.structs.replace(call, body=form_with_model(call.body, name))
    fields = dict(call.fields)
    if renamed:
        fields["model"] = msgspec.Raw(msgspec.json.encode(name))
    if field is not None:
        fields[field] = msgspec.Raw(call.token_ids)
    return msgspec.structs.replace(call, fields=fields, tampered=True)


def _forced_usage(call: Call) -> tuple[str, bytes]:
    """`stream_options` as the client sent them, with usage at the end of the stream and nowhere else."""
    raw = call.fields.get("stream_options")
    if raw is None or bytes(raw) == b"null":
        return FORCED_USAGE
    options = msgspec.json.decode(raw, type=Fields)
    options.pop("continuous_usage_stats", None)
    return "stream_options", encode_fields({**options, "include_usage": b"true"})
