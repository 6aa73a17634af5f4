"""What operators may do with workers while the gateway serves: add, drain, take back, remove, weigh, give a role.

An order stays until it is taken back, whatever the config and discovery say meanwhile. Each may be given again without
harm. Knows no routes and no clients.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct
from pydantic import ValidationError

from omni_proxy.config import Worker
from omni_proxy.messages import Role
from omni_proxy.scheduler.load import WorkerLoad
from omni_proxy.workers.discovery.targets import Network
from omni_proxy.workers.discovery.vetting import vet
from omni_proxy.workers.orders import ADMIN, Order, Orders
from omni_proxy.workers.roster import Roster

Share = Callable[[str, bytes | None], Awaitable[bool]]
"""Leave an order for all gateways; False: they cannot be reached now, and hear of it later."""

MOST_ADDED: Final = 2000


class Outcome(Struct, frozen=True):
    """What came of an order."""

    worker: str
    action: str
    changed: bool
    """False: it was so before."""
    shared: bool | None = None
    """Have the other gateways been told? None: there are none."""


class NoSuchWorker(Exception):
    """Nobody is called so."""


class NotPossible(Exception):
    """The order contradicts what is known."""


class Operations:
    """The orders of one gateway, and what they change."""

    def __init__(
        self,
        roster: Roster,
        orders: Orders,
        loads: Callable[[], Iterable[WorkerLoad]],
        own: Sequence[tuple[str, int]],
        share: Share | None,
        now: Callable[[], float] = time.time,
        networks: Sequence[Network] | None = None,
    ) -> None:
        self._roster = roster
        self._orders = orders
        self._loads = loads
        self._own = own
        self._networks = networks
        self._share = share
        self._now = now

    def known(self) -> list[dict[str, object]]:
        """Every worker that is known, with its source and what is ordered about it."""
        loads: dict[str, list[WorkerLoad]] = {}
        for load in self._loads():
            loads.setdefault(load.spec.endpoint or load.spec.name, []).append(load)
        return [self._shown(source, w, loads.get(w.name, [])) for source, w in self._roster.entries()]

    async def add(self, fields: Mapping[str, object]) -> Outcome:
        """Take in a worker, with fields as in the config. Raises NotPossible, ValidationError."""
        worker = Worker.model_validate(fields)
        _, refused = vet(ADMIN, [dict(fields)], self._own, self._networks)
        if refused:
            raise NotPossible(refused[0].reason)
        for source, other in self._roster.entries():
            same_url, same_name = other.url == worker.url, other.name == worker.name
            if same_url != same_name or (same_name and source != ADMIN and other != worker):
                raise NotPossible(f"{other.name} at {other.url} is there already, from {source}")
            if same_name and source != ADMIN:
                return await self._order(worker.name, "add", removed=False)
        if len(self._orders.added()) >= MOST_ADDED:
            raise NotPossible(f"{MOST_ADDED} workers have been added already")
        kept = worker.model_dump(mode="json", exclude_unset=True)
        return await self._order(worker.name, "add", removed=False, added=kept)

    async def drain(self, name: str) -> Outcome:
        """No new work for a worker; what it has ends. Raises NoSuchWorker."""
        self._base(name)
        return await self._order(name, "drain", drained=True)

    async def undrain(self, name: str) -> Outcome:
        """Use it again as soon as it answers, also one that its source calls down. Raises NoSuchWorker."""
        return await self._order(name, "undrain", drained=False if self._base(name).down else None)

    async def remove(self, name: str) -> Outcome:
        """Drain a worker, then forget it; one of the config or of discovery stays away until it is added again."""
        source = self._source(name)
        if source is None and not self._orders.get(name).is_empty():
            return Outcome(name, "remove", False)
        if source is None:
            raise NoSuchWorker(name)
        if source == ADMIN:
            return await self._order(name, "remove", drained=None, removed=False, weight=None, role=None, added=None)
        return await self._order(name, "remove", removed=True)

    async def weigh(self, name: str, weight: float | None) -> Outcome:
        """Give a worker another share; None: that of its source. Raises NoSuchWorker."""
        self._base(name)
        return await self._order(name, "weight", weight=weight)

    async def give_role(self, name: str, role: Role | None) -> Outcome:
        """Give it another role, as soon as it is idle; None: that of its source. Raises NoSuchWorker."""
        self._base(name)
        return await self._order(name, "role", role=role)

    async def heard(self, shared: Mapping[str, bytes]) -> list[str]:
        """What all gateways know, whenever that changes. Returns the workers whose order makes no sense."""
        changed, tell, faulty = self._orders.merge(shared, self._now())
        if changed:
            self._apply()
        if self._share is not None:
            for name, data in tell.items():
                await self._share(name, data)
        return faulty

    def _source(self, name: str) -> str | None:
        return next((source for source, w in self._roster.entries() if w.name == name), None)

    def _base(self, name: str) -> Worker:
        found = next((w for w in self._roster.workers() if w.name == name), None)
        if found is None:
            raise NoSuchWorker(name)
        return found

    async def _order(self, name: str, action: str, **changes: object) -> Outcome:
        before = self._orders.get(name)
        order: Order = msgspec.structs.replace(before, at=self._now(), **changes)
        if msgspec.structs.replace(order, at=before.at) == before:
            return Outcome(name, action, False)
        data = self._orders.put(name, order)
        self._apply()
        shared = None if self._share is None else await self._share(name, data)
        return Outcome(name, action, True, shared)

    def _apply(self) -> None:
        self._roster.set(ADMIN, self._orders.added())

    def _shown(self, source: str, worker: Worker, loads: Sequence[WorkerLoad]) -> dict[str, object]:
        order = self._orders.get(worker.name)
        return {
            "name": worker.name,
            "url": worker.url,
            "source": source,
            "role": order.role or worker.role,
            "weight": order.weight or worker.weight,
            "connector": next((load.spec.connector for load in loads if load.spec.connector), worker.connector),
            "group": worker.group or None,
            "state": _state(loads, order.removed),
            "reason": next((load.reason for load in loads if load.reason), None),
            "sequences": sum(load.seqs for load in loads),
            "kv_tokens": sum(load.kv_tokens for load in loads),
            "ordered": {k: v for k, v in msgspec.to_builtins(order).items() if k not in ("at", "added")},
        }


def _state(loads: Sequence[WorkerLoad], removed: bool) -> str:
    if not loads:
        return "removed" if removed else "unknown"
    if all(load.draining for load in loads):
        return "draining"
    return "up" if any(load.up and not load.draining for load in loads) else "down"


def fault_of(exc: ValidationError) -> tuple[str, str]:
    """The field of a worker that is wrong, and what is wrong with it."""
    first = exc.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return place, f"'{place}': {first['msg'].removeprefix('Value error, ')} (got {first['input']!r})."
