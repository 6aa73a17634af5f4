"""The live loop around the core: events in, effects out, timers.

Effects may bring new events at once (a request handed to an idle connection is sent already); they queue up behind
the event that is being handled, so that the core is never entered twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from omni_proxy.core import Core
from omni_proxy.messages import Cancelled, Close, Effect, Event, RequestRecord, Tick

logger = logging.getLogger(__name__)
_monotonic: Final = time.monotonic

Observer = Callable[[float, Event, Sequence[Effect]], None]
"""Sees every step: the instant, the event, the effects."""


class Watcher(Protocol):
    """Counts or keeps what has ended, and a few kinds of events; an event that nobody watches for costs nothing."""

    @property
    def watches(self) -> Iterable[type]:
        """The kinds of events that `heard` is for."""
        ...

    def heard(self, event: Event, effects: Sequence[Effect]) -> None: ...

    def closed(self, record: RequestRecord, now: float) -> None:
        """A request has ended."""
        ...


class Driver:
    """Runs one core on the event loop."""

    def __init__(self, core: Core, watchers: Sequence[Watcher], observers: Sequence[Observer] = ()) -> None:
        self.core = core
        self._tell_ends = [watcher.closed for watcher in watchers]
        self._observers = list(observers)
        self._watched: dict[type, list[Watcher]] = {}
        for watcher in watchers:
            for kind in watcher.watches:
                self._watched.setdefault(kind, []).append(watcher)
        self._perform: Callable[[Effect], None] = _nobody
        self._inbox: deque[Event] = deque()
        self._busy = False
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._at_once: asyncio.Handle | None = None
        """A tick is due as soon as all that is ready now has been heard."""

    def connect(self, perform: Callable[[Effect], None]) -> None:
        """Say who carries effects out."""
        self._perform = perform

    def now(self) -> float:
        """The core's clock, in seconds."""
        return _monotonic()

    def post(self, event: Event) -> None:
        """Bring an event in; its effects have been started when this returns, unless another event is at work."""
        if self._busy:
            self._inbox.append(event)
            return
        self._busy = True
        try:
            self._step(event)
            while self._inbox:
                self._step(self._inbox.popleft())
        finally:
            self._busy = False
        self._arm()

    def close(self) -> None:
        """No more ticks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._at_once is not None:
            self._at_once.cancel()
            self._at_once = None

    def _step(self, event: Event) -> None:
        now = _monotonic()  # the loop's own clock stands still within one turn
        try:
            effects = self.core.handle(event, now)
        except Exception:  # a fault of ours ends its request, loudly, and no other
            logger.exception("the core failed on %s", type(event).__name__)
            self._abandon(event)
            return
        watchers = self._watched.get(type(event))
        if watchers is not None:
            for watcher in watchers:
                watcher.heard(event, effects)
        for observe in self._observers:
            observe(now, event, effects)
        for effect in effects:
            if type(effect) is Close:
                for tell in self._tell_ends:
                    tell(effect.record, now)
            try:
                self._perform(effect)
            except Exception:
                logger.exception("the edge failed on %s", type(effect).__name__)
                self._abandon(effect)

    def _abandon(self, message: Event | Effect) -> None:
        lease = getattr(message, "lease", None)
        rid = getattr(message, "rid", None) or getattr(lease, "rid", None)
        if rid is not None and not isinstance(message, Cancelled):
            self._inbox.append(Cancelled(rid))

    def _arm(self) -> None:
        if self._at_once is not None:
            return
        at = self.core.next_wakeup()
        if at is None or (self._timer is not None and self._timer_at <= at):
            return
        delay = at - _monotonic()
        if delay <= 0.0:
            self._at_once = self._loop.call_soon(self._tick_at_once)
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = at
        self._timer = self._loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.post(Tick())

    def _tick_at_once(self) -> None:
        self._at_once = None
        self.post(Tick())


def _nobody(effect: Effect) -> None:
    raise RuntimeError(f"nobody carries out {type(effect).__name__}")
