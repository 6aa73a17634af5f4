"""Which workers can serve a model together, and in which mode. Pure.

The answer changes with membership only, so it is worked out once for each model and kept until a member changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from omni_proxy.messages import Mode, Role, WorkerSpec
from omni_proxy.scheduler.ledger import Ledger, WorkerLoad


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers that may be used for one model right now. Empty lists: its requests have to wait."""

    mode: Mode
    prefill: tuple[WorkerLoad, ...]
    decode: tuple[WorkerLoad, ...]
    """Where answers are made: D workers, or those that do both in aggregated mode."""

    def decode_for(self, prefill: WorkerSpec) -> list[WorkerLoad]:
        """The D workers that can receive KV from this P."""
        return [w for w in self.decode if _can_hand_over(prefill, w.spec)]

    @property
    def ready(self) -> bool:
        """Can a request be served from end to end?"""
        return bool(self.decode) and (self.mode is Mode.AGGREGATED or bool(self.prefill))


def _can_hand_over(prefill: WorkerSpec, decode: WorkerSpec) -> bool:
    return prefill.group == decode.group and prefill.connector == decode.connector


def _serves(worker: WorkerLoad, model: str) -> bool:
    return not worker.spec.models or model in worker.spec.models


class Pools:
    """Pools by model, over the members of a ledger. `schedule_mode` None picks what the members can do."""

    def __init__(self, ledger: Ledger, schedule_mode: Mode | None) -> None:
        self._ledger = ledger
        self._schedule_mode = schedule_mode
        self._pools: dict[str, Pool | None] = {}

    def changed(self) -> None:
        """A member came, went or changed: forget what was worked out."""
        self._pools.clear()

    def of(self, model: str) -> Pool | None:
        """The pool of a model; None when no member serves it, up or not."""
        if model not in self._pools:
            # Unknown models come from clients: a bound keeps them from filling memory.
            if len(self._pools) > 1000:
                self._pools.clear()
            self._pools[model] = self._build(model)
        return self._pools[model]

    def any_ready(self) -> bool:
        """Is there a model that can be served from end to end?"""
        models = {m for w in self._ledger for m in w.spec.models} or {""}
        return any(pool is not None and pool.ready for pool in map(self.of, models))

    def _build(self, model: str) -> Pool | None:
        members = [w for w in self._ledger if _serves(w, model)]
        if not members:
            return None
        for mode in self._modes():
            prefill, decode = _able(members, mode, Role.PREFILL), _able(members, mode, Role.DECODE)
            if mode is Mode.AGGREGATED:
                decode = _able(members, mode, Role.MIXED)
                if decode or self._schedule_mode is mode:
                    return Pool(mode, (), _usable(decode or _able(members, mode, None)))
            elif pairs := _paired(prefill, decode):
                return Pool(mode, *map(_usable, pairs))
        return Pool(Mode.SEQUENTIAL, (), ())

    def _modes(self) -> tuple[Mode, ...]:
        if self._schedule_mode is not None:
            return (self._schedule_mode,)
        return (Mode.SEQUENTIAL, Mode.PARALLEL, Mode.AGGREGATED)


def _able(members: Iterable[WorkerLoad], mode: Mode, role: Role | None) -> list[WorkerLoad]:
    return [w for w in members if mode in w.spec.modes and role in (None, w.spec.role)]


def _usable(workers: Iterable[WorkerLoad]) -> tuple[WorkerLoad, ...]:
    return tuple(w for w in workers if w.up and not w.draining)


def _paired(prefill: list[WorkerLoad], decode: list[WorkerLoad]) -> tuple[list[WorkerLoad], list[WorkerLoad]] | None:
    """Those P and D that have a partner among the usable, or, when none has, among the members."""
    for ps, ds in ((_usable(prefill), _usable(decode)), (prefill, decode)):
        paired_p = [p for p in ps if any(_can_hand_over(p.spec, d.spec) for d in ds)]
        paired_d = [d for d in ds if any(_can_hand_over(p.spec, d.spec) for p in ps)]
        if paired_p:
            return paired_p, paired_d
    return None
