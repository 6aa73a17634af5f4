"""A simulated engine on the real clock: its steps end by timers, and late timers delay nothing after them.

The loop's own clock counts milliseconds and stands still while callbacks run, so time is read elsewhere, and timers are
set to the next whole millisecond: one that fires early would be set again and again until the instant has come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from math import ceil

from omni_proxy.sim.engine import Engine
from omni_proxy.sim.job import Job
from omni_proxy.sim.notices import Notices


class EngineClock:
    """Runs one engine on the event loop. `speed`: simulated seconds in a real one."""

    def __init__(self, engine: Engine, speed: float, hear: Callable[[Notices], None]) -> None:
        self.engine = engine
        self._speed = speed
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._zero = time.perf_counter()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_for: float | None = None

    def now(self) -> float:
        """Simulated seconds since the start."""
        return (time.perf_counter() - self._zero) * self._speed

    def after(self, seconds: float, action: Callable[[], None]) -> asyncio.TimerHandle:
        """Do something in so many simulated seconds."""
        return self._loop.call_later(seconds / self._speed, action)

    def submit(self, job: Job) -> None:
        """Bring a job in."""
        now = self._catch_up()
        self._take(self.engine.submit(job, now))

    def pulled(self, job: Job) -> None:
        """A job's KV has arrived."""
        now = self._catch_up()
        self._take(self.engine.pulled(job, now))

    def release(self, job: Job) -> None:
        """A held job's KV is not needed any more."""
        now = self._catch_up()
        self._take(self.engine.release(job, now))

    def abort(self, job: Job) -> None:
        """Forget a job."""
        now = self._catch_up()
        self._take(self.engine.abort(job, now))

    def close(self) -> None:
        """No more steps."""
        if self._timer is not None:
            self._timer.cancel()

    def _catch_up(self) -> float:
        """End every step whose time has come, each at its own instant; so lateness does not add up."""
        now = self.now()
        while (wake := self.engine.wake_at) is not None and wake <= now:
            self._hear(self.engine.advance(wake))
        return now

    def _take(self, notices: Notices) -> None:
        self._hear(notices)
        self._arm()

    def _arm(self) -> None:
        wake = self.engine.wake_at
        if wake == self._timer_for and self._timer is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_for = None, wake
        if wake is not None:
            left_s = self._zero + wake / self._speed - time.perf_counter()
            self._timer = self._loop.call_later(max(0, ceil(left_s * 1000)) / 1000, self._due)

    def _due(self) -> None:
        self._timer = self._timer_for = None
        self._catch_up()
        self._arm()
