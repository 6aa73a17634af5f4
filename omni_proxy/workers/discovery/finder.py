"""Runs sources and hands what they find to the roster; keeps what was refused, for whoever asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from msgspec import Struct

from omni_proxy.config import Worker
from omni_proxy.workers.discovery.targets import Network
from omni_proxy.workers.discovery.vetting import Candidate, Refused, Unusable, vet

logger = logging.getLogger(__name__)


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
    ) -> None:
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
        await source.run(lambda found: self.take(source.name, found), lambda reason: self.failed(source.name, reason))

    def take(self, name: str, found: Sequence[Candidate]) -> None:
        """A source has said who is there."""
        try:
            workers, refused = vet(name, found, self._own, self._networks)
        except Unusable as exc:
            self.failed(name, str(exc))
            return
        state = self.states[name]
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
        state = self.states[name]
        state.failures += 1
        if state.fault != reason:
            logger.warning("discovery %s: %s; its last good state stays", name, reason)
        state.fault = reason
