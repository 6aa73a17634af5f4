"""Speculative prefill at the edge: what a next turn will begin with, kept from the answer's bytes and sent to P.

A next turn repeats the messages, then what was answered, then has something new. So messages and answer are rendered as
a client will send them, without the beginning of another answer: all whole blocks of that stand in the next prompt too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from msgspec import Raw, Struct

from omni_proxy.api.bodies import for_worker
from omni_proxy.api.resumable import is_text
from omni_proxy.api.sse import DONE, NOTHING, payloads
from omni_proxy.call import CHAT, Call, Fields, encode_fields
from omni_proxy.messages import Failure, FailureKind, Lease, LegFailed, Mode, PrefillDone, Tokenized
from omni_proxy.workers.answer import Head
from omni_proxy.workers.connectors.answers import GarbageAnswer, read_usage_and_params
from omni_proxy.workers.connectors.base import Connector
from omni_proxy.workers.connectors.fields import one_token_body
from omni_proxy.workers.http import Ticket

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from omni_proxy.api.exchange import Exchange
    from omni_proxy.api.legs import Post
    from omni_proxy.workers.upstream import Upstream

MAX_ANSWER_BYTES: Final = 1 << 20
"""Of a stream: a longer one is not kept."""
MAX_KEPT_BYTES: Final = 64 << 20
"""Of all that waits for an idle worker."""
MAX_REPLY_BYTES: Final = 1 << 20
CONNECTORS: Final = frozenset({"omni", "vllm-nixl", "ascend-mooncake"})
"""Those whose P computes a prompt that names no D, and keeps nothing of it but its cache."""
_OUT: Final = frozenset({"priority", "ttft_target_s", "add_generation_prompt"})


class CountTokens(Protocol):
    """Counts a call's prompt off the event loop and reports `Tokenized`."""

    def __call__(self, rid: str, call: Call) -> None: ...


class _Delta(Struct):
    content: Raw = Raw(b"null")
    tool_calls: Raw = Raw(b"null")
    function_call: Raw = Raw(b"null")


class _Choice(Struct):
    index: int = 0
    delta: _Delta | None = None
    message: _Delta | None = None


class _Chunk(Struct):
    choices: list[_Choice] = []


_CHUNK = msgspec.json.Decoder(_Chunk)
_TEXT = msgspec.json.Decoder(str)


class Kept:
    """What a client was sent of one answer, as far as it is not too long."""

    __slots__ = ("_parts", "_size")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, data: bytes) -> None:
        """Take a part in."""
        self._size += len(data)
        if self._size <= MAX_ANSWER_BYTES:
            self._parts.append(data)
        else:
            self._parts.clear()

    def text(self, stream: bool) -> str | None:
        """The answer's text; None: it is none, or not text alone."""
        if not self._parts or self._size > MAX_ANSWER_BYTES:
            return None
        whole = b"".join(self._parts)
        pieces: list[str] = []
        try:
            for payload in payloads(whole) if stream else [whole]:
                if payload != DONE:
                    for choice in _CHUNK.decode(payload).choices:
                        pieces.append(_text_of(choice))
        except (msgspec.MsgspecError, UnicodeDecodeError, _NotText):
            return None
        return "".join(pieces) or None


class _NotText(Exception):
    """Tools are called, or there are several answers."""


def _text_of(choice: _Choice) -> str:
    said = choice.delta or choice.message or _Delta()
    called = (bytes(said.tool_calls), bytes(said.function_call))
    if choice.index or any(value not in NOTHING for value in called):
        raise _NotText
    return "" if bytes(said.content) == b"null" else _TEXT.decode(said.content)


def covers(call: Call) -> bool:
    """Can the next turn of this call be foreseen? A chat of text with one answer."""
    if call.path != CHAT or call.form or call.media or call.parts > 1 or call.whole:
        return False
    flags = (("continue_final_message", b"true"), ("add_generation_prompt", b"false"))
    return not any(bytes(call.fields.get(name, b"")) == value for name, value in flags) and is_text(call)


def next_turn(call: Call, answer: str) -> Call:
    """The part of the next turn that is known: messages and answer, and no beginning of another one."""
    said = b'{"role":"assistant","content":%b}' % msgspec.json.encode(answer)
    messages = bytes(call.fields["messages"]).rstrip()[:-1] + b"," + said + b"]"
    fields: Fields = {k: v for k, v in call.fields.items() if k not in _OUT}
    fields["messages"] = Raw(messages)
    fields["add_generation_prompt"] = Raw(b"false")
    body = encode_fields(fields)
    next_turn = call.copy()
    next_turn.put(fields, body)
    next_turn.stream, next_turn.token_ids, next_turn.tampered = False, b"", True
    return next_turn


def prewarm_body(call: Call, connector: Connector, name: str, priority: int | None) -> bytes:
    """What P is asked: one token behind the known part, nothing handed over."""
    added = [] if priority is None else [("priority", b"%d" % priority)]
    return one_token_body(for_worker(call, connector, name), added)


class _Leg:
    """One prefill that nobody waits for."""

    def __init__(self, lease: Lease, ended: Callable[[Lease, PrefillDone | LegFailed], None], until: float) -> None:
        self.lease = lease
        self.until = until
        self.ticket: Ticket | None = None
        self._ended = ended
        self._status = 0
        self._body = bytearray()

    def on_sent(self) -> None:
        return

    def on_head(self, head: Head) -> None:
        self._status = head.status

    def on_data(self, data: bytes) -> None:
        if len(self._body) < MAX_REPLY_BYTES:
            self._body += data

    def on_end(self) -> None:
        if self._status != 200:
            detail = f"status {self._status}"
            self.on_failure(Failure(FailureKind.STATUS, detail, self._status, answered=True))
            return
        try:
            usage, _ = read_usage_and_params(bytes(self._body))
        except GarbageAnswer as exc:
            self.on_failure(Failure(FailureKind.GARBAGE, str(exc), self._status, answered=True))
        else:
            self._ended(self.lease, PrefillDone(self.lease, False, usage=usage))

    def on_failure(self, failure: Failure) -> None:
        self._ended(self.lease, LegFailed(self.lease, failure))


class Foresight:
    """All next turns that one front has foreseen, and those that are computed for it now."""

    def __init__(self, post: Post, loop: AbstractEventLoop, count_tokens: CountTokens | None) -> None:
        self.on = False
        """Are answers kept?"""
        self.priority: int | None = None
        """With what priority P is asked; None: engines that know none are not troubled with one."""
        self._post = post
        self._loop = loop
        self._count_tokens = count_tokens
        self._foreseen: dict[str, tuple[Call, bytes]] = {}
        """By conversation: what its next turn begins with, and the client's headers."""
        self._bytes = 0
        self._legs: dict[Lease, _Leg] = {}

    def watch(self, call: Call, upstream: Upstream | None) -> Kept | None:
        """Somewhere to keep an answer that begins now, if its next turn may be foreseen. `upstream`: its P."""
        if not self.on or self._count_tokens is None or upstream is None:
            return None
        connector = upstream.connector
        known = connector.name in CONNECTORS and Mode.SEQUENTIAL in connector.modes
        return Kept() if known and covers(call) else None

    def foresee(self, exchange: Exchange | None, rid: str) -> None:
        """Render what is known of the next turn; `Tokenized` comes in any case."""
        call = None if exchange is None else exchange.call
        kept = None if exchange is None else exchange.kept
        answer = None if call is None or kept is None else kept.text(call.stream)
        if exchange is None or call is None or answer is None or self._count_tokens is None:
            self._post(Tokenized(rid, None))
            return
        turn = next_turn(call, answer)
        if self._bytes + len(turn.body) > MAX_KEPT_BYTES:
            self._post(Tokenized(rid, None))
            return
        self._foreseen[rid] = (turn, exchange.forward)
        self._bytes += len(turn.body)
        self._count_tokens(rid, turn)

    def forget(self, rid: str) -> None:
        """It is not needed any more."""
        self._take(rid)

    def prewarm(self, lease: Lease, upstream: Upstream | None, within_s: float) -> None:
        """Have a worker compute what was foreseen."""
        turn, forward = self._take(lease.rid)
        if turn is None or upstream is None:
            self._post(LegFailed(lease, Failure(FailureKind.CONNECT, "nothing to send, or nobody to send it to")))
            return
        leg = self._legs[lease] = _Leg(lease, self._ended, self._loop.time() + within_s)
        body = prewarm_body(turn, upstream.connector, upstream.name_of(turn.model), self.priority)
        request_id = b"prewarm-" + lease.rid.encode()
        leg.ticket = upstream.pool.request(upstream.request(CHAT.encode(), forward, request_id, body), leg)

    def abort(self, lease: Lease) -> None:
        """Real work needs the worker: close the connection, which engines take as the end of the request."""
        leg = self._legs.pop(lease, None)
        if leg is not None and leg.ticket is not None:
            leg.ticket.abort()
            leg.ticket = None

    def sweep(self, now: float) -> None:
        """End what takes too long."""
        for lease, leg in list(self._legs.items()):
            if now > leg.until:
                self.abort(lease)
                self._post(LegFailed(lease, Failure(FailureKind.TIMEOUT, "no answer in time")))

    def clear(self) -> None:
        """The scheduler that wanted these is gone."""
        for lease in list(self._legs):
            self.abort(lease)
        self._foreseen.clear()
        self._bytes = 0

    def _take(self, rid: str) -> tuple[Call | None, bytes]:
        turn, forward = self._foreseen.pop(rid, (None, b""))
        if turn is not None:
            self._bytes -= len(turn.body)
        return turn, forward

    def _ended(self, lease: Lease, event: PrefillDone | LegFailed) -> None:
        leg = self._legs.pop(lease, None)
        if leg is not None:
            leg.ticket = None
            self._post(event)
