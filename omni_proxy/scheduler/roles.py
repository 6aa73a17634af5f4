"""Which mixed workers prefill and which decode by now: they change sides as the load does. Pure.

Each side has a number that says how hard pressed it is, 1 being as much as it should be:

    P   predicted wait for a prompt that came now, in seconds, by `COMFORT_S`
    D   the longest of: step by its limit, sequences by their most, KV by its capacity

A worker changes sides when one side is pressed (1 or more) and the other, with one worker less, would not be, and would
be better off by a quarter. So no load that stays the same moves a worker to and fro. A worker that changes takes
nothing new, ends what it has, keeps KV until it is pulled, and then stands on its new side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from omni_proxy.messages import Mode, Role
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.load import WorkerLoad
from omni_proxy.scheduler.queue import WaitingQueue

COMFORT_S: Final = 1.0
GAP: Final = 0.75
"""What the side that gives a worker may be pressed afterwards, as a share of the one that gets it."""
_BETWEEN_S: Final = 1.0
"""From one change to the next: what the first one does must show."""
_LOOK_S: Final = 0.25
_SMOOTHING_S: Final = 2.0
"""A burst that is over sooner changes nothing."""
_SLOWEST_STEP: Final = 2.0
"""Where nobody sets a TPOT limit: steps may take so many times as long as with one sequence."""

_Side = tuple[str, str, tuple[str, ...]]
"""Group, connector and models: workers that can stand for each other."""


class Pressed:
    """How hard pressed both sides of one group are, smoothed."""

    __slots__ = ("at", "decode", "prefill")

    def __init__(self, now: float) -> None:
        self.prefill = self.decode = 0.0
        self.at = now

    def saw(self, prefill: float, decode: float, now: float) -> None:
        """Take in what is measured now."""
        share = min(1.0, (now - self.at) / _SMOOTHING_S)
        self.prefill += (prefill - self.prefill) * share
        self.decode += (decode - self.decode) * share
        self.at = now


class Roles:
    """Gives mixed workers one of the two sides, where that is asked for."""

    def __init__(self, ledger: Ledger, prefill_queue: WaitingQueue, decode_queue: WaitingQueue) -> None:
        self._ledger = ledger
        self._prefill_queue = prefill_queue
        self._decode_queue = decode_queue
        self.elastic = False
        self._step_limit_s: float | None = None
        self._pressed: dict[_Side, Pressed] = {}
        self._look_at = 0.0
        self._next_change = 0.0

    def configure(self, elastic: bool, step_limit_s: float | None) -> None:
        """Use these settings from now on."""
        self.elastic = elastic
        self._step_limit_s = step_limit_s
        self.members_changed()

    @property
    def look_at(self) -> float | None:
        """When to look again though nothing happens; None: never."""
        return self._look_at if self.elastic else None

    def members_changed(self) -> None:
        """Give a side to each mixed worker that has none, and see to it that each side has a worker."""
        for workers in self._groups().values():
            elastic = [w for w in workers if _can_change(w)]
            if not elastic:
                continue
            usable = [w for w in workers if w.up and not w.draining]
            if not self.elastic or len(usable) < 2:
                for worker in elastic:
                    self._set(worker, Role.MIXED)
                continue
            self._share_out(usable)

    def _share_out(self, usable: Sequence[WorkerLoad]) -> None:
        sides = {role: [w for w in usable if _heads_for(w) is role] for role in (Role.PREFILL, Role.DECODE)}
        for worker in usable:
            if _can_change(worker) and worker.role is Role.MIXED:
                fewer = Role.DECODE if len(sides[Role.DECODE]) < len(sides[Role.PREFILL]) else Role.PREFILL
                self._set(worker, fewer)
                sides[fewer].append(worker)
        for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            givers = [w for w in sides[other] if _can_change(w)]
            if not sides[role] and len(sides[other]) > 1 and givers:
                worker = min(givers, key=_burden)
                self._set(worker, role)  # at once: without it nothing can be served
                sides[other].remove(worker)
                sides[role].append(worker)

    def review(self, now: float) -> bool:
        """End changes that can end, and begin one where it is worth it; True when a side has changed."""
        if not self.elastic or now < self._look_at:
            return False
        self._look_at = now + _LOOK_S
        changed = self._end_changes()
        for side, workers in self._groups().items():
            usable = [w for w in workers if w.up and not w.draining]
            if any(_can_change(w) for w in usable) and self._balance(side, usable, now):
                changed = True
        return changed

    def _end_changes(self) -> bool:
        changed = False
        for worker in self._ledger:
            if worker.turns_to is not None and worker.seqs == 0 and worker.kv_tokens == 0:
                self._set(worker, worker.turns_to)
                changed = True
        return changed

    def _balance(self, side: _Side, usable: Sequence[WorkerLoad], now: float) -> bool:
        prefill = [w for w in usable if _heads_for(w) is Role.PREFILL]
        decode = [w for w in usable if _heads_for(w) is Role.DECODE]
        if not prefill or not decode:
            return False
        pressed = self._pressed.get(side)
        if pressed is None:
            pressed = self._pressed[side] = Pressed(now)
        wait_s, filled = self._wait_s(prefill, now), self._filled(decode)
        pressed.saw(wait_s(len(prefill)) / COMFORT_S, filled(len(decode)), now)
        if now < self._next_change:
            return False
        if pressed.prefill >= 1.0 and _gives(decode, filled, pressed.prefill):
            return self._begin(decode, Role.PREFILL, now)
        fewer_s = wait_s(len(prefill) - 1) / COMFORT_S if len(prefill) > 1 else 0.0
        if pressed.decode >= 1.0 and _gives(prefill, lambda count: fewer_s, pressed.decode):
            return self._begin(prefill, Role.DECODE, now)
        return False

    def _begin(self, givers: Sequence[WorkerLoad], role: Role, now: float) -> bool:
        """Have the least burdened change sides: at once where it holds nothing."""
        worker = min([w for w in givers if _can_change(w) and w.turns_to is None], key=_burden)
        self._next_change = now + _BETWEEN_S
        worker.turns_to = role
        self._end_changes()
        return True

    def _wait_s(self, prefill: Sequence[WorkerLoad], now: float) -> Callable[[int], float]:
        """What a prompt that came now would wait if so many workers had all that is granted and waits."""
        queue = self._prefill_queue
        begun = sum([w.backlog.free_at(now) - now for w in prefill])
        one = sum([w.backlog.cost.seconds(queue.tokens // max(1, len(queue)), 0) for w in prefill]) / len(prefill)
        share = len(prefill) / max(len(prefill), self._ledger.prefill_count)
        total = begun + one * len(queue) * share
        return lambda count: total / count

    def _filled(self, decode: Sequence[WorkerLoad]) -> Callable[[int], float]:
        """How full so many workers would be with all answers, by the scarcest of what they have."""
        seqs = sum([w.seqs for w in decode]) + len(self._decode_queue)
        kv_tokens = sum([w.kv_tokens for w in decode]) + self._decode_queue.tokens
        model = decode[0]
        most_seqs = model.spec.max_seqs
        capacity = model.spec.kv_capacity_tokens
        limit_s = self._step_limit_s
        if limit_s is None:
            limit_s = _SLOWEST_STEP * model.decoding.cost.step_s(1, kv_tokens / max(1, seqs))

        def filled(count: int) -> float:
            step_s = model.decoding.cost.step_s(seqs / count, kv_tokens / count)
            kv = kv_tokens / (count * capacity) if capacity else 0.0
            return max(step_s / limit_s, seqs / (count * most_seqs), kv)

        return filled

    def _set(self, worker: WorkerLoad, role: Role) -> None:
        worker.turns_to = None
        self._ledger.set_role(worker, role)

    def _groups(self) -> dict[_Side, list[WorkerLoad]]:
        found: dict[_Side, list[WorkerLoad]] = {}
        for worker in self._ledger:
            if worker.spec.role is not Role.ENCODE:
                found.setdefault((worker.spec.group, worker.spec.connector, worker.spec.models), []).append(worker)
        return found


def _gives(givers: Sequence[WorkerLoad], pressed: Callable[[int], float], receiver: float) -> bool:
    """Has a side a worker to give, and is it well off without it?"""
    if len(givers) < 2 or not any(_can_change(w) and w.turns_to is None for w in givers):
        return False
    return pressed(len(givers) - 1) <= min(1.0, GAP * receiver)


def _can_change(worker: WorkerLoad) -> bool:
    spec = worker.spec
    return spec.role is Role.MIXED and (Mode.SEQUENTIAL in spec.modes or Mode.PARALLEL in spec.modes)


def _heads_for(worker: WorkerLoad) -> Role:
    """Its side, or the one it is on its way to."""
    return worker.role if worker.turns_to is None else worker.turns_to


def _burden(worker: WorkerLoad) -> tuple[int, int, str]:
    return worker.seqs, worker.kv_tokens, worker.name
