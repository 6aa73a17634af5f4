"""An exchange that is served by several: each part is an exchange of its own, and the client gets one answer.

Parts are scheduled, tried again and given up like any other request. One that fails ends the whole: before anything was
sent its answer is the client's, afterwards the stream breaks off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from omni_proxy.api.division import StreamMerge, merge
from omni_proxy.api.exchange import Exchange, renamed
from omni_proxy.api.http_out import JSON_LINE, error_event, error_json
from omni_proxy.call import Call
from omni_proxy.errors import ErrorCode, http_status
from omni_proxy.relay.pump import Passage

_UNREADABLE: Final = "A worker's answer could not be put together with the others."


class Part(Exchange):
    """One part of a client's request. What it would say to the client goes to its family."""

    __slots__ = ("number", "siblings")

    def __init__(self, family: Family, number: int, rid: str, request_id: bytes) -> None:
        super().__init__(rid, request_id, PartClient(family), kept_alive=True, chunked=False)
        self.siblings = family
        self.number = number

    def respond(self, status: int, lines: bytes, body: bytes) -> None:
        """A whole response of this part."""
        if self.client is None:
            return
        self.status = status
        if self.renames and status == 200:
            body = renamed(body, self.renames)
        self.bytes_out = len(body)
        self.siblings.answered(self.number, status, lines, body)

    def open_stream(self, status: int, lines: bytes) -> None:
        """The head of this part's stream."""
        if self.client is not None:
            self.status = status
            self.siblings.opened(status, lines)

    def send(self, data: bytes, framed: bytes = b"") -> None:
        """A part of this part's stream, in whole events."""
        if self.client is not None and data:
            if self.renames:
                data = renamed(data, self.renames)
            self.bytes_out += len(data)
            self.siblings.streamed(self.number, data)


class PartClient:
    """The client's connection as a part sees it: what ends one ends the whole."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self.peer = family.whole.peer
        self.passage: Passage | None = None

    def write(self, data: bytes) -> None:
        """Parts do not write."""
        raise AssertionError("a part speaks through its family")

    def bare_fd(self) -> int:
        """There is no socket."""
        return -1

    def finished(self, close: bool) -> None:
        self._family.finished()

    def abort(self) -> None:
        self._family.broke_off()

    def drop(self) -> None:
        client = self._family.whole.client
        if client is not None:
            client.drop()

    def has_left(self) -> bool:
        client = self._family.whole.client
        return client is not None and client.has_left()


class Family:
    """The parts of one exchange and what they have said."""

    def __init__(self, whole: Exchange, call: Call, give_up: Callable[[Exchange], None]) -> None:
        """`give_up` tells the core that nobody waits for a part any more."""
        self.whole = whole
        self.parts: list[Part] = []
        self._samples = call.samples
        self._give_up = give_up
        self._bodies: dict[int, bytes] = {}
        self._lines = b""
        self._merge = StreamMerge(call.parts, call.samples)
        self._streams = False
        self._running = call.parts
        self._over = False

    def left(self) -> None:
        """The client is gone."""
        self._over = True
        self._give_up_all()

    # ------------------------------------------------------------------- from the parts

    def answered(self, number: int, status: int, lines: bytes, body: bytes) -> None:
        """A part has a whole answer."""
        if self._over:
            return
        if status == 200:
            self._bodies[number] = body
            self._lines = self._lines or lines
        elif self.whole.committed:
            self.whole.send(b"data: %b\n\n" % body)
            self.broke_off()
        else:
            self._refuse(status, lines, body)

    def opened(self, status: int, lines: bytes) -> None:
        """A part begins to stream."""
        if not self._over and not self._streams:
            self._streams = True
            self.whole.open_stream(status, lines)

    def streamed(self, number: int, data: bytes) -> None:
        """A part has said more."""
        if self._over:
            return
        try:
            merged = self._merge.feed(number, data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self.whole.send(error_event(ErrorCode.WORKER_GARBAGE, _UNREADABLE))
            self.broke_off()
            return
        self.whole.send(merged)

    def finished(self) -> None:
        """A part has ended as it should, or has been refused."""
        self._running -= 1
        if self._running or self._over:
            return
        self._over = True
        try:
            if self._streams:
                self.whole.send(self._merge.end())
                self.whole.end_stream()
            else:
                bodies = [self._bodies[number] for number in sorted(self._bodies)]
                self.whole.respond(200, self._lines, merge(bodies, self._samples))
                self.whole.complete = True
        except (msgspec.MsgspecError, UnicodeDecodeError, IndexError):
            self._fail()
        self._end()

    def broke_off(self) -> None:
        """A part ended in the middle of its stream: nothing that follows could make the answer whole."""
        if self._over:
            return
        self._over = True
        client, self.whole.client = self.whole.client, None
        if client is not None:
            client.abort()
        self._give_up_all()

    # ------------------------------------------------------------------------ the end

    def _refuse(self, status: int, lines: bytes, body: bytes) -> None:
        self._over = True
        self.whole.respond(status, lines, body)
        self._end()
        self._give_up_all()

    def _fail(self) -> None:
        if not self.whole.committed:
            code = ErrorCode.WORKER_GARBAGE
            self.whole.respond(http_status(code), JSON_LINE, error_json(code, _UNREADABLE))

    def _end(self) -> None:
        client, self.whole.client = self.whole.client, None
        self.whole.call = None  # an idle connection remembers its last exchange, and bodies are large
        if client is not None:
            client.finished(close=not self.whole.kept_alive)

    def _give_up_all(self) -> None:
        for part in self.parts:
            if part.client is not None:
                self._give_up(part)
