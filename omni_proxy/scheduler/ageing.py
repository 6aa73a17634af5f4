"""How long a prompt may be passed over, and how much those get who were passed over for too long. Pure.

Orders that prefer short prompts keep long ones waiting for as long as short ones come. So waits are bounded, by the
longest wait that order of arrival would have meant lately, times a factor, and by `starvation_timeout_s`. Short prompts
go first as long as everybody can still be served within the bound; then those go that would miss it, oldest first:

    oldest ──── work of those before it ────┤ slack ├ bound        a prompt that takes less than the least slack
                                                                   may go before all of them

When work exceeds capacity not all can be in time. Then those are given up that need most work, so that the others are.
Who has waited for longer than the bound is late. An order in which the late always go first is the order of arrival, in
which everybody waits long; so the late have a share of the workers' time, the longest waiting first, and what is on
time has the rest. Who is late is computed, whatever comes, once those that were late before are, in that share.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from math import inf
from operator import sub
from typing import Final

from omni_proxy.lifecycle.request import Request

_EARLIEST_S: Final = 1.0
"""Nobody is late sooner: so long a wait is not worth a worse order."""
_LATELY_S: Final = 60.0
"""For so long it is remembered how long the wait in order of arrival would have been."""
_MARGIN_S: Final = 0.3
"""Work begun is not broken off, and forecasts err: slack below this is none."""
_AGAIN_S: Final = 0.1
"""What was found of slack holds for so long: less than the margin."""


class Ageing:
    """Who is late, who must go now not to be, and whose turn it is. Instants in seconds, monotonic."""

    def __init__(self, starvation_timeout_s: float, share: float, factor: float | None, presses: bool) -> None:
        """`factor` None: the timeout alone is the bound. `presses`: does the order pass anybody over?"""
        self._timeout_s = starvation_timeout_s
        self._share = share
        self._factor = factor
        self._presses = presses
        self._waits: deque[tuple[float, float]] = deque()
        """Waits in order of arrival by their instant, each longer than all later ones."""
        self._pressed: frozenset[str] = frozenset()
        self._pressed_at = -inf
        self._ahead_s = 0.0
        """Work that the late had more than is their due, against that of the others; below 0: less."""

    def lines_up(self, fair_s: float, now: float) -> None:
        """A request comes that would wait for `fair_s` in order of arrival."""
        if self._factor is None:
            return
        waits = self._waits
        while waits and waits[-1][1] <= fair_s:
            waits.pop()
        waits.append((now, fair_s))
        while waits[0][0] < now - _LATELY_S:
            waits.popleft()

    @property
    def bound_s(self) -> float:
        """Who has waited for longer is late."""
        if self._factor is None or not self._waits:
            return self._timeout_s
        return min(self._timeout_s, max(_EARLIEST_S, self._factor * self._waits[0][1]))

    def is_starved(self, request: Request, now: float) -> bool:
        """Has a request waited for longer than the timeout?"""
        return now >= request.queued_at + self._timeout_s

    def is_late(self, request: Request, now: float) -> bool:
        """Has a request waited for longer than the bound?"""
        return now >= request.queued_at + self.bound_s

    def pressed(self, on_time: Sequence[Request], first: Request, late: bool, now: float) -> frozenset[str]:
        """Which of those on time must go before `first`, if as many as can be are to be served within the bound.

        `late`: do others wait that are late, and have their share?
        """
        if self._presses and now - self._pressed_at >= _AGAIN_S:
            self._pressed_at = now
            self._pressed = self._find_pressed(on_time, first, late, now)
        return self._pressed

    def _find_pressed(self, on_time: Sequence[Request], first: Request, late: bool, now: float) -> frozenset[str]:
        part = 1.0 - self._share if late and self._share < 1.0 else 1.0
        bound_s, margin_s = self.bound_s, _MARGIN_S + first.work_s
        oldest = min([r.queued_at for r in on_time])
        if now - oldest + sum([r.work_s for r in on_time]) / part + margin_s <= bound_s:
            return frozenset()  # in any order
        by_age = sorted(on_time, key=_since)
        # Of what passes until each one's bound, so much is for those on time.
        left_s = [(r.queued_at + bound_s - now) * part for r in by_age]
        upto = _before_least_slack(left_s, [r.work_s for r in by_age], margin_s * part)
        return frozenset([by_age[place].rid for place in upto])

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


def _since(request: Request) -> float:
    return request.queued_at


def _before_least_slack(left_s: Sequence[float], work_s: Sequence[float], margin_s: float) -> Sequence[int]:
    """Those up to the one with the least slack, if that is below the margin; of those that can be done in time.

    Each has so much time left, rising, and so much work. All come by their place.
    """
    slack = list(map(sub, left_s, accumulate(work_s)))
    kept: Sequence[int] = range(len(slack))
    if min(slack) < 0.0:
        kept = _feasible(left_s, work_s, slack)
        slack = list(map(sub, [left_s[place] for place in kept], accumulate([work_s[place] for place in kept])))
    least = min(slack, default=inf)
    return kept[: slack.index(least) + 1] if least < margin_s else ()


def _feasible(left_s: Sequence[float], work_s: Sequence[float], slack: Sequence[float]) -> list[int]:
    """As many as can be done in time one after another: where that fails, the largest is left out."""
    begin = next(place for place, spare_s in enumerate(slack) if spare_s < 0.0)
    kept = [(-work_s[place], place) for place in range(begin)]
    heapq.heapify(kept)
    sum_s, left_out = sum(work_s[:begin]), set()
    for place in range(begin, len(slack)):
        sum_s += work_s[place]
        heapq.heappush(kept, (-work_s[place], place))
        while kept and sum_s > left_s[place]:
            largest, which = heapq.heappop(kept)
            sum_s += largest
            left_out.add(which)
    return [place for place in range(len(slack)) if place not in left_out]
