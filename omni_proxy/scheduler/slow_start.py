"""Slow start: a worker that has just come back gets its share of the work back bit by bit. Pure.

Its caches are cold and its first answers slow, while its counters say that it is idle: without this, all that waits
would fall on it at once. Both what is compared (weight) and what bounds (sequences) grow in proportion to time.
"""

from __future__ import annotations

from math import floor
from typing import Final, Protocol

from omni_proxy.messages import WorkerSpec

_EPSILON: Final = 1e-6
"""An instant computed as "the share is 3/32 now" must not count as just before it."""


class Starting(Protocol):
    """A worker whose share can be set."""

    spec: WorkerSpec

    def set_share(self, share: float, max_seqs: int) -> None: ...


class SlowStarts:
    """The workers that are on their way to their full share, with the instant at which each began."""

    def __init__(self) -> None:
        self._begun: dict[Starting, float] = {}

    def begin(self, worker: Starting, at: float) -> None:
        """From the instant `at` on, lead a worker to its full share; nothing where its description asks for none."""
        if worker.spec.slow_start_s > 0:
            self._begun[worker] = at
            worker.set_share(0.0, min(1, worker.spec.max_seqs))

    def end(self, worker: Starting) -> None:
        """The worker is no member any more, or its description asks for no slow start."""
        if self._begun.pop(worker, None) is not None:
            worker.set_share(1.0, worker.spec.max_seqs)

    def advance(self, now: float) -> None:
        """Give every starting worker the share that is its due."""
        for worker, begun in list(self._begun.items()):
            share = (now - begun) / worker.spec.slow_start_s if worker.spec.slow_start_s > 0 else 1.0
            if share >= 1 - _EPSILON:
                self.end(worker)
                continue
            share = max(0.0, share)
            allowed = floor(worker.spec.max_seqs * share + _EPSILON)
            worker.set_share(share, min(worker.spec.max_seqs, max(1, allowed)))

    def next_step(self, now: float) -> float | None:
        """The next instant at which one of them may hold one more sequence, or None."""
        return min((_next_step(worker, begun, now) for worker, begun in self._begun.items()), default=None)


def _next_step(worker: Starting, begun: float, now: float) -> float:
    """The share that allows n sequences is n / max_seqs; the first one is always allowed."""
    most, duration = worker.spec.max_seqs, worker.spec.slow_start_s
    if most <= 1 or duration <= 0:
        return begun + duration
    allowed = max(1, floor(most * max(0.0, now - begun) / duration + _EPSILON))
    return begun + duration * min(1.0, (allowed + 1) / most)
