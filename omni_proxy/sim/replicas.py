"""Several gateways in the simulator: as many cores before the same workers, each with a late view of the others. Pure.

To the world they are one core. A request belongs to one of them for its whole life; what happens to workers all hear.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Final

from omni_proxy.core import Core
from omni_proxy.messages import (
    Arrived,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    Effect,
    Event,
    OthersHeard,
    Tick,
    WorkerAdded,
    WorkerDown,
    WorkerDraining,
    WorkerRemoved,
    WorkerShare,
    WorkerUp,
)
from omni_proxy.scheduler.others import added, differ, own_shares

_FOR_ALL: Final = (
    WorkerAdded,
    WorkerUp,
    WorkerDown,
    WorkerDraining,
    WorkerRemoved,
    BlocksStored,
    BlocksRemoved,
    CacheCleared,
)
_Report = tuple[list[WorkerShare], int]
"""What one gateway holds, and how many prompts wait in it."""


class Replicas:
    """`count` gateways that report what has changed, at most every `interval_s`; a report takes `delay_s`.

    `interval_s` None: they know nothing of each other. `owner` says who gets a request; default: each in turn.
    """

    def __init__(
        self,
        count: int,
        make_core: Callable[[int], Core],
        interval_s: float | None = 0.005,
        delay_s: float = 0.002,
        owner: Callable[[Arrived, int], int] | None = None,
    ) -> None:
        self.cores: Final[Sequence[Core]] = tuple(make_core(number) for number in range(count))
        self._owner = owner if owner is not None else self._in_turn
        self._owners: dict[str, int] = {}
        self._arrivals = 0
        self._talk = count > 1 and interval_s is not None
        self._interval_s = interval_s or 0.0
        self._delay_s = delay_s
        self._due: dict[int, float] = {}
        """When each gateway that something has changed in reports."""
        self._reported = [-inf] * count
        self._reports: list[_Report] = [([], 0)] * count
        """What all have heard of each."""
        self._on_its_way: deque[tuple[float, int, _Report]] = deque()

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Bring an event to whom it concerns. `now`: seconds."""
        effects: list[Effect] = []
        self._exchange(effects, now)
        if isinstance(event, Tick):
            for number, core in enumerate(self.cores):
                at = core.next_wakeup()
                if at is not None and at <= now:
                    self._tell(number, event, effects, now)
        elif isinstance(event, _FOR_ALL):
            for number in range(len(self.cores)):
                self._tell(number, event, effects, now)
        else:
            self._tell(self._owner_of(event), event, effects, now)
        return effects

    def next_wakeup(self) -> float | None:
        """The instant at which one of them, or a report, wants a `Tick`."""
        instants = [at for core in self.cores if (at := core.next_wakeup()) is not None]
        instants += self._due.values()
        if self._on_its_way:
            instants.append(self._on_its_way[0][0])
        return min(instants, default=None)

    def waiting(self) -> tuple[int, int]:
        """Requests and prompt tokens that wait in all of them."""
        waits = [core.waiting() for core in self.cores]
        return sum(requests for requests, _ in waits), sum(tokens for _, tokens in waits)

    def _tell(self, number: int, event: Event, effects: list[Effect], now: float) -> None:
        effects += self.cores[number].handle(event, now)
        if self._talk and number not in self._due and not isinstance(event, BlocksStored | BlocksRemoved):
            self._due[number] = max(now, self._reported[number] + self._interval_s)

    def _owner_of(self, event: Event) -> int:
        lease = getattr(event, "lease", None)
        rid: str = event.rid if lease is None else lease.rid  # type: ignore[union-attr]
        if isinstance(event, Arrived):
            self._owners[rid] = self._owner(event, len(self.cores))
        return self._owners[rid]

    def _in_turn(self, event: Arrived, count: int) -> int:
        self._arrivals += 1
        return self._arrivals % count

    def _exchange(self, effects: list[Effect], now: float) -> None:
        """Deliver the reports that have arrived, make those that are due."""
        changed = False
        while self._on_its_way and self._on_its_way[0][0] <= now:
            _, number, report = self._on_its_way.popleft()
            changed = changed or report[1] != self._reports[number][1] or differ(report[0], self._reports[number][0])
            self._reports[number] = report
        for number in [n for n, at in self._due.items() if at <= now]:
            del self._due[number]
            self._reported[number] = now
            core = self.cores[number]
            self._on_its_way.append((now + self._delay_s, number, (own_shares(core.workers(), now), core.waiting()[0])))
        if changed:
            for number in range(len(self.cores)):
                self._tell(number, self._heard(number), effects, now)

    def _heard(self, number: int) -> OthersHeard:
        """What one of them knows of the others by now."""
        others = [report for owner, report in enumerate(self._reports) if owner != number]
        return OthersHeard(
            len(others),
            place=number,
            turn_s=self._interval_s + self._delay_s,
            loads=added(shares for shares, _ in others),
            waiting=sum(waits for _, waits in others),
        )
