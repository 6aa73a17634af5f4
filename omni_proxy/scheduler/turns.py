"""Whose turn it is at a worker that several gateways want: none of them asks, each knows its place. Pure.

Gateways with the same view see a worker open at the same instant, and all would send it a prompt before any of them
hears of the others. So at each worker they go one after another, in an order that differs from worker to worker; by the
time that the second may send, it has heard of what the first has sent. A prompt waits no more than a small share of
what it takes to compute, so that short prompts are sent at once, as they are where there is one gateway only.
"""

from __future__ import annotations

from math import inf
from typing import Final
from zlib import crc32

from omni_proxy.lifecycle.request import Request
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.load import WorkerLoad

MOST_SHARE: Final = 0.1
"""Of what a prompt takes to compute, in waiting for a turn."""
_EPSILON_S: Final = 1e-6


class Turns:
    """Says when a prompt has to wait for its turn. Seconds, monotonic."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.wake_at = inf
        """When the first prompt that was told to wait has its turn."""

    def begin_walk(self) -> None:
        """Nobody waits for a turn, as far as this walk knows."""
        self.wake_at = inf

    def waits(self, request: Request, worker: WorkerLoad, cost_s: float, now: float) -> bool:
        """Should others, whose turn is earlier, be given time to send to this worker?"""
        gateways = self._ledger.gateways
        if gateways == 0:
            return False
        turn = (crc32(worker.name.encode()) + self._ledger.place) % (gateways + 1)
        if turn == 0:
            return False
        since = max(request.marks[-1][1], worker.backlog.opened_at(now))
        until = since + min(turn * self._ledger.turn_s, MOST_SHARE * cost_s)
        if now >= until - _EPSILON_S:
            return False
        self.wake_at = min(self.wake_at, until)
        return True
