"""What the page needs to know of each request that ends, while somebody looks. Compiled: every request passes here."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

from omni_proxy.messages import Effect, Event, RequestRecord

KEPT: Final = 50_000
"""Requests of the last window, at the most."""


class Watched:
    """Ended requests, kept only while somebody looks; a watcher of the driver."""

    def __init__(self) -> None:
        self.on = False
        self.records: deque[RequestRecord] = deque(maxlen=KEPT)

    @property
    def watches(self) -> Iterable[type]:
        return ()

    def heard(self, event: Event, effects: Sequence[Effect]) -> None:
        return

    def closed(self, record: RequestRecord, now: float) -> None:
        if self.on:
            self.records.append(record)

    def forget(self, before: float) -> None:
        """Those that ended earlier are not needed any more."""
        records = self.records
        while records and (records[0].ended_at or 0.0) < before:
            records.popleft()
