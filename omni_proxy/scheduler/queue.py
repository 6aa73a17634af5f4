"""Requests that wait for a worker, first come first served within a line. Pure.

A line is the unit of blocking: those in it want the same workers, so when its first finds no room, nobody behind it is
looked at, while other lines go on. Orders other than arrival plug in here; nothing else knows the order.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from omni_proxy.lifecycle.request import Request

Line = tuple[str, ...]
"""Whom a request waits for: the model, and after its prefill also those that can receive from its P."""


class _Wait(NamedTuple):
    turn: int
    """Position among all lines; unique, below zero for those that go first."""
    line: Line
    tokens: int
    deadline: float


class WaitingQueue:
    """Lines with their totals in requests and tokens, and the deadline of each wait."""

    def __init__(self) -> None:
        # An OrderedDict takes from and puts to its front at the same cost, however long the line is.
        self._lines: dict[Line, OrderedDict[str, Request]] = {}
        self._waits: dict[str, _Wait] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._serial = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._waits)

    def __contains__(self, rid: str) -> bool:
        return rid in self._waits

    def push(self, request: Request, line: Line, deadline: float, first: bool = False) -> None:
        """Line up; `first` puts a request that had its turn before (a retry) in front of all others."""
        rid = request.rid
        assert rid not in self._waits, f"{rid} waits already"
        self._serial += 1
        waits = self._lines.get(line)
        if waits is None:
            waits = self._lines[line] = OrderedDict()
        waits[rid] = request
        if first:
            waits.move_to_end(rid, last=False)
        wait = _Wait(-self._serial if first else self._serial, line, request.prompt_tokens, deadline)
        self._waits[rid] = wait
        heapq.heappush(self._deadlines, (deadline, wait.turn, rid))
        self.tokens += wait.tokens

    def remove(self, request: Request) -> bool:
        """Leave the line; False when the request was not in it."""
        wait = self._waits.pop(request.rid, None)
        if wait is None:
            return False
        waits = self._lines[wait.line]
        del waits[request.rid]
        if not waits:
            del self._lines[wait.line]
        if not self._waits:
            self._deadlines.clear()
        self.tokens -= wait.tokens
        return True

    def requests(self) -> list[Request]:
        """Everyone who waits, each line in its order (a snapshot)."""
        return [request for waits in self._lines.values() for request in waits.values()]

    def fronts(self) -> Iterator[Request]:
        """The first of each line, longest waiting first.

        When the caller removes the request that it was given, the next of that line gets its turn; otherwise the line
        is left. Longest waiting first keeps one model from starving another that shares its workers.
        """
        turns = [(self._waits[next(iter(waits))].turn, line) for line, waits in self._lines.items()]
        heapq.heapify(turns)
        while turns:
            turn, line = heapq.heappop(turns)
            request = self.head(line)
            assert request is not None
            yield request
            following = self.head(line)
            if following is not None and (next_turn := self._waits[following.rid].turn) != turn:
                heapq.heappush(turns, (next_turn, line))

    def head(self, line: Line) -> Request | None:
        """The request of a line whose turn is next."""
        waits = self._lines.get(line)
        return next(iter(waits.values())) if waits else None

    def deadline(self, request: Request) -> float:
        """The instant at which a request's wait is over."""
        return self._waits[request.rid].deadline

    def next_deadline(self) -> float | None:
        """The first instant at which a wait is over, or None."""
        while self._deadlines:
            deadline, turn, rid = self._deadlines[0]
            wait = self._waits.get(rid)
            if wait is not None and wait.turn == turn:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def overdue(self, now: float) -> str | None:
        """A request whose wait is over, if there is one."""
        deadline = self.next_deadline()
        return self._deadlines[0][2] if deadline is not None and deadline <= now else None
