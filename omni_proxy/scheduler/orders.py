"""Who goes first among those that wait for a prefill worker: ranks by which the planner walks its queue. Pure.

A rank is a number, the lowest goes first. What stands above all orders (retries, starvation, the client's priority
classes, fair shares) is in `lineup.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from omni_proxy.lifecycle.request import Request
from omni_proxy.scheduler.settings import SchedulingSettings
from omni_proxy.scheduler.targets import Targets

_LEAST_WAIT_S: Final = 0.05
"""Waits are compared with the longest one, but not with less than this."""
_LATE: Final = 1e9
"""Ranks of those whose target has passed begin here."""


class Order(Protocol):
    """One way to put those that wait in order."""

    def ranks(self, waiting: Sequence[Request], now: float) -> list[float]:
        """A rank for each request, in the same order. `waiting` is not empty; `now` in seconds, monotonic."""
        ...


class FirstCome:
    """In the order of arrival."""

    def __init__(self, settings: SchedulingSettings) -> None:
        pass

    def ranks(self, waiting: Sequence[Request], now: float) -> list[float]:
        return [r.queued_at for r in waiting]


class ShortestUncached:
    """Least work first: prompt tokens that no worker has cached."""

    def __init__(self, settings: SchedulingSettings) -> None:
        pass

    def ranks(self, waiting: Sequence[Request], now: float) -> list[float]:
        return [float(r.prompt_tokens - r.best_cached) for r in waiting]


class Weighted:
    """Little work, long waiting and a large cached share first, each as a share of the most in the queue."""

    def __init__(self, settings: SchedulingSettings) -> None:
        self._length = settings.length_weight
        self._wait = settings.wait_weight
        self._apc = settings.apc_weight

    def ranks(self, waiting: Sequence[Request], now: float) -> list[float]:
        work = [r.prompt_tokens - r.best_cached for r in waiting]
        longest = now - min([r.queued_at for r in waiting])
        by_length = self._length / max(1, *work)
        by_wait = self._wait / max(_LEAST_WAIT_S, longest)
        # The constant parts of the formula change no order: length counts against, waiting for a request.
        ranks = [w * by_length - (now - r.queued_at) * by_wait for w, r in zip(work, waiting, strict=True)]
        if self._apc:
            ranks = [
                rank - self._apc * r.best_cached / max(1, r.prompt_tokens)
                for rank, r in zip(ranks, waiting, strict=True)
            ]
        return ranks


class OmniNginx:
    """The formula of Omni Proxy for nginx: 0.8 · (maxTok - tok) / maxTok + 0.2 · waited / max(50 ms, longest wait)."""

    def __init__(self, settings: SchedulingSettings) -> None:
        pass

    def ranks(self, waiting: Sequence[Request], now: float) -> list[float]:
        most = max(1, *[r.prompt_tokens for r in waiting])
        longest = max(_LEAST_WAIT_S, now - min([r.queued_at for r in waiting]))
        return [-(0.8 * (most - r.prompt_tokens) / most + 0.2 * (now - r.queued_at) / longest) for r in waiting]


class Deadline:
    """The earliest target first; those who have missed theirs wait for those who can still be served in time."""

    def __init__(self, settings: SchedulingSettings) -> None:
        self._targets = Targets(settings)

    def ranks(self, waiting: Sequence[Request], now: float) -> list[float]:
        return [self._rank(r, now) for r in waiting]

    def _rank(self, request: Request, now: float) -> float:
        target_s = self._targets.ttft_s(request.spec)
        if target_s is None:
            return _LATE + request.queued_at
        due = request.arrived_at + target_s
        return due if due > now else _LATE + request.queued_at
