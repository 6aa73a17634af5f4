"""Requests that wait for a worker, first come first served within a line. Pure.

A line is the unit of blocking: those in it want the same workers, so when its first finds no room, nobody behind it is
looked at, while other lines go on. Orders other than arrival plug in here; nothing else knows the order.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, NamedTuple

from omni_proxy.lifecycle.request import Request

Line = tuple[str, ...]
"""Whom a request waits for: the model, and after its prefill also those that can receive from its P."""

Rank = Callable[[Request], tuple[int, float, int]]
"""The lowest goes first; unique among those that wait."""


RANKED: Final = 64
"""So many at the head of a line are compared."""


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
        self.waits: dict[str, _Wait] = {}
        """Who waits; to be read only."""
        self._deadlines: list[tuple[float, int, str]] = []
        self._serial = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self.waits)

    def __contains__(self, rid: str) -> bool:
        return rid in self.waits

    def push(self, request: Request, line: Line, deadline: float, first: bool = False) -> None:
        """Line up; `first` puts a request that had its turn before (a retry) in front of all others."""
        rid = request.rid
        assert rid not in self.waits, f"{rid} waits already"
        self._serial += 1
        row = self._lines.get(line)
        if row is None:
            row = self._lines[line] = OrderedDict()
        row[rid] = request
        if first:
            row.move_to_end(rid, last=False)
        wait = _Wait(-self._serial if first else self._serial, line, request.prompt_tokens, deadline)
        self.waits[rid] = wait
        self.tokens += wait.tokens
        if len(self._deadlines) > 100 + 2 * len(self.waits):  # most are of waits that have ended
            self._deadlines = [(w.deadline, w.turn, r) for r, w in self.waits.items()]
            heapq.heapify(self._deadlines)
        else:
            heapq.heappush(self._deadlines, (deadline, wait.turn, rid))

    def remove(self, request: Request) -> bool:
        """Leave the line; False when the request was not in it."""
        wait = self.waits.pop(request.rid, None)
        if wait is None:
            return False
        row = self._lines[wait.line]
        del row[request.rid]
        if not row:
            del self._lines[wait.line]
        if not self.waits:
            self._deadlines.clear()
        self.tokens -= wait.tokens
        return True

    def requests(self) -> list[Request]:
        """Everyone who waits, each line in its order (a snapshot)."""
        return [request for row in self._lines.values() for request in row.values()]

    def fronts(self, rank: Rank | None = None) -> Iterator[Request]:
        """The first of each line, by the least `rank` among its oldest where one is given.

        The line that has waited longest comes first.

        When the caller removes the request that it was given, the next of that line gets its turn; otherwise the line
        is left. Longest waiting first keeps one model from starving another that shares its workers.
        """
        turns = [(self._turn(line), line) for line in self._lines]
        heapq.heapify(turns)
        while turns:
            _, line = heapq.heappop(turns)
            request = self._first(line, rank)
            yield request
            if request.rid not in self.waits and line in self._lines:
                heapq.heappush(turns, (self._turn(line), line))

    def _turn(self, line: Line) -> int:
        return self.waits[next(iter(self._lines[line]))].turn

    def _first(self, line: Line, rank: Rank | None) -> Request:
        row = self._lines[line]
        if rank is None or len(row) == 1:
            return next(iter(row.values()))
        return min(islice(row.values(), RANKED), key=rank)

    def head(self, line: Line) -> Request | None:
        """The request that has waited longest in a line."""
        row = self._lines.get(line)
        return next(iter(row.values())) if row else None

    def goes_first(self, request: Request) -> bool:
        """Did a request line up in front of all others?"""
        return self.waits[request.rid].turn < 0

    def deadline(self, request: Request) -> float:
        """The instant at which a request's wait is over."""
        return self.waits[request.rid].deadline

    def next_deadline(self) -> float | None:
        """The first instant at which a wait is over, or None."""
        while self._deadlines:
            deadline, turn, rid = self._deadlines[0]
            wait = self.waits.get(rid)
            if wait is not None and wait.turn == turn:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def overdue(self, now: float) -> str | None:
        """A request whose wait is over, if there is one."""
        deadline = self.next_deadline()
        return self._deadlines[0][2] if deadline is not None and deadline <= now else None
