"""The decode leg of a request: asks D for the answer and relays it, as a stream or as one object.

The core hears that the leg was sent, that its first token passed, and how it ended. Everything between goes straight
from the worker's socket to the client's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from omni_proxy.api.events import EventScan
from omni_proxy.api.exchange import Exchange
from omni_proxy.api.legs import Clock, Leg, Post, PrefillLeg
from omni_proxy.api.resume_scan import scan_of
from omni_proxy.api.sse import StreamScan, gives_up, read_usage, splice
from omni_proxy.call import CHAT, COMPLETIONS, ONE_STEP
from omni_proxy.json_fields import pick
from omni_proxy.messages import DecodeBroke, DecodeDone, Failure, FailureKind, FirstToken, Lease, LegFailed, Usage
from omni_proxy.observe.edge_counts import EdgeCounts
from omni_proxy.workers.answer import Head

if TYPE_CHECKING:
    from omni_proxy.relay.pump import Passage, Pump

HOLD_BYTES: Final = 64 << 10
"""How much of an answer that may not go out yet is held in memory before the worker has to wait."""
_CHUNKED: Final = (CHAT, COMPLETIONS)
"""Their streams are chunks of one kind, with usage in the last and `[DONE]` at the end."""
_USAGE: Final[tuple[str, ...]] = ("usage",)
_NO_USAGE: Final = Usage()
_MAYBE_UNSEEN: Final = (FailureKind.CLOSED, FailureKind.GAVE_UP)


class DecodeLeg(Leg):
    """Asks D for the answer and relays it: a stream as it comes, an object when it is whole.

    A stream is opened towards the client when there is something to see: with its first content, or with whatever
    else is more than roles and empty deltas. Until then a D that dies has shown nothing, and another may take over.
    Beside a P that has not answered (parallel) nothing is looked at: without P's success D's text means nothing.
    """

    __slots__ = (
        "_at_end",
        "_awaits_prefill",
        "_cached",
        "_counts",
        "_forced",
        "_held",
        "_held_bytes",
        "_opened",
        "_pump",
        "_raw",
        "_scan",
        "_told",
        "passage",
    )

    def __init__(
        self,
        exchange: Exchange,
        lease: Lease,
        post: Post,
        time: Clock,
        *,
        handed_over: bool,
        forced: bool,
        counts: EdgeCounts,
        pump: Pump | None,
    ) -> None:
        super().__init__(exchange, lease, post, time)
        self._counts = counts
        self._pump = pump
        """Moves the stream when nobody has to look at it; None: it will not."""
        self.passage: Passage | None = None
        """It does."""
        self._awaits_prefill = handed_over and exchange.prefill_pending
        self._cached = exchange.prefill_cached if handed_over else None
        self._forced = forced
        self._scan: StreamScan | None = None
        """Looks at the stream; None where the answer is not one."""
        self._opened = False
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._told = False
        """The core knows of the first token."""
        self._at_end = False
        self._raw = False
        """The answer is neither a stream of events nor JSON (speech): it passes as it comes."""

    @property
    def begun(self) -> bool:
        return self._opened or self._held_bytes > 0 or self._size > 0

    @property
    def held_up(self) -> bool:
        if self.parked is not None:
            return True
        return self._awaits_prefill and self.status != 0 and not any(x.parked for x in self.exchange.legs.values())

    def on_head(self, head: Head) -> None:
        super().on_head(head)
        content_type, call = head.content_type, self.exchange.call
        if head.status != 200 or call is None:
            return
        if content_type.startswith(b"text/event-stream"):
            if call.path in _CHUNKED:
                self._scan = scan_of(call, self.exchange.resumption, self._forced, self._cached)
            else:
                self._scan = EventScan(strip_usage=self._forced, cached_tokens=self._cached)
        elif call.path in ONE_STEP and not content_type.startswith(b"application/json"):
            self._raw = True

    def on_data(self, data: bytes) -> None:
        if self._awaits_prefill and self.status == 200:
            _go_on_alone(self.exchange)
        scan = self._scan
        if self._raw:
            self._pass_on(data)
            return
        if scan is None or self._awaits_prefill:
            super().on_data(data)
            if scan is not None and self._size > HOLD_BYTES and self.ticket is not None:
                self.ticket.pause()
            return
        now = self.time()
        if self._opened:
            self._counts.gap(now - self.last_sign)
        self.last_sign = now
        shown = scan.feed(data)
        if self._opened:
            if shown is data and self.ticket is not None:
                self.exchange.send(data, self.ticket.framed)
            else:
                self.exchange.send(shown)
        else:
            self._hold(shown, scan)
        if scan.first_content and not self._told:
            self._told = True
            self.exchange.handoff = None  # it was pulled
            self._post(FirstToken(self.lease))
        if scan.broke is not None:
            self.cut(scan.broke)
        elif self._pump is not None and self._told:
            self._offer(self._pump, scan)

    # ----------------------------------------------------------------------- the pump

    def _offer(self, pump: Pump, scan: StreamScan) -> None:
        """Let the pump go on, where all that may still come up is in what passes."""
        exchange, ticket = self.exchange, self.ticket
        if exchange.renames or exchange.kept is not None or not exchange.chunked:
            self._pump = None
        elif scan.only_tokens and exchange.slow_since is None:
            connection, client = None if ticket is None else ticket.connection, exchange.client
            if connection is not None and client is not None:
                pump.take_over(self, connection, client)

    def moved(self, size: int) -> None:
        """The pump has passed so much on, and stopped. It is not asked again where that was nothing."""
        self.exchange.bytes_out += size
        if not size:
            self._pump = None

    def heard_at(self) -> float:
        return self.last_sign if self.passage is None else self.passage.last_sign()

    # ------------------------------------------------------------------------ the end

    def on_end(self) -> None:
        if self.status != 200:
            self._failed_with_status()
        elif self._awaits_prefill:
            self._at_end = True
        elif self._scan is not None:
            self._end_stream(self._scan)
        elif self._raw:
            self._pass_on(b"")
            self.exchange.end_stream()
            self._ended(DecodeDone(self.lease))
        else:
            self._end_object()

    def on_failure(self, failure: Failure) -> None:
        scan = self._scan
        if scan is not None:
            self.exchange.error_told = scan.failed != 0
            self.exchange.mid_event = scan.mid_event
            if failure.kind in _MAYBE_UNSEEN:
                failure = msgspec.structs.replace(failure, answered=self._opened)
        emitted = self._shown_tokens(failure)
        if emitted is None:
            super().on_failure(failure)
        else:
            self._ended(DecodeBroke(self.lease, emitted, failure))

    def _shown_tokens(self, failure: Failure) -> int | None:
        """With how many tokens of the answer another pair could go on, where the client has seen a part of it."""
        resumption = self.exchange.resumption
        if resumption is None or failure.kind is FailureKind.CONNECT or not (self._opened or resumption.resumed):
            return None
        if not resumption.resumed:
            resumption.cached_tokens = self._cached
        return resumption.rewind()

    def prefill_answered(self) -> None:
        if not self._awaits_prefill:
            return
        self._awaits_prefill = False
        self._cached = self.exchange.prefill_cached
        if self._scan is not None:
            self._scan.cached_tokens = self._cached
            data, self._body, self._size = self._body_bytes(), [], 0
            if data:
                self.on_data(data)
            if self.ticket is not None and self.exchange.slow_since is None:
                self.ticket.resume()
        self.last_sign = self.time()
        self.unpark(None)
        if self._at_end:
            self.on_end()

    def _pass_on(self, data: bytes) -> None:
        self.last_sign = self.time()
        if not self._opened:
            self._opened = True
            self.exchange.error_told = True  # an error event has no place in it
            self.exchange.open_stream(200, self._lines())
            self._post(FirstToken(self.lease))
        self.exchange.send(data)

    def _hold(self, data: bytes, scan: StreamScan) -> None:
        """The head goes out with the first thing to see: until then another worker may still take over."""
        if data:
            self._held.append(data)
            self._held_bytes += len(data)
        if self._held_bytes and not (scan.opening and self._held_bytes <= HOLD_BYTES):
            self._open()

    def _open(self) -> None:
        if not self.exchange.committed:  # else another worker has begun the answer
            self.exchange.open_stream(200, b"" if self.head is None else self.head.stream_lines)
        self.exchange.send(b"".join(self._held))
        self._opened = True
        self._held = []

    def _end_stream(self, scan: StreamScan) -> None:
        rest = scan.flush()
        if scan.broke is not None:
            self.on_failure(scan.broke)
            return
        if not scan.done:
            self.on_failure(Failure(FailureKind.CLOSED, "the stream ended without [DONE]", answered=True))
            return
        if not self._opened:
            self._open()
        self.exchange.send(rest)
        self.exchange.end_stream()
        if scan.failed:
            detail = "the worker reported an error in its stream"
            self._ended(LegFailed(self.lease, Failure(FailureKind.STATUS, detail, scan.failed, answered=True)))
        else:
            self._ended(DecodeDone(self.lease, scan.usage))

    def _end_object(self) -> None:
        body = self._body_bytes()
        if self.exchange.committed:
            self._garbage("not a stream")
            return
        if body.find(b'"recomputed"') >= 0 and gives_up(body):
            self.on_failure(Failure(FailureKind.GAVE_UP, "recomputed"))
            return
        usage = _NO_USAGE
        try:
            told = pick(body, _USAGE)[0]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            if self.exchange.call is None or self.exchange.call.path not in ONE_STEP:
                self._garbage("not a JSON answer")
                return  # some of the others answer with a list
        else:
            if isinstance(told, bytes):
                usage, body = _counted(body, told, self._cached)
        self.exchange.respond(200, self._lines(), body)
        self.exchange.complete = True
        self._ended(DecodeDone(self.lease, usage))


def _counted(body: bytes, usage: bytes, cached_tokens: int | None) -> tuple[Usage, bytes]:
    """What the usage in an answer says, and the answer with P's cached tokens in it.

    Usage of a shape that nobody knows is the worker's to send and not ours to read.
    """
    try:
        read, patched = read_usage(usage, cached_tokens)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return _NO_USAGE, body
    return read, body if patched is None else splice(body, usage, patched)


def _go_on_alone(exchange: Exchange) -> None:
    """D answers though it has not asked for its prefill: it found the whole prompt in its own cache."""
    for leg in list(exchange.legs.values()):
        if isinstance(leg, PrefillLeg) and leg.parked is not None:
            leg.not_needed()
