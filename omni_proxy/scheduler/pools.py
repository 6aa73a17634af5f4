"""Which workers can serve a model together, and in which mode. Pure.

The answer changes with membership only, so it is worked out once for each model and kept until a member changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from omni_proxy.messages import Mode, Role, WorkerSpec
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.load import WorkerLoad

Domain = tuple[str, str]
"""Group and connector: KV moves only within one."""

_ALL_MODES: Final[tuple[Mode, ...]] = (Mode.SEQUENTIAL, Mode.PARALLEL, Mode.AGGREGATED)
Receivers = Mapping[Domain, tuple[WorkerLoad, ...]]


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers that may be used for one model right now. Empty lists: its requests have to wait."""

    mode: Mode
    prefill: tuple[WorkerLoad, ...]
    """P workers with a partner."""
    decode: tuple[WorkerLoad, ...]
    """Where answers are made: D workers with a partner, or those that do both in aggregated mode."""
    partners: Receivers
    """The D workers of `decode` by domain."""
    receivers: Receivers
    """The D workers that can pull KV which a P has ready, whatever the mode is by now and whether or not a P of the
    domain can still be used. A domain without any member is absent; one whose members cannot be used now is empty."""

    alone: tuple[WorkerLoad, ...]
    """Those that do both legs by themselves: mixed workers, or D workers where there are none."""
    can_alone: bool
    """Is there a member, usable or not, for `alone`?"""

    @property
    def ready(self) -> bool:
        """Can a request be served from end to end?"""
        return bool(self.decode)


def domain_of(spec: WorkerSpec) -> Domain:
    """Where a worker can hand KV to, or take it from."""
    return spec.group, spec.connector


def serves(worker: WorkerLoad, model: str) -> bool:
    """Does this worker serve the model, when it can be used?"""
    return not worker.spec.models or model in worker.spec.models


class Pools:
    """Pools by model, over the members of a ledger. `schedule_mode` None picks what the members can do."""

    def __init__(
        self, ledger: Ledger, schedule_mode: Mode | None, model_modes: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._ledger = ledger
        self._usual = _ALL_MODES if schedule_mode is None else (schedule_mode,)
        self._modes_of = {m: _ALL_MODES if mode == "auto" else (Mode(mode),) for m, mode in model_modes.items()}
        self._modes = self._usual
        """Those of the model whose pool is being built."""
        self._pools: dict[str, Pool | None] = {}

    def changed(self) -> None:
        """A member came, went or changed: forget what was worked out."""
        self._pools.clear()

    def of(self, model: str) -> Pool | None:
        """The pool of a model; None when no member serves it, up or not."""
        try:
            return self._pools[model]
        except KeyError:
            pass
        # Unknown models come from clients: a bound keeps them from filling memory.
        if len(self._pools) > 1000:
            self._pools.clear()
        pool = self._pools[model] = self._build(model)
        return pool

    def any_ready(self) -> bool:
        """Is there a model that can be served from end to end?"""
        models = {m for w in self._ledger for m in w.spec.models} or {""}
        return any(pool is not None and pool.ready for pool in map(self.of, models))

    def _build(self, model: str) -> Pool | None:
        """The first mode that can serve now; when none can, the first that could if its members came back."""
        members = [w for w in self._ledger if serves(w, model) and w.spec.role is not Role.ENCODE]
        if not members:
            return None
        self._modes = self._modes_of.get(model, self._usual)
        receivers = _by_domain(_able(members, Mode.SEQUENTIAL, Role.DECODE), empty=True)
        # A mode that needs backups is chosen only where no other can serve; within a mode, who is picked decides.
        mode = self._choose(_primary(_usable(members))) or self._choose(_usable(members))
        if mode is None:
            mode = self._choose(members)
            return Pool(mode or self._modes[0], (), (), {}, receivers, _alone(_usable(members)), bool(_alone(members)))
        prefill, decode = self._sides(_usable(members), mode)
        alone = decode if mode is Mode.AGGREGATED else _alone(_usable(members))
        return Pool(mode, prefill, decode, _by_domain(decode), receivers, alone, bool(_alone(members)))

    def _choose(self, workers: Iterable[WorkerLoad]) -> Mode | None:
        workers = tuple(workers)
        return next((mode for mode in self._modes if self._sides(workers, mode)[1]), None)

    def _sides(
        self, workers: Iterable[WorkerLoad], mode: Mode
    ) -> tuple[tuple[WorkerLoad, ...], tuple[WorkerLoad, ...]]:
        """Those who can work together in a mode; both sides empty when nobody can."""
        workers = tuple(workers)
        if mode is Mode.AGGREGATED:
            mixed = _able(workers, mode, Role.MIXED)
            # Where the operator asks for aggregated mode by name, every worker that can do it will do.
            anybody = self._modes == (mode,) and not _primary(mixed)
            return (), _able(workers, mode, None) if anybody else mixed
        prefill, decode = _able(workers, mode, Role.PREFILL), _able(workers, mode, Role.DECODE)
        sending, receiving = {domain_of(w.spec) for w in prefill}, {domain_of(w.spec) for w in decode}
        return _within(prefill, receiving), _within(decode, sending)


def _able(workers: Iterable[WorkerLoad], mode: Mode, role: Role | None) -> tuple[WorkerLoad, ...]:
    return tuple(w for w in workers if mode in w.spec.modes and role in (None, w.role))


def _alone(workers: Iterable[WorkerLoad]) -> tuple[WorkerLoad, ...]:
    """Who can do both legs; a P worker's place is in front of a handoff. Backups last."""
    workers = tuple(workers)
    mixed, decode = (_able(workers, Mode.AGGREGATED, role) for role in (Role.MIXED, Role.DECODE))
    if _primary(mixed) or not decode:
        return mixed
    return (*decode, *mixed) if _primary(decode) else mixed or decode


def _usable(workers: Iterable[WorkerLoad]) -> tuple[WorkerLoad, ...]:
    return tuple(w for w in workers if w.takes_work)


def _primary(workers: Iterable[WorkerLoad]) -> tuple[WorkerLoad, ...]:
    return tuple(w for w in workers if not w.spec.backup)


def _within(workers: Iterable[WorkerLoad], domains: set[Domain]) -> tuple[WorkerLoad, ...]:
    return tuple(w for w in workers if domain_of(w.spec) in domains)


def _by_domain(workers: Iterable[WorkerLoad], empty: bool = False) -> Receivers:
    """Workers by domain; with `empty`, only the usable ones, under the domains of all."""
    found: dict[Domain, tuple[WorkerLoad, ...]] = {}
    for worker in workers:
        domain = domain_of(worker.spec)
        found[domain] = found.get(domain, ()) + (_usable([worker]) if empty else (worker,))
    return found
