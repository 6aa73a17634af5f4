"""How busy the machine was during a run: by gateway, workers, client, and whoever else runs here.

A compressed run is fair only where nobody had to wait for a core; this says whether that was so.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmarks.relay import procs

FULL: Final = 0.85
"""From this share of their cores on, workers and client, or the gateway, keep each other waiting."""
FOREIGN: Final = 0.10
"""From this share of all cores on, others have had a part in what was measured."""
LATE_S: Final = 0.1
"""A client that is so late at p99, in the run's seconds, no longer sends the same instants to all."""


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the time of their own cores; `foreign` of all cores, a hypervisor's steal included."""

    gateway: float = 0.0
    workers: float = 0.0
    client: float = 0.0
    foreign: float = 0.0

    def faults(self, lag_p99_s: float) -> list[str]:
        """Why a run says less than it seems to; empty where it was fair."""
        found = []
        if self.workers + self.client > FULL:
            found.append(f"workers and client used {self.workers + self.client:.0%} of their cores")
        if self.gateway > FULL:
            found.append(f"the gateway used {self.gateway:.0%} of its core")
        if self.foreign > FOREIGN:
            found.append(f"others used {self.foreign:.0%} of the machine")
        if lag_p99_s > LATE_S:
            found.append(f"the client was {lag_p99_s:.2f} s late at p99")
        return found


@dataclass(frozen=True, slots=True)
class Instant:
    """What had been used by some instant, in seconds of CPU."""

    at: float
    gateway: float
    workers: float
    client: float
    busy: float

    @classmethod
    def now(cls, gateway_ns: int, workers_ns: int, cpus: Sequence[int]) -> "Instant":
        """`cpus`: all cores of the run."""
        times = os.times()
        busy = procs.busy_ns(cpus) / 1e9
        return cls(time.monotonic(), gateway_ns / 1e9, workers_ns / 1e9, times.user + times.system, busy)


def shares(begin: Instant, end: Instant, gateway_cpus: Sequence[int], other_cpus: Sequence[int]) -> Shares:
    """What became of the cores between two instants."""
    wall = max(end.at - begin.at, 1e-9)
    gateway, workers, client = (getattr(end, name) - getattr(begin, name) for name in ("gateway", "workers", "client"))
    every = len({*gateway_cpus, *other_cpus})
    foreign = max(0.0, end.busy - begin.busy - gateway - workers - client)
    return Shares(
        gateway / (wall * len(gateway_cpus)),
        workers / (wall * len(other_cpus)),
        client / (wall * len(other_cpus)),
        foreign / (wall * every),
    )
