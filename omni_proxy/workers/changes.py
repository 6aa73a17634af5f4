"""Makes a list of workers the membership without hurting what runs: who leaves or changes its role drains first.

One look at all who drain, not one for each: hundreds may drain at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from omni_proxy.config import Worker
from omni_proxy.workers.membership import Membership

LOOK_S: Final = 0.1
"""How often it is asked who is idle by now."""


class Changes:
    """`busy` tells the names of workers that hold something. Made inside the event loop."""

    def __init__(self, membership: Membership, busy: Callable[[], AbstractSet[str]]) -> None:
        self._membership = membership
        self._busy = busy
        self._wanted: Sequence[Worker] = ()
        self._leaving: set[str] = set()
        self._turning: set[str] = set()
        self._task: asyncio.Task[None] | None = None

    def use(self, workers: Sequence[Worker]) -> None:
        """Make these the members."""
        self._wanted = workers
        self._turning = {w.name for w in workers if self._turns(w)}
        busy = self._busy() if self._turning else frozenset()
        self._turning &= busy
        self._leaving.update(self._membership.set([self._for_now(worker) for worker in workers]))
        if (self._leaving or self._turning) and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._look_again_and_again(), name="workers that drain")

    def close(self) -> None:
        """Whoever drains goes on draining."""
        if self._task is not None:
            self._task.cancel()

    def _turns(self, worker: Worker) -> bool:
        """Is it the same worker with another role?"""
        now = self._membership.config_of(worker.name)
        return now is not None and now.role is not worker.role and now.url == worker.url

    def _for_now(self, worker: Worker) -> Worker:
        now = self._membership.config_of(worker.name) if worker.name in self._turning else None
        return worker if now is None else worker.model_copy(update={"role": now.role, "down": True})

    async def _look_again_and_again(self) -> None:
        while self._leaving or self._turning:
            await asyncio.sleep(LOOK_S)
            busy = self._busy()
            for name in sorted(self._leaving - busy):
                self._leaving.discard(name)
                if self._membership.is_leaving(name):
                    self._membership.remove(name)
            self._leaving = {name for name in self._leaving if self._membership.is_leaving(name)}
            if self._turning - busy:
                self.use(self._wanted)
