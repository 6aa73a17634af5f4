"""What the page and the terminal are fed with: the state of one gateway at an instant, whole or as what has changed.

Reads, never decides. Nothing of it is computed unless somebody asks; requests pass it by with one look at a flag.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import Struct, structs

from omni_proxy import __version__
from omni_proxy.messages import RequestRecord
from omni_proxy.observe.expert_loads import ExpertLoad
from omni_proxy.scheduler.load import WorkerLoad
from omni_proxy.ui.heat import Heat, heat_maps
from omni_proxy.ui.points import Limits, Point, history, point
from omni_proxy.ui.rows import Row, row
from omni_proxy.ui.watched import KEPT, Watched

STEP_S: Final = 2.0
"""One point of a chart."""
HISTORY_POINTS: Final = 150
WINDOW_S: Final = 10.0
"""Over which the figures at the top are taken."""
SHOWN_ENDED: Final = 60
SHOWN_LIVE: Final = 24


@dataclass(frozen=True, slots=True)
class Sources:
    """Where everything is read from."""

    now: Callable[[], float]
    wall_offset: Callable[[], float]
    ready: Callable[[], bool]
    workers: Callable[[], Iterable[WorkerLoad]]
    describe: Callable[[WorkerLoad, float], dict[str, object]]
    """One worker as `/omni/workers` shows it."""
    waiting: Callable[[], tuple[int, int]]
    live_count: Callable[[], int]
    live: Callable[[], Iterable[RequestRecord]]
    last: Callable[[int], list[RequestRecord]]
    experts: Callable[[], Sequence[ExpertLoad]]


class Snapshot(Struct, frozen=True):
    """A gateway at one instant. Seconds; `now` is wall clock."""

    whole: bool
    """All that is known; otherwise rows and points are those since the last tick."""
    version: str
    now: float
    ready: bool
    controls: bool
    """Can operators drain workers on this port?"""
    limits: Limits
    waiting: int
    waiting_tokens: int
    live_count: int
    window: Point
    """The last seconds."""
    workers: list[dict[str, object]]
    live: list[Row]
    ended: list[Row]
    """Newest first."""
    points: list[Point]
    """Oldest first."""
    experts: list[Heat] | None
    """None: as before."""


class Sampler:
    """Makes snapshots. `watch(True)` before the first tick, `watch(False)` after the last."""

    def __init__(self, sources: Sources, watched: Watched, limits: Limits, controls: bool) -> None:
        self.limits = limits
        self._controls = controls
        self.watched = watched
        self._from = sources
        self._points: deque[Point] = deque(maxlen=HISTORY_POINTS)
        self._steps_done = 0
        self._last_rid: str | None = None
        self._told: list[tuple[str, float]] = []

    def watch(self, on: bool) -> None:
        """Begin or end to keep what ticks need."""
        self.watched.on = on
        self.watched.records.clear()
        self._points.clear()
        if on:
            known = self._from.last(KEPT)
            now = self._from.now()
            self._points.extend(self._history(known, now, HISTORY_POINTS))
            self._steps_done = int(now // STEP_S)
            self.watched.records.extend(reversed(known))
            self._last_rid = known[0].rid if known else None

    def whole(self) -> Snapshot:
        """Everything, also where nobody watches."""
        now = self._from.now()
        if self.watched.on:
            self.watched.forget(now - WINDOW_S)
            records: Iterable[RequestRecord] = self.watched.records
            points = list(self._points)
        else:
            known = self._from.last(KEPT)
            records = [r for r in known if (r.ended_at or 0.0) > now - WINDOW_S]
            points = self._history(known, now, HISTORY_POINTS)
        return self._snapshot(now, True, records, self._from.last(SHOWN_ENDED), points)

    def tick(self) -> Snapshot:
        """What is new since the last tick."""
        now = self._from.now()
        steps = int(now // STEP_S)
        points: list[Point] = []
        if steps > self._steps_done:
            count = min(steps - self._steps_done, HISTORY_POINTS)
            points = self._history(reversed(self.watched.records), now, count)
            points[-1] = structs.replace(points[-1], waiting=self._from.waiting()[0])
            self._steps_done = steps
            self._points.extend(points)
        self.watched.forget(now - WINDOW_S)
        return self._snapshot(now, False, self.watched.records, self._new(), points)

    def _new(self) -> list[RequestRecord]:
        """Those that ended since the last tick, newest first."""
        found = []
        for record in self._from.last(SHOWN_ENDED):
            if record.rid == self._last_rid:
                break
            found.append(record)
        if found:
            self._last_rid = found[0].rid
        return found

    def _history(self, newest_first: Iterable[RequestRecord], now: float, count: int) -> list[Point]:
        return history(newest_first, now, self._from.wall_offset(), STEP_S, count, self.limits)

    def _snapshot(
        self, now: float, whole: bool, records: Iterable[RequestRecord], ended: list[RequestRecord], points: list[Point]
    ) -> Snapshot:
        source, offset = self._from, self._from.wall_offset()
        waiting, waiting_tokens = source.waiting()
        # The newest tell what happens now, the oldest why it does not.
        live = sorted(source.live(), key=lambda r: r.arrived_at)
        if len(live) > SHOWN_LIVE:
            live = live[: SHOWN_LIVE // 2] + live[-SHOWN_LIVE // 2 :]
        return Snapshot(
            whole=whole,
            version=__version__,
            now=round(now + offset, 3),
            ready=source.ready(),
            controls=self._controls,
            limits=self.limits,
            waiting=waiting,
            waiting_tokens=waiting_tokens,
            live_count=source.live_count(),
            window=point(records, now + offset, WINDOW_S, self.limits, waiting),
            workers=[source.describe(w, now) for w in source.workers()],
            live=[row(r, now, offset) for r in live],
            ended=[row(r, now, offset) for r in ended],
            points=points,
            experts=self._experts(whole),
        )

    def _experts(self, whole: bool) -> list[Heat] | None:
        loads = self._from.experts()
        told = [(load.worker, load.at) for load in loads]
        if not whole and told == self._told:
            return None
        self._told = told
        return heat_maps(loads)
