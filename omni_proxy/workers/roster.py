"""The workers of all sources together: those of the config, and those that were found otherwise.

Knows no members: whoever is told of a list makes it the membership.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from omni_proxy.config import Worker

CONFIG: Final = "config"
"""The source that goes before all others."""


class Roster:
    """Lists by source. `apply` hears of the whole whenever one of them changes."""

    def __init__(self, configured: Sequence[Worker], apply: Callable[[list[Worker]], None]) -> None:
        self._lists: dict[str, Sequence[Worker]] = {CONFIG: configured}
        self._apply = apply

    def set(self, source: str, workers: Sequence[Worker]) -> None:
        """These are the workers of a source from now on."""
        self._lists[source] = workers
        self._apply(self.workers())

    def again(self) -> None:
        """Hand the whole on once more: what is made of it has changed."""
        self._apply(self.workers())

    def workers(self) -> list[Worker]:
        """All of them. Of two with one URL the first counts, with the KV address of the other where it has none."""
        return [worker for _, worker in self.entries()]

    def entries(self) -> list[tuple[str, Worker]]:
        """All of them, behind the source that named each first."""
        found: dict[str, tuple[str, Worker]] = {}
        names: set[str] = set()
        for source, worker in ((source, worker) for source, workers in self._lists.items() for worker in workers):
            first = found.get(worker.url)
            if first is not None:
                if not first[1].kv_address and worker.kv_address:
                    found[worker.url] = first[0], first[1].model_copy(update={"kv_address": worker.kv_address})
            elif worker.name not in names:
                found[worker.url] = source, worker
                names.add(worker.name)
        return list(found.values())
