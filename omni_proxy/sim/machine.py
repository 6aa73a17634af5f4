"""What the kernel counted of processes and cores: who ran, and who had to wait for a core. Linux; elsewhere nothing.

A worker that shares cores with others takes longer than one that was measured alone, by as much as its engine's thread
waited for a core:

    contention = (time on a core + time ready to run, without one) / time on a core
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread's seconds on a core and in the queue for one, and how often it got one."""

    run_s: float
    wait_s: float
    turns: int


_NONE: Final = Thread(0.0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class Cores:
    """All cores of the machine, in seconds of CPU since it started."""

    at: float
    busy_s: float
    steal_s: float


def threads(pid: int) -> dict[str, Thread]:
    """The threads of a process by id; none where the kernel does not say."""
    found = {}
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            run, wait, turns = map(int, (task / "schedstat").read_text().split())
            found[task.name] = Thread(run / 1e9, wait / 1e9, turns)
    except (OSError, ValueError):
        return {}
    return found


def busiest(before: dict[str, Thread], after: dict[str, Thread]) -> Thread | None:
    """What the thread that ran most between two looks did meanwhile: a worker's engine."""
    gains = [
        Thread(now.run_s - then.run_s, now.wait_s - then.wait_s, now.turns - then.turns)
        for tid, now in after.items()
        for then in [before.get(tid, _NONE)]
    ]
    return max(gains, key=lambda thread: thread.run_s, default=None)


class Watch:
    """By which factor waiting for a core has made processes slower since it was made."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._before = {pid: threads(pid) for pid in pids}

    def factor(self) -> float:
        """Of all of them together; 1 where nothing is known."""
        found = [busiest(before, threads(pid)) for pid, before in self._before.items()]
        run = sum(thread.run_s for thread in found if thread is not None)
        wait = sum(thread.wait_s for thread in found if thread is not None)
        return (run + wait) / run if run > 0 else 1.0

    def ran_s(self) -> float:
        """Seconds that their busiest threads, a worker's engine, have spent on a core."""
        found = [busiest(before, threads(pid)) for pid, before in self._before.items()]
        return sum(thread.run_s for thread in found if thread is not None)

    def turn_wait_s(self) -> float:
        """How long a process's main thread, which carries its connections, waited for a core each time it woke up."""
        wait, turns = 0.0, 0
        for pid, before in self._before.items():
            now, then = threads(pid).get(str(pid), _NONE), before.get(str(pid), _NONE)
            wait += now.wait_s - then.wait_s
            turns += now.turns - then.turns
        return wait / turns if turns > 0 else 0.0


def ran_s(pids: Iterable[int]) -> float:
    """Seconds of CPU of these processes so far."""
    return sum(_ran_s(pid) for pid in pids)


def _ran_s(pid: int) -> float:
    try:
        return time.clock_gettime((~pid << 3) | 2)  # Linux's id of another process's CPU clock
    except OSError:
        return 0.0


def cores() -> Cores | None:
    """What all cores have done so far; None where the kernel does not say."""
    try:
        line = Path("/proc/stat").read_text().splitlines()[0]
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
    except (OSError, ValueError, IndexError):
        return None
    busy = user + nice + system + irq + softirq + steal
    return Cores(time.monotonic(), busy * _TICK_S, steal * _TICK_S)


@dataclass(frozen=True, slots=True)
class Use:
    """Shares of all cores between two looks."""

    own: float
    others: float
    """Whoever else runs here, a hypervisor's steal included."""
    steal: float


def use(before: Cores | None, after: Cores | None, own_s: float) -> Use | None:
    """How the machine was used, of which our own processes took `own_s` seconds of CPU."""
    if before is None or after is None:
        return None
    every = max(after.at - before.at, 1e-9) * (os.cpu_count() or 1)
    busy = (after.busy_s - before.busy_s) / every
    own = own_s / every
    return Use(own, max(0.0, busy - own), (after.steal_s - before.steal_s) / every)
