"""The head of the queue: what stands above every order. Pure.

First those that had their turn before (retries), then, as far as their share goes, those that have waited for longer
than the starvation timeout, the longest waiting first; then the client's priority classes, the lowest number first as
engines have it; within a class fair shares of the tenants, where asked for; within those the late, as far as their
share goes, those that would be late otherwise (`ageing.py`), and then the order of the config.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Final

from omni_proxy.lifecycle.request import Request
from omni_proxy.scheduler.ageing import Ageing
from omni_proxy.scheduler.orders import Order
from omni_proxy.scheduler.queue import WaitingQueue

_MOST_TENANTS: Final = 10_000
_LEAST_WEIGHT: Final = 1e-3

_AGAIN: Final = 0
_STARVED: Final = 1
_ORDINARY: Final = 2
_STARVED_LATER: Final = 3
"""Groups: the lowest goes first."""

_Standing = tuple[int, int, int, float, int, Request]
"""Group, class, turn of the late, rank, position: unique before the request is compared."""


class Shares:
    """How much each tenant has had, by its weight: who had least is next. Who comes back gets no credit for absence."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._had: dict[str, float] = {}
        self._floor = 0.0

    def took(self, tenant: str, tokens: int) -> None:
        """A tenant got so many prompt tokens computed."""
        if len(self._had) >= _MOST_TENANTS:
            self._had.clear()
            self._floor = 0.0
        self._had[tenant] = max(self._had.get(tenant, 0.0), self._floor) + tokens / self._weight(tenant)

    def merge(self, standings: Sequence[_Standing], count: int) -> list[_Standing]:
        """Those of one class in a fair order, each tenant's own in the order given."""
        rows: dict[str, list[_Standing]] = {}
        for standing in standings:
            rows.setdefault(standing[5].spec.tenant, []).append(standing)
        if len(rows) == 1:
            return list(standings[:count])
        had = {tenant: self._had.get(tenant, 0.0) for tenant in rows}
        self._floor = max(self._floor, min(had.values()))
        turns = [(max(value, self._floor), tenant, 0) for tenant, value in had.items()]
        heapq.heapify(turns)
        merged: list[_Standing] = []
        while turns and len(merged) < count:
            value, tenant, place = heapq.heappop(turns)
            row = rows[tenant]
            merged.append(row[place])
            request = row[place][5]
            value += max(1, request.prompt_tokens - request.best_cached) / self._weight(tenant)
            if place + 1 < len(row):
                heapq.heappush(turns, (value, tenant, place + 1))
        return merged

    def _weight(self, tenant: str) -> float:
        return max(_LEAST_WEIGHT, self._weights.get(tenant, 1.0))


class Lineup:
    """Puts a waiting queue in order, as far as its head is asked for."""

    def __init__(self, order: Order, ageing: Ageing, shares: Shares | None = None) -> None:
        self._order = order
        self._ageing = ageing
        self._shares = shares

    def lines_up(self, fair_s: float, now: float) -> None:
        """A request begins to wait; in order of arrival that would take `fair_s` seconds."""
        self._ageing.lines_up(fair_s, now)

    def took(self, request: Request, uncached: int, cost_s: float, now: float) -> None:
        """A request got its worker: so many tokens to compute, which takes so many seconds."""
        self._ageing.took(self._ageing.is_late(request, now), cost_s)
        if self._shares is not None:
            self._shares.took(request.spec.tenant, uncached)

    def took_elsewhere(self, tenant: str, tokens: int) -> None:
        """So many prompt tokens are computed for a tenant by others than our prefill workers."""
        if self._shares is not None:
            self._shares.took(tenant, tokens)

    def head(self, queue: WaitingQueue, count: int, now: float) -> list[Request]:
        """The first `count` of those that wait, the next first."""
        waiting = queue.requests()
        if len(waiting) < 2:
            self._ageing.even()
            return waiting
        ranks, due = self._order.ranks(waiting, now), now - self._ageing.bound_s
        # Most are neither late nor come back: tuples are made for all at once, and then exchanged for a few.
        classes = [request.spec.priority for request in waiting]
        standings: list[_Standing] = list(
            zip(repeat(_ORDINARY), classes, repeat(1), ranks, range(len(waiting)), waiting, strict=False)
        )
        on_time, late = self._stand_out(queue, standings, due, now)
        for place in self._pressed(on_time, late > 0, now):
            request = waiting[place]
            standings[place] = (_ORDINARY, request.spec.priority, 0, request.queued_at, place, request)
        if not 0 < late < len(waiting):
            self._ageing.even()
        if self._shares is None:
            return [standing[5] for standing in heapq.nsmallest(count, standings)]
        return self._fair(sorted(standings), count, self._shares)

    def _stand_out(
        self, queue: WaitingQueue, standings: list[_Standing], due: float, now: float
    ) -> tuple[Sequence[_Standing], int]:
        """Give those their places who come back or are late; returns those on time, and how many are not."""
        ageing = self._ageing
        starved_group, late_turn = (_STARVED, 0) if ageing.late_first else (_STARVED_LATER, 2)
        out: set[int] = set()
        for _, priority, _, _, place, request in standings:
            since = request.queued_at
            if since > due and not request.retries:
                continue
            if request.retries and queue.goes_first(request):
                standings[place] = (_AGAIN, 0, 0, since, place, request)
            elif since > due:
                continue
            elif ageing.is_starved(request, now):
                standings[place] = (starved_group, 0, 0, since, place, request)
            else:
                standings[place] = (_ORDINARY, priority, late_turn, since, place, request)
            out.add(place)
        return ([standing for standing in standings if standing[4] not in out] if out else standings), len(out)

    def _pressed(self, on_time: Sequence[_Standing], late: bool, now: float) -> list[int]:
        """Who must go before the first in the order, of the class whose turn it is, by place. `late`: are any?"""
        if not on_time:
            return []
        first = min(on_time)
        rows = [standing[5] for standing in on_time if standing[1] == first[1]]
        pressed = self._ageing.pressed(rows, first[5], late, now)
        return [standing[4] for standing in on_time if standing[5].rid in pressed] if pressed else []

    def _fair(self, standings: list[_Standing], count: int, shares: Shares) -> list[Request]:
        """Each class of the ordinary ones merged by fair shares; those in front of them as they are."""
        found: list[Request] = []
        begin = 0
        while begin < len(standings) and len(found) < count:
            end = begin + 1
            if standings[begin][0] == _ORDINARY:
                while end < len(standings) and standings[end][1] == standings[begin][1]:
                    end += 1
                merged = shares.merge(standings[begin:end], count - len(found))
                found.extend([standing[5] for standing in merged])
            else:
                found.append(standings[begin][5])
            begin = end
        return found
