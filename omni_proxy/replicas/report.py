"""What one gateway tells the others of itself, and what it knows of them. No IO, no clock: `now` comes in.

Nothing here compares clocks of two machines: a report counts from the instant at which it was heard.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct, structs

from omni_proxy.messages import OthersHeard, WorkerShare
from omni_proxy.scheduler.others import added, differ

VERSION: Final = 1


class Report(Struct, frozen=True, array_like=True):
    """What one gateway holds now, and what it has done since its last report."""

    version: int
    gateway: str
    shares: tuple[WorkerShare, ...] = ()
    waiting: int = 0
    ejected: tuple[tuple[str, float], ...] = ()
    """Workers that it has ejected, and for how many seconds more."""
    served: tuple[tuple[str, int], ...] = ()
    """Prompt tokens computed for tenants since its last report."""
    homes: tuple[tuple[str, str], ...] = ()
    """Sessions placed since its last report."""
    gone: bool = False
    """It ends, and holds nothing any more."""

    def says_more(self, before: Report | None) -> bool:
        """Does it tell anything that does not follow from the one before as time passes?"""
        if before is None or self.served or self.homes or self.gone:
            return True
        if self.waiting != before.waiting or [n for n, _ in self.ejected] != [n for n, _ in before.ejected]:
            return True
        return differ(self.shares, before.shares)


class _Known:
    __slots__ = ("heard_at", "report")

    def __init__(self, report: Report, heard_at: float) -> None:
        self.report = report
        self.heard_at = heard_at


class OtherGateways:
    """The last report of each other gateway; one that was not heard for `lease_s` is forgotten, with all it held."""

    def __init__(self, name: str, lease_s: float) -> None:
        self._name = name
        self._lease_s = lease_s
        self._known: dict[str, _Known] = {}
        self._served: dict[str, int] = {}
        self._homes: dict[str, str] = {}
        self.lost = 0
        """Gateways that fell silent without saying goodbye."""

    def heard(self, report: Report, now: float) -> bool:
        """Take over a report; False where it tells nothing new."""
        if report.version != VERSION or report.gateway == self._name:
            return False
        before = self._known.pop(report.gateway, None)
        if report.gone:
            return before is not None
        self._known[report.gateway] = _Known(report, now)
        for tenant, tokens in report.served:
            self._served[tenant] = self._served.get(tenant, 0) + tokens
        self._homes.update(report.homes)
        return report.says_more(None if before is None else before.report)

    def expire(self, now: float) -> bool:
        """Forget those that have been silent for too long; True where there were any."""
        silent = [name for name, known in self._known.items() if now - known.heard_at >= self._lease_s]
        for name in silent:
            del self._known[name]
        self.lost += len(silent)
        return bool(silent)

    def names(self) -> list[str]:
        """Who lives, besides this one."""
        return sorted(self._known)

    def event(self, now: float, turn_s: float) -> OthersHeard:
        """What the core should know; what happened since the last event is told once."""
        served, self._served = tuple(sorted(self._served.items())), {}
        homes, self._homes = tuple(self._homes.items()), {}
        known = [self._known[name] for name in self.names()]
        return OthersHeard(
            gateways=len(known),
            place=sorted([self._name, *self._known]).index(self._name),
            turn_s=turn_s,
            loads=added(_aged(k, now) for k in known),
            waiting=sum(k.report.waiting for k in known),
            served=served,
            homes=homes,
            distrusted=_by_most(known, now),
        )


def _aged(known: _Known, now: float) -> Iterable[WorkerShare]:
    age = now - known.heard_at
    return [structs.replace(share, busy_s=max(0.0, share.busy_s - age)) for share in known.report.shares]


def _by_most(known: list[_Known], now: float) -> tuple[tuple[str, float], ...]:
    """Workers that more than half of the others have ejected, for as long as the first of these does."""
    until: dict[str, list[float]] = {}
    for one in known:
        for worker, for_s in one.report.ejected:
            left = for_s - (now - one.heard_at)
            if left > 0:
                until.setdefault(worker, []).append(left)
    return tuple((worker, min(left)) for worker, left in sorted(until.items()) if 2 * len(left) > len(known))
