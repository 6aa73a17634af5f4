"""Requests that wait for a worker, first come first served within a model. Pure.

Orders other than arrival plug in here: `heads` decides who is looked at first, nothing else knows the order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from omni_proxy.lifecycle.request import Request


class WaitingQueue:
    """One queue for each model, with its totals in requests and tokens, and the deadline of each wait."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[str, Request]] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._serial = 0
        self._entries: dict[str, tuple[int, int]] = {}
        """rid -> (serial of this wait, tokens it was counted with)"""
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, rid: str) -> bool:
        return rid in self._entries

    def push(self, request: Request, deadline: float, first: bool = False) -> None:
        """Line up; `first` puts a request that had its turn before (a retry) in front of all others."""
        assert request.rid not in self._entries
        line = self._lines.setdefault(request.spec.model, {})
        if first:
            rest = dict(line)
            line.clear()
            line[request.rid] = request
            line.update(rest)
        else:
            line[request.rid] = request
        self._serial += 1
        self._entries[request.rid] = (self._serial, request.prompt_tokens)
        heapq.heappush(self._deadlines, (deadline, self._serial, request.rid))
        self.tokens += request.prompt_tokens

    def remove(self, request: Request) -> bool:
        """Leave the line; False when the request was not in it."""
        entry = self._entries.pop(request.rid, None)
        if entry is None:
            return False
        line = self._lines[request.spec.model]
        del line[request.rid]
        if not line:
            del self._lines[request.spec.model]
        self.tokens -= entry[1]
        return True

    def models(self) -> list[str]:
        """Models for which somebody waits, in order of name."""
        return sorted(self._lines)

    def heads(self, model: str) -> Iterator[Request]:
        """The waiting requests of a model in the order in which they should be served (a snapshot of the line)."""
        return iter(tuple(self._lines.get(model, {}).values()))

    def head(self, model: str) -> Request | None:
        """The request whose turn is next."""
        line = self._lines.get(model)
        return next(iter(line.values())) if line else None

    def next_deadline(self) -> float | None:
        """The first instant at which a wait is over, or None."""
        while self._deadlines:
            deadline, serial, rid = self._deadlines[0]
            entry = self._entries.get(rid)
            if entry is not None and entry[0] == serial:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def overdue(self, now: float) -> str | None:
        """A request whose wait is over, if there is one."""
        deadline = self.next_deadline()
        return self._deadlines[0][2] if deadline is not None and deadline <= now else None
