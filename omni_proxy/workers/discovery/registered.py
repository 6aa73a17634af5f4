"""Workers that register themselves and say again and again that they live; who falls silent drains.

Knows no HTTP: whoever hears a worker hands its words on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from omni_proxy.config import Worker
from omni_proxy.workers.discovery.vetting import MOST_WORKERS, Candidate, vet

LOOK_S: Final = 0.5


class NotRegistered(Exception):
    """The worker is not taken in, and why."""


@dataclass(slots=True)
class _Present:
    worker: Worker
    said: Candidate
    at: float


class RegisteredSource:
    """Those who have registered, by name."""

    def __init__(
        self, expire_s: float, own: Sequence[tuple[str, int]] = (), now: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = "registered"
        self.expire_s = expire_s
        self._own = own
        self._now = now
        self._present: dict[str, _Present] = {}
        self._changed = asyncio.Event()

    async def run(self, found: Callable[[Sequence[Candidate]], None], failed: Callable[[str], None]) -> None:
        """Until cancelled."""
        while True:
            try:
                async with asyncio.timeout(min(LOOK_S, self.expire_s / 4)):
                    await self._changed.wait()
            except TimeoutError:
                pass
            if self._expire() or self._changed.is_set():
                self._changed.clear()
                found([self._present[name].said for name in sorted(self._present)])

    def heard(self, said: Mapping[str, object]) -> bool:
        """A worker says that it is there; is it new, or another than before? Raises NotRegistered."""
        workers, refused = vet(self.name, [said], self._own)
        if refused:
            raise NotRegistered(refused[0].reason)
        worker = workers[0]
        present = self._present.get(worker.name)
        if present is None and len(self._present) >= MOST_WORKERS:
            raise NotRegistered(f"{MOST_WORKERS} workers have registered already")
        for other in self._present.values():
            if (other.worker.url == worker.url) != (other.worker.name == worker.name):
                raise NotRegistered(f"{other.worker.name} at {other.worker.url} has registered already, and lives")
        same = present is not None and present.worker == worker
        self._present[worker.name] = _Present(worker, dict(said), self._now())
        if not same:
            self._changed.set()
        return not same

    def gone(self, name: str) -> bool:
        """A worker says goodbye; False: it was not there."""
        if self._present.pop(name, None) is None:
            return False
        self._changed.set()
        return True

    def _expire(self) -> bool:
        oldest = self._now() - self.expire_s
        silent = [name for name, present in self._present.items() if present.at < oldest]
        for name in silent:
            del self._present[name]
        return bool(silent)
