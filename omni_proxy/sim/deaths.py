"""Brings the outages of a simulated world about, and tells the gateway of them when its probes would. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from omni_proxy.messages import CacheCleared, Event, WorkerDown, WorkerSpec, WorkerUp
from omni_proxy.sim.outages import OutagePlan

At = Callable[[float, Callable[[float], None]], None]
Tell = Callable[[Event, float], None]
Lose = Callable[[int, float], None]


class Deaths:
    """Which workers are dead. `at`: the world's clock; `tell`: its gateway; `lose`: end all that a worker has."""

    def __init__(self, plan: OutagePlan, specs: Sequence[WorkerSpec], at: At, tell: Tell, lose: Lose) -> None:
        self._plan = plan
        self._specs = tuple(specs)
        self._at = at
        self._tell = tell
        self._lose = lose
        self._counts = [0 for _ in specs]
        self._dead: set[int] = set()
        self._down: set[int] = set()
        """Those of which the gateway was told that they cannot be used."""

    def schedule(self) -> None:
        """Put all outages on the clock."""
        places = {spec.name: place for place, spec in enumerate(self._specs)}
        for outage in self._plan.outages:
            self._at(outage.begin, partial(self._dies, places[outage.worker], outage.end))

    def __contains__(self, place: int) -> bool:
        return place in self._dead

    def _dies(self, place: int, end: float | None, now: float) -> None:
        self._dead.add(place)
        self._counts[place] += 1
        self._lose(place, now)
        self._at(now + self._plan.down_after_s, partial(self._found_down, place, self._counts[place]))
        if end is not None:
            self._at(end, partial(self._returns, place))

    def _found_down(self, place: int, count: int, now: float) -> None:
        if place in self._dead and self._counts[place] == count:
            self._down.add(place)
            self._tell(WorkerDown(self._specs[place].name, "cannot be reached"), now)

    def _returns(self, place: int, now: float) -> None:
        self._dead.discard(place)
        self._at(now + self._plan.up_after_s, partial(self._found_up, place))

    def _found_up(self, place: int, now: float) -> None:
        """A new process under the old name: its cache is empty."""
        if place in self._dead:
            return  # it died again
        spec = self._specs[place]
        self._tell(CacheCleared(spec.name, 0), now)
        if place in self._down:
            self._down.discard(place)
            self._tell(WorkerUp(spec), now)
