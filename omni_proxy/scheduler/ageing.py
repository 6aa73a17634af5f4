"""How long a prompt may be passed over, and how much those get who were passed over for that long. Pure.

Orders that prefer short prompts keep long ones waiting for as long as short ones come. Two instants end that:

    aged      it has waited as long as it would have in order of arrival, times a factor: first within its class
    starved   it has waited for `starvation_timeout_s`: first of all, whatever its class

When work exceeds capacity for a while, all that waits gets late sooner or later, and an order in which the late always
go first is the order of arrival: everybody waits long. So the late have a share of the workers' time, the longest late
first, and what is on time has the rest. Who is late is computed, whatever comes, once those that were late before are
computed in that share: that is the bound.
"""

from __future__ import annotations

from typing import Final

from omni_proxy.lifecycle.request import Request

_EARLIEST_S: Final = 1.0
"""Nobody ages sooner: so long a wait is not worth a worse order."""


class Ageing:
    """Who is late, and whose turn it is. Instants in seconds, monotonic."""

    def __init__(self, starvation_timeout_s: float, starved_share: float, factor: float | None) -> None:
        self._timeout_s = starvation_timeout_s
        self._share = starved_share
        self._factor = factor
        self._ahead_s = 0.0
        """Work that the late had more than is their due, against that of the others; below 0: less."""

    def lines_up(self, request: Request, fair_s: float) -> None:
        """Note when a request gets late that would wait for `fair_s` in order of arrival."""
        wait_s = self._timeout_s
        if self._factor is not None:
            wait_s = min(wait_s, max(_EARLIEST_S, self._factor * fair_s))
        request.due_at = min(request.due_at, request.queued_at + wait_s)

    def is_starved(self, request: Request, now: float) -> bool:
        """Has a request waited for longer than the timeout?"""
        return now >= request.queued_at + self._timeout_s

    def is_late(self, request: Request, now: float) -> bool:
        """Is a request starved or aged?"""
        return now >= request.due_at or self.is_starved(request, now)

    @property
    def late_first(self) -> bool:
        """Is it the turn of the late?"""
        return self._ahead_s <= 0.0

    def took(self, late: bool, cost_s: float) -> None:
        """A waiting request got its worker for so long."""
        self._ahead_s += cost_s * (1.0 - self._share) if late else -cost_s * self._share

    def even(self) -> None:
        """Nobody waits, or only one kind does: nobody owes anybody anything."""
        self._ahead_s = 0.0
