"""From what a client sent to requests that the core hears of.

Most calls go straight on. Some first have their images and sound encoded, some are divided, a few are answered here; in
all cases the client is answered once.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from omni_proxy.access.gate import Gate
from omni_proxy.api.division import MAX_PARTS, divide, too_many
from omni_proxy.api.encoding import EncodeFailed, Encoders, Encoding
from omni_proxy.api.exchange import Exchange
from omni_proxy.api.family import Family, Part
from omni_proxy.api.guard import Guard
from omni_proxy.api.hot import HotRequest, let_in, read_call, request_spec, tokens_of
from omni_proxy.api.http_out import JSON_LINE
from omni_proxy.api.said import Said
from omni_proxy.api.served import ServedModels
from omni_proxy.api.timing import Timing
from omni_proxy.call import RESPONSES, TOKENIZE, Call
from omni_proxy.errors import ErrorCode, Rejected
from omni_proxy.messages import Arrived, Mode, Role
from omni_proxy.prompts.media import media_of
from omni_proxy.workers.upstream import Upstream

if TYPE_CHECKING:
    from omni_proxy.api.edge import Edge

AnswerHere = Callable[[Call, Callable[[bytes | Rejected], None]], bool]
"""Answers a call without a worker, later; False where it cannot."""


class Intake:
    """The way in of one edge."""

    def __init__(
        self,
        edge: Edge,
        upstreams: Mapping[str, Upstream],
        served: ServedModels,
        on_rejected: Callable[[Exchange, Rejected], None],
        loop: AbstractEventLoop,
    ) -> None:
        self._edge = edge
        self._upstreams = upstreams
        self._served = served
        self._on_rejected = on_rejected
        self._answer_here: AnswerHere | None = None
        self._on_answered: Callable[[Exchange], None] | None = None
        self.encoders = Encoders(upstreams, loop)

    def counts_tokens(self, model: str) -> bool:
        """Are prompts of this model tokenised before anything else?"""
        return self._edge.counts and self._served.counted(model)

    def serve(self, served: ServedModels) -> None:
        """Use other names of models from now on."""
        self._served = served

    def start(self, hot: HotRequest, said: Said, gate: Gate, guard: Guard, slow: bool) -> None:
        """Serve a request that has been read; `slow`: its client does not take what is written."""
        exchange = hot.exchange
        body = hot.body[0] if len(hot.body) == 1 else b"".join(hot.body)
        hot.body = []
        exchange.kept_alive = hot.keep_alive
        exchange.said, exchange.forward, exchange.user_agent = said, said.forward, said.user_agent
        if said.timed:
            exchange.timing = Timing()
        if self._edge.traces is not None:
            exchange.trace, exchange.forward = self._edge.traces.begin(exchange.forward)
        try:
            if not exchange.path:
                let_in(hot, gate, guard)
            call = self.read(hot, body)
            if exchange.tenant:
                exchange.grant, exchange.more_headers = gate.admit(exchange.tenant, tokens_of(call, len(body)))
        except Rejected as exc:
            self._edge.reject(exchange, exc)
            return
        exchange.call = call
        if slow:
            self._edge.client_slow(exchange)
        self.begin(exchange, call)

    def read(self, hot: HotRequest, body: bytes) -> Call:
        """What a client asks. Raises Rejected."""
        call = read_call(hot, body)
        if not call.model:
            call.model = self._only_model()
        self._served.take(call)
        if call.path == RESPONSES and not call.whole and self._finds_kv_by_id(call.model):
            call.whole, call.whole_because = True, "input"
        if call.has_parts:
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
        family = exchange.family = Family(exchange, call, self._edge.client_left)
        for number, single in enumerate(divide(call)):
            rid = self._edge.new_rid()
            part = Part(family, number, rid, b"%b-%d" % (exchange.request_id, number))
            part.call, part.path, part.tenant = single, exchange.path, exchange.tenant
            part.worker_id = b"%b-%d" % (exchange.worker_id, number)
            part.forward, part.user_agent = exchange.forward, exchange.user_agent
            part.said = exchange.said
            part.encoded, part.slow_since = exchange.encoded, exchange.slow_since
            part.encode_s = exchange.encode_s
            part.spec = request_spec(part, single, len(single.body), self.counts_tokens(single.model))
            family.parts.append(part)
            self._edge.exchanges[rid] = part
        for part in list(family.parts):
            if part.spec is not None and part.client is not None:  # an earlier one may have been refused at once
                self._edge.post(Arrived(part.rid, part.spec))
            else:
                self._edge.exchanges.pop(part.rid, None)
        return True

    def _finds_kv_by_id(self, model: str) -> bool:
        """Would a D look for KV by an id that is ours? Engines give responses ids of their own."""
        return any(
            upstream.connector.kv_by_id and (not upstream.member.models or model in upstream.member.models)
            for upstream in self._upstreams.values()
        )

    def _must_divide(self, call: Call) -> bool:
        """Is there no worker that could make all of its answers by itself?

        A mixed worker that is down counts only where there is no other.
        """
        answering = [
            upstream
            for upstream in self._upstreams.values()
            if upstream.member.role in (Role.MIXED, Role.DECODE)
            and (not upstream.member.models or call.model in upstream.member.models)
        ]
        usable = [upstream for upstream in answering if upstream.member.up] or answering
        return not any(Mode.AGGREGATED in upstream.connector.modes for upstream in usable)

    def _only_model(self) -> str:
        """The model that is meant by a request which names none (`/tokenize` may)."""
        names = {name for upstream in self._upstreams.values() for name in upstream.member.models}
        if len(names) != 1:
            raise Rejected(ErrorCode.INVALID_VALUE, "'model' is required.", "model")
        return names.pop()

    def begin(self, exchange: Exchange, call: Call) -> None:
        """Serve an exchange whose call has been read."""
        if call.media and self.encoders.serve(call.model):
            then = partial(self._encoded, exchange, call)
            encoding = exchange.encoding = Encoding(exchange, call, self.encoders, then)
            encoding.start(self._edge.first_byte_s)
        elif not (call.path in TOKENIZE and self._answers_here(exchange, call)):
            self._arrive(exchange, call)

    def answer_with(self, answer: AnswerHere, on_answered: Callable[[Exchange], None]) -> None:
        """Have somebody answer what no worker can be asked for; `on_answered` hears of each such answer."""
        self._answer_here, self._on_answered = answer, on_answered

    def _answers_here(self, exchange: Exchange, call: Call) -> bool:
        if self._answer_here is None or not self._must_divide(call):
            return False
        members = [upstream.member for upstream in self._upstreams.values()]
        served = any(not member.models or call.model in member.models for member in members)
        return served and self._answer_here(call, partial(self._answered_here, exchange))

    def _answered_here(self, exchange: Exchange, result: bytes | Rejected) -> None:
        if isinstance(result, Rejected):
            self._edge.reject(exchange, result)
            return
        exchange.respond(200, JSON_LINE, result)
        client, exchange.client = exchange.client, None
        if client is not None:
            client.finished(close=not exchange.kept_alive)
        if self._on_answered is not None:
            self._on_answered(exchange)

    def _arrive(self, exchange: Exchange, call: Call) -> None:
        if call.parts > 1 and self._divide(exchange, call):
            return
        self._edge.exchanges[exchange.rid] = exchange
        exchange.spec = spec = request_spec(exchange, call, len(call.body), self.counts_tokens(call.model))
        self._edge.post(Arrived(exchange.rid, spec))

    def _encoded(self, exchange: Exchange, call: Call, failure: EncodeFailed | None) -> None:
        exchange.encoding = None
        if failure is None:
            self._arrive(exchange, call)
            return
        answer, code = failure.answer, failure.code
        if answer is not None:
            exchange.respond(answer.status, answer.lines, answer.body)
            code = ErrorCode.WORKER_ERROR
        else:
            exchange.respond_error(code, failure.detail, None, None)
        client, exchange.client = exchange.client, None
        if client is not None:
            client.finished(close=not exchange.kept_alive)
        self._on_rejected(exchange, Rejected(code, failure.detail))
