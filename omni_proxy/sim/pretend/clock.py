"""A simulated engine on the real clock: its steps end by timers, and late timers delay nothing after them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from omni_proxy.sim.engine import Engine, Notices
from omni_proxy.sim.job import Job


class EngineClock:
    """Runs one engine on the event loop. `speed`: simulated seconds in a real one."""

    def __init__(self, engine: Engine, speed: float, hear: Callable[[Notices], None]) -> None:
        self.engine = engine
        self._speed = speed
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._zero = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_for: float | None = None

    def now(self) -> float:
        """Simulated seconds since the start."""
        return (self._loop.time() - self._zero) * self._speed

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
            self._timer = self._loop.call_at(self._zero + wake / self._speed, self._due)

    def _due(self) -> None:
        self._timer = self._timer_for = None
        self._catch_up()
        self._arm()
