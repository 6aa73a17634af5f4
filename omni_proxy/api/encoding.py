"""Encoding before prefill: each image or sound of a request goes to an encode worker, all at once, before P is chosen.

The same item goes to the same encoder, which has it in its cache, unless that one is much busier than the others or has
just failed. What encoders say about where their results lie (`ec_transfer_params`) is for the worker that computes the
prompt. One item that cannot be encoded ends the request: its answer would not be about what the client sent.
"""

from __future__ import annotations

from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from omni_proxy.apc.ring import Ring
from omni_proxy.api.exchange import Answer, Exchange
from omni_proxy.call import CHAT, Call, Fields, MediaItem, encode_fields
from omni_proxy.errors import ErrorCode
from omni_proxy.messages import Failure, FailureKind, Role
from omni_proxy.workers.answer import Head
from omni_proxy.workers.http import Ticket
from omni_proxy.workers.upstream import Upstream

FAIL_S: Final = 10.0
"""A worker that could not be reached is asked last for so long."""
BOUND: Final = 1.25
LEAST_BOUND: Final = 4
"""Items that an encoder may hold however idle the others are."""
MAX_ANSWER_BYTES: Final = 16 << 20
_PARAMS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_BUSY: Final = frozenset({429, 503})


class Encoders:
    """The encode workers as one front knows them."""

    def __init__(self, upstreams: Mapping[str, Upstream], loop: AbstractEventLoop) -> None:
        self._upstreams = upstreams
        self._ring = Ring()
        self._held: dict[str, int] = {}
        self._failed_at: dict[str, float] = {}
        self.loop = loop

    def serve(self, model: str) -> bool:
        """Is there an encode worker for this model?"""
        return bool(self._names(model))

    def order(self, model: str, item: str) -> list[Upstream]:
        """Those that may encode an item: its home first, then in the order of spilling; who failed lately last."""
        names = self._usable(model)
        if not names:
            return []
        ordered = list(self._ring.order(item, names))
        bound = max(LEAST_BOUND, BOUND * (sum(self._held.get(n, 0) for n in names) + 1) / len(names))
        since = self.loop.time() - FAIL_S
        # Sorting is stable: among equals the ring's order stays.
        ordered.sort(key=lambda name: (self._failed_at.get(name, since) > since, self._held.get(name, 0) >= bound))
        return [self._upstreams[name] for name in ordered]

    def took(self, name: str) -> None:
        """An item went to a worker."""
        self._held[name] = self._held.get(name, 0) + 1

    def gave_back(self, name: str, failed: bool) -> None:
        """It is done with it."""
        held = self._held.get(name, 0) - 1
        if held > 0:
            self._held[name] = held
        else:
            self._held.pop(name, None)
        if failed:
            self._failed_at[name] = self.loop.time()
        else:
            self._failed_at.pop(name, None)

    def _names(self, model: str) -> list[str]:
        return sorted(
            name
            for name, upstream in self._upstreams.items()
            if upstream.member.role is Role.ENCODE and (not upstream.member.models or model in upstream.member.models)
        )

    def _usable(self, model: str) -> list[str]:
        return [name for name in self._names(model) if self._upstreams[name].member.up]


class Encoding:
    """All items of one request on their way. `then` is called once: with an error, or None when all are encoded."""

    def __init__(
        self,
        exchange: Exchange,
        call: Call,
        encoders: Encoders,
        then: Callable[[EncodeFailed | None], None],
    ) -> None:
        self._exchange = exchange
        self._then = then
        self._over = False
        self._params: dict[str, bytes | msgspec.Raw] = {}
        """Of all items together."""
        media = enumerate(call.media)
        self._items = [ItemLeg(self, exchange, call, item, number, encoders) for number, item in media]
        self._left = len(self._items)
        self._loop = encoders.loop
        self._timer: TimerHandle | None = None
        self._began = 0.0

    def start(self, limit_s: float) -> None:
        """Send all items; they have so many seconds together."""
        self._began = self._loop.time()
        self._timer = self._loop.call_later(limit_s, self._too_late)
        for leg in self._items:
            if not self._over:
                leg.try_next()

    def stop(self) -> None:
        """Nobody needs it any more."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for leg in self._items:
            leg.stop()

    def encoded(self, body: bytes) -> None:
        """One item is done."""
        if self._over:
            return
        params = _transfer_params(body)
        if params is None:
            self.failed(EncodeFailed(None, ErrorCode.WORKER_GARBAGE, "The encode worker's answer is not JSON."))
            return
        self._params.update(params)
        self._left -= 1
        if not self._left:
            self.stop()
            self._exchange.encode_s = self._loop.time() - self._began
            self._exchange.encoded = encode_fields(self._params) if self._params else b""
            self._then(None)

    def failed(self, failure: EncodeFailed) -> None:
        """One item cannot be encoded."""
        if not self._over:
            self.stop()
            self._then(failure)

    def _too_late(self) -> None:
        self._timer = None
        self.failed(EncodeFailed(None, ErrorCode.WORKER_TIMEOUT, "The encode workers did not answer in time."))


class EncodeFailed:
    """Why an item could not be encoded: a worker's own answer, or an error of ours."""

    __slots__ = ("answer", "code", "detail")

    def __init__(self, answer: Answer | None, code: ErrorCode, detail: str) -> None:
        self.answer = answer
        self.code = code
        self.detail = detail


class ItemLeg:
    """One item on its way to one encoder after another."""

    def __init__(
        self, encoding: Encoding, exchange: Exchange, call: Call, item: MediaItem, number: int, encoders: Encoders
    ) -> None:
        self._encoding = encoding
        self._exchange = exchange
        self._call = call
        self._item = item
        self._number = number
        self._encoders = encoders
        self._left = encoders.order(call.model, item.name)
        self._failure = EncodeFailed(None, ErrorCode.NO_WORKER, "No encode worker can be used now.")
        self._ticket: Ticket | None = None
        self._at = ""
        """The worker that has it; empty for none."""
        self._status = 0
        self._lines = b""
        self._body: list[bytes] = []
        self._size = 0

    def try_next(self) -> None:
        """Send the item to the next worker in order, if one is left."""
        if not self._left:
            self._encoding.failed(self._failure)
            return
        upstream = self._left.pop(0)
        self._status, self._body, self._size = 0, [], 0
        self._at = upstream.member.name
        self._encoders.took(self._at)
        model = upstream.name_of(self._call.model)
        body = b'{"model":%b,"messages":[{"role":"user","content":[%b]}],"max_tokens":1,"stream":false}' % (
            msgspec.json.encode(model),
            self._item.part,
        )
        request_id = b"%b:%d" % (self._exchange.worker_id, self._number)
        data = upstream.request(CHAT.encode(), self._exchange.forward, request_id, body)
        self._ticket = upstream.pool.request(data, self)

    def stop(self) -> None:
        """Nobody needs it any more."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.abort()
        self._gave_back(failed=False)

    def _gave_back(self, failed: bool) -> None:
        at, self._at = self._at, ""
        if at:
            self._encoders.gave_back(at, failed)

    # ---------------------------------------------------------------- from the worker

    def on_sent(self) -> None:
        return

    def on_head(self, head: Head) -> None:
        self._status, self._lines = head.status, head.lines

    def on_data(self, data: bytes) -> None:
        self._size += len(data)
        if self._size <= MAX_ANSWER_BYTES:
            self._body.append(data)
        elif self._ticket is not None:
            self._ticket.abort()
            self.on_failure(Failure(FailureKind.GARBAGE, "the answer is too large", answered=True))

    def on_end(self) -> None:
        self._ticket = None
        body = b"".join(self._body)
        status = self._status
        self._gave_back(failed=status >= 500 or status in _BUSY)
        if status == 200:
            self._encoding.encoded(body)
            return
        answer = Answer(status, self._lines, body) if status >= 400 else None
        self._failure = EncodeFailed(answer, ErrorCode.WORKER_GARBAGE, f"The encode worker answered {status}.")
        if status >= 500 or status in _BUSY:
            self.try_next()
        else:  # what one refuses all refuse
            self._encoding.failed(self._failure)

    def on_failure(self, failure: Failure) -> None:
        self._ticket = None
        self._gave_back(failed=True)
        code = ErrorCode.WORKER_UNREACHABLE if failure.kind is FailureKind.CONNECT else ErrorCode.WORKER_CLOSED
        self._failure = EncodeFailed(None, code, f"The encode worker failed: {failure.detail}.")
        self.try_next()


def _transfer_params(body: bytes) -> Fields | None:
    """Where the encoder's result lies; empty where it does not say, None where the answer is none."""
    try:
        raw = bytes(_PARAMS.decode(body).get("ec_transfer_params", b"null"))
        return {} if raw == b"null" else _PARAMS.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def with_encoded(body: bytes, params: bytes) -> bytes:
    """A body with what the encoders said at its end."""
    return b'%b,"ec_transfer_params":%b}' % (body.rstrip()[:-1], params)
