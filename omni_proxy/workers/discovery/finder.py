"""Runs sources and hands what they find to the roster; keeps what was refused, for whoever asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from msgspec import Struct

from omni_proxy.config import Worker
from omni_proxy.workers.discovery.targets import Network
from omni_proxy.workers.discovery.vetting import Candidate, Refused, Unusable, vet

logger = logging.getLogger(__name__)

PAUSES_S: Final = (1.0, 2.0, 5.0, 15.0, 60.0)
"""Before a source that broke off is started again; one that ran for longer than the last begins anew with the first."""


class Source(Protocol):
    """One place where workers are found."""

    @property
    def name(self) -> str: ...

    async def run(self, found: Callable[[Sequence[Candidate]], None], failed: Callable[[str], None]) -> None:
        """Until cancelled: report all candidates whenever they change, or why nothing can be said now."""
        ...


class SourceState(Struct):
    """How a source stands."""

    name: str
    workers: int = 0
    changes: int = 0
    failures: int = 0
    fault: str | None = None
    """Why its last good state is still used; None: all is well."""


class Finder:
    """The sources of one gateway."""

    def __init__(
        self,
        sources: Sequence[Source],
        use: Callable[[str, list[Worker]], None],
        own: Iterable[tuple[str, int]] = (),
        networks: Sequence[Network] | None = None,
        pauses_s: Sequence[float] = PAUSES_S,
    ) -> None:
        self._pauses_s = pauses_s
        self._sources = list(sources)
        self._use = use
        self._own = tuple(own)
        self._replaced = asyncio.Event()
        self._networks = networks
        self.states = {source.name: SourceState(source.name) for source in sources}
        self._refused: dict[str, list[Refused]] = {}
        self._last: dict[str, list[Worker]] = {}

    def refused(self) -> list[Refused]:
        """Who is not used, and why."""
        return [one for refused in self._refused.values() for one in refused]

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._replaced.clear()
            async with asyncio.TaskGroup() as tasks:
                following = [
                    tasks.create_task(self._follow(source), name=f"discovery {source.name}") for source in self._sources
                ]
                await self._replaced.wait()
                for task in following:
                    task.cancel()

    def follow(self, sources: Sequence[Source], networks: Sequence[Network] | None = None) -> None:
        """Use other sources from now on; what one of the same name has found stays until it says something else."""
        self._sources, self._networks = list(sources), networks
        names = {source.name for source in sources}
        for name in [name for name in self.states if name not in names]:
            del self.states[name]
            self._refused.pop(name, None)
            if self._last.pop(name, None):
                self._use(name, [])
        for name in names - self.states.keys():
            self.states[name] = SourceState(name)
        self._replaced.set()

    async def _follow(self, source: Source) -> None:
        """Again and again: one that breaks off leaves the others, and what it said last, as they are."""
        name, breaks = source.name, 0
        clock = asyncio.get_running_loop().time
        while True:
            begun = clock()
            try:
                await source.run(lambda found: self.take(name, found), lambda reason: self.failed(name, reason))
                self.failed(name, "it ended")
            except Exception as exc:
                logger.exception("discovery %s broke off", name)
                self.failed(name, f"it broke off ({type(exc).__name__}: {exc})")
            breaks = 0 if clock() - begun > self._pauses_s[-1] else breaks
            await asyncio.sleep(self._pauses_s[min(breaks, len(self._pauses_s) - 1)])
            breaks += 1

    def take(self, name: str, found: Sequence[Candidate]) -> None:
        """A source has said who is there; one that has just been replaced says nothing."""
        state = self.states.get(name)
        if state is None:
            return
        try:
            workers, refused = vet(name, found, self._own, self._networks)
        except Unusable as exc:
            self.failed(name, str(exc))
            return
        for one in refused:
            if one not in self._refused.get(name, ()):
                logger.warning("discovery %s: %s is refused: %s", name, one.name, one.reason)
        self._refused[name] = refused
        state.fault = None
        if workers != self._last.get(name):
            self._last[name] = workers
            state.workers = len(workers)
            state.changes += 1
            self._use(name, workers)

    def failed(self, name: str, reason: str) -> None:
        """A source cannot be used now: what it said last stays."""
        state = self.states.get(name)
        if state is None:
            return
        state.failures += 1
        if state.fault != reason:
            logger.warning("discovery %s: %s; its last good state stays", name, reason)
        state.fault = reason
