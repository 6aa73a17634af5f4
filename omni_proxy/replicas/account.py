"""What this gateway has to tell the others: gathered from the core's events, read when a report is due."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from omni_proxy.core import Core
from omni_proxy.messages import (
    Arrived,
    DecodeDone,
    Effect,
    Event,
    FirstToken,
    LegFailed,
    PrefillDone,
    RequestRecord,
    StartPrefill,
    Tokenized,
    WorkerShare,
)
from omni_proxy.replicas.report import VERSION, Report
from omni_proxy.scheduler.others import own_shares

_MOST_KEPT: Final = 10_000
"""Sessions and tenants of one report; more are left out."""


class Account:
    """A watcher of the driver. `changed` is called when there may be something new to tell."""

    watches: Iterable[type] = (Arrived, Tokenized, PrefillDone, FirstToken, DecodeDone, LegFailed)

    def __init__(self, name: str, core: Core, changed: Callable[[], None]) -> None:
        self._name = name
        self._core = core
        self._changed = changed
        self._sessions: dict[str, str] = {}
        """Of live requests."""
        self._served: dict[str, int] = {}
        self._homes: dict[str, str] = {}

    def heard(self, event: Event, effects: Sequence[Effect]) -> None:
        """An event that may change what is held."""
        if isinstance(event, Arrived) and event.spec.session:
            self._sessions[event.rid] = event.spec.session
        for effect in effects:
            if isinstance(effect, StartPrefill):
                session = self._sessions.get(effect.lease.rid)
                if session is not None and len(self._homes) < _MOST_KEPT:
                    self._homes[session] = effect.lease.worker
        self._changed()

    def closed(self, record: RequestRecord, now: float) -> None:
        """A request has ended."""
        self._sessions.pop(record.rid, None)
        if record.placements and (record.tenant in self._served or len(self._served) < _MOST_KEPT):
            tokens = max(1, record.prompt_tokens - (record.cached_tokens or 0))
            self._served[record.tenant] = self._served.get(record.tenant, 0) + tokens
        self._changed()

    def report(self, now: float) -> Report:
        """All that there is to tell; what happened since the last report is told once."""
        served, self._served = tuple(sorted(self._served.items())), {}
        homes, self._homes = tuple(self._homes.items()), {}
        ejected = [(w.name, w.ejected_until - now) for w in self._core.workers() if w.fail_times]
        shares: Sequence[WorkerShare] = own_shares(self._core.workers(), now)
        return Report(
            VERSION,
            self._name,
            tuple(shares),
            self._core.waiting()[0],
            tuple((name, left) for name, left in ejected if left > 0),
            served,
            homes,
        )
