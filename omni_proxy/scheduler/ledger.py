"""Who holds how much of which worker: the only place where load is counted. Pure.

Load is what we have granted and not yet taken back, in true tokens: it is known at once, while a worker's own report
is seconds old. A grant is taken back exactly once, by its lease; taking back twice is a no-op, so that every way out
of a request may try.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from math import inf
from random import Random

from omni_proxy.messages import FailureKind, Lease, Leg, Role, WorkerSpec
from omni_proxy.scheduler.cost import DecodeCost, PrefillCost
from omni_proxy.scheduler.load import WorkerLoad
from omni_proxy.scheduler.slow_start import SlowStarts


class _Grant:
    __slots__ = ("kv_tokens", "prefill_tokens", "step_limit_s", "worker")

    def __init__(self, worker: WorkerLoad, prefill_tokens: int, kv_tokens: int, step_limit_s: float = inf) -> None:
        self.worker = worker
        self.step_limit_s = step_limit_s
        self.prefill_tokens = prefill_tokens
        self.kv_tokens = kv_tokens


class Ledger:
    """Members, grants and passive health. `max_fails` failures within `fail_timeout_s` eject a worker for that long."""

    def __init__(self, max_fails: int = 1, fail_timeout_s: float = 10.0, chance: Random | None = None) -> None:
        self._workers: dict[str, WorkerLoad] = {}
        self._grants: dict[Lease, _Grant] = {}
        self._holds: dict[str, _Grant] = {}
        self._stranded: list[tuple[float, int, _Grant]] = []
        """A heap: KV that nobody will pull, by the instant at which its worker frees it."""
        self._strandings = 0
        self._clock = 0
        self.trusted_from = 0.0
        """From this instant on no worker is ejected."""
        self.shortest_context = inf
        """A prompt below this fits every member."""
        self.has_backups = False
        """Is a member there that gets work only where no other can?"""
        self._prefill_cost = PrefillCost()
        self._decode_cost = DecodeCost()
        """What all members take: the best guess for one that has done nothing yet."""
        self.prefill_count = 0
        """Members that do nothing but prefill."""
        self._slow_starts = SlowStarts()
        self.gateways = 0
        """Other gateways that send work to the same members."""
        self.place = 0
        """Of this gateway among all of them."""
        self.turn_s = 0.0
        """How long it takes until one has heard what another has done."""
        self.others_waiting = 0
        """Prompts that wait in them."""
        self.chance = Random(0) if chance is None else chance
        """Keeps gateways with the same view from doing the same."""
        self.blame(max_fails, fail_timeout_s)

    def blame(self, max_fails: int, fail_timeout_s: float) -> None:
        """Set when workers whose description names no numbers of their own are ejected from now on."""
        self._max_fails = max_fails
        self._fail_timeout_s = fail_timeout_s

    # ------------------------------------------------------------------ members

    def add(self, spec: WorkerSpec) -> WorkerLoad:
        """Add a member that cannot be used yet, or change one's description; what it holds stays counted."""
        load = self._workers.get(spec.name)
        if load is None:
            load = self._workers[spec.name] = WorkerLoad(spec, self._prefill_cost, self._decode_cost)
            self._workers = dict(sorted(self._workers.items()))
        load.describe(spec)
        self._members_changed()
        return load

    def put(self, spec: WorkerSpec, now: float = 0.0) -> WorkerLoad:
        """Add a member, or bring one back: it may be used from now on."""
        load = self.add(spec)
        if not load.up:
            load.ejected_until = 0.0
            load.fail_times.clear()
            if load.seen and self._has_peer(load, now):
                self._slow_starts.begin(load, now)
        load.up, load.draining, load.reason, load.seen = True, False, "", True
        return load

    def down(self, name: str, reason: str) -> None:
        if load := self._workers.get(name):
            load.up, load.reason = False, reason

    def drain(self, name: str) -> None:
        if load := self._workers.get(name):
            load.draining, load.reason = True, "draining"

    def remove(self, name: str) -> None:
        """Forget a member. Its grants keep their counters until they come home, then nobody sees them."""
        load = self._workers.pop(name, None)
        if load is not None:
            self._slow_starts.end(load)
            self._members_changed()

    def set_role(self, load: WorkerLoad, role: Role) -> None:
        """A mixed worker stands on this side from now on."""
        load.role = role
        load.prefills = role is Role.PREFILL
        self._members_changed()

    def _has_peer(self, load: WorkerLoad, now: float) -> bool:
        """Is another of its role at its full share? Where none is, a slow start would slow everybody down."""
        role, others = load.role, (w for w in self._workers.values() if w is not load)
        return any(w.role is role and w.share == 1.0 and w.usable(now) for w in others)

    def _members_changed(self) -> None:
        limits = (w.spec.max_model_len for w in self._workers.values())
        self.shortest_context = min((limit for limit in limits if limit is not None), default=inf)
        self.has_backups = any(w.spec.backup for w in self._workers.values())
        self.prefill_count = sum(w.prefills for w in self._workers.values())

    def get(self, name: str) -> WorkerLoad | None:
        return self._workers.get(name)

    def ranks_beside(self, name: str) -> frozenset[str]:
        """The other data-parallel ranks behind a member's endpoint."""
        load = self._workers.get(name)
        endpoint = "" if load is None else load.spec.endpoint
        if not endpoint:
            return frozenset()
        return frozenset([w.name for w in self._workers.values() if w.spec.endpoint == endpoint and w.name != name])

    def is_member(self, load: WorkerLoad) -> bool:
        """False for one that was removed, even when its name has come back."""
        return self._workers.get(load.name) is load

    def __iter__(self) -> Iterator[WorkerLoad]:
        """All members in the order of their names."""
        return iter(self._workers.values())

    # ------------------------------------------------------------------- grants

    def grant(self, lease: Lease, prefill_tokens: int, kv_tokens: int, step_limit_s: float = inf) -> None:
        """Count a lease against its worker, which must be a member. `step_limit_s`: promised to an answer."""
        assert lease not in self._grants, f"{lease} granted twice"
        load = self._workers[lease.worker]
        self._clock += 1
        load.last_granted = self._clock
        load.seqs += 1
        load.prefill_tokens += prefill_tokens
        load.kv_tokens += kv_tokens
        load.step_limits.add(step_limit_s)
        self._grants[lease] = _Grant(load, prefill_tokens, kv_tokens, step_limit_s)

    def holder(self, lease: Lease) -> WorkerLoad:
        """The worker against which a lease that is out is counted; it may have been removed since."""
        return self._grants[lease].worker

    def prefilled(self, lease: Lease) -> None:
        """The prompt of a lease is computed: what remains is its sequence and its KV."""
        grant = self._grants[lease]
        grant.worker.prefill_tokens -= grant.prefill_tokens
        grant.prefill_tokens = 0

    def release(self, lease: Lease) -> None:
        """Take a lease back; a lease that is not out is ignored."""
        grant = self._grants.pop(lease, None)
        if grant is not None:
            load = grant.worker
            load.seqs -= 1
            load.step_limits.remove(grant.step_limit_s)
            load.prefill_tokens -= grant.prefill_tokens
            load.kv_tokens -= grant.kv_tokens

    def hold(self, rid: str, worker: str, kv_tokens: int) -> None:
        """Count KV that a prefill worker keeps for a pull: no compute, but memory."""
        self.drop_hold(rid)
        if load := self._workers.get(worker):
            load.kv_tokens += kv_tokens
            self._holds[rid] = _Grant(load, 0, kv_tokens)

    def drop_hold(self, rid: str) -> None:
        """The KV was pulled, or will not be; ignored when nothing is held."""
        grant = self._holds.pop(rid, None)
        if grant is not None:
            grant.worker.kv_tokens -= grant.kv_tokens

    def strand(self, rid: str, until: float) -> None:
        """Nobody will pull this KV, and its worker does not know: it is load until the worker's lease on it ends."""
        grant = self._holds.pop(rid, None)
        if grant is not None:
            grant.worker.stranded_tokens += grant.kv_tokens
            self._strandings += 1
            heapq.heappush(self._stranded, (until, self._strandings, grant))

    def expire(self, now: float) -> bool:
        """Take off what workers have freed by now; True when it was anything."""
        some = False
        while self._stranded and self._stranded[0][0] <= now:
            grant = heapq.heappop(self._stranded)[2]
            grant.worker.stranded_tokens -= grant.kv_tokens
            grant.worker.kv_tokens -= grant.kv_tokens
            some = True
        return some

    def next_expiry(self) -> float | None:
        """The next instant at which a worker frees KV that nobody pulls, or None."""
        return self._stranded[0][0] if self._stranded else None

    # ----------------------------------------------------------- passive health

    def failed(self, load: WorkerLoad, kind: FailureKind, now: float) -> bool:
        """Count a failure that is the worker's fault; True when it has just been ejected."""
        spec = load.spec
        max_fails = self._max_fails if spec.max_fails is None else spec.max_fails
        within_s = self._fail_timeout_s if spec.fail_timeout_s is None else spec.fail_timeout_s
        if max_fails == 0:
            return False
        load.fail_times = [t for t in load.fail_times if t > now - within_s]
        load.fail_times.append(now)
        if len(load.fail_times) < max_fails:
            return False
        load.ejections += load.ejected_until <= now
        load.ejected_until = now + within_s
        if kind is FailureKind.CONNECT and spec.endpoint:  # behind one address: none of them can be reached
            for other in self._workers.values():
                if other.spec.endpoint == spec.endpoint:
                    other.ejected_until = max(other.ejected_until, load.ejected_until)
                    other.fail_times = other.fail_times or [now]
                    if other.up and not other.draining:
                        other.reason = f"ejected: {kind.value}"
        self.trusted_from = max(self.trusted_from, load.ejected_until)
        if self._has_peer(load, now):
            self._slow_starts.begin(load, load.ejected_until)
        if load.up and not load.draining:
            load.reason = f"ejected: {kind.value}"
        return True

    def distrust(self, name: str, until: float) -> None:
        """Other gateways have ejected a member: it counts as ejected here until then, or until it answers us."""
        load = self._workers.get(name)
        if load is not None and load.ejected_until < until:
            load.ejected_until = until
            self.trusted_from = max(self.trusted_from, until)
            if load.up and not load.draining:
                load.reason = "ejected by other gateways"

    def succeeded(self, load: WorkerLoad) -> None:
        """An answer came: the worker is trusted again. A slow start goes on."""
        if load.fail_times or load.ejected_until:
            load.fail_times.clear()
            load.ejected_until = 0.0
            if load.up and not load.draining:
                load.reason = ""

    def start_slowly(self, now: float) -> None:
        """Give the workers that start slowly the share that is their due."""
        self._slow_starts.advance(now)

    def next_opening(self, now: float) -> float | None:
        """The next instant at which a worker may take more though nothing else happens, or None.

        An ejected one is trusted again then, or one that starts slowly may hold one more sequence.
        """
        step = self._slow_starts.next_step(now)
        if now >= self.trusted_from:
            return step
        returns = [w.ejected_until for w in self._workers.values() if w.ejected_until > now]
        return min(returns if step is None else [*returns, step], default=None)

    # -------------------------------------------------------------- conservation

    def leases(self) -> Iterable[Lease]:
        """The leases that are out."""
        return self._grants.keys()

    def holds(self) -> Iterable[str]:
        """The requests for which a prefill worker keeps KV."""
        return self._holds.keys()

    def check(self) -> None:
        """Raise AssertionError unless every counter equals the sum of the grants behind it."""
        for load in self._workers.values():
            grants = [g for g in self._grants.values() if g.worker is load]
            holds = [g for g in self._holds.values() if g.worker is load]
            assert load.seqs == len(grants), f"{load.spec.name}: {load.seqs} sequences, {len(grants)} leases"
            assert load.prefill_tokens == sum(g.prefill_tokens for g in grants), load.spec.name
            stranded = [g for _, _, g in self._stranded if g.worker is load]
            assert load.stranded_tokens == sum(g.kv_tokens for g in stranded), load.spec.name
            assert load.kv_tokens == sum(g.kv_tokens for g in (*grants, *holds, *stranded)), load.spec.name
        for lease in self._grants:
            assert lease.leg in (Leg.PREFILL, Leg.DECODE)
