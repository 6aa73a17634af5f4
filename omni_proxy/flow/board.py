"""The board: all live requests, all members, and the few moves by which requests pass over it. Pure.

What is decided is booked here in the same call. Which event leads to which move is not known here: that is the core's
business, and for what goes wrong that of the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Final

from omni_proxy.apc.caches import Caches
from omni_proxy.apc.homes import Homes
from omni_proxy.apc.index import CacheLearner, NoIndex, PrefixIndex
from omni_proxy.errors import ErrorCode, Refusal
from omni_proxy.flow.settings import CoreSettings
from omni_proxy.lifecycle.enums import (
    AGGREGATED,
    DECODE_LEG,
    DECODE_SCHEDULED,
    DECODE_WAITING,
    ON_COMPLETED,
    ON_ENQUEUE_DECODE,
    ON_ENQUEUE_PREFILL,
    ON_GRANTED,
    ON_SENT,
    PARALLEL,
    PREFILL_SCHEDULED,
)
from omni_proxy.lifecycle.request import Request
from omni_proxy.lifecycle.stages import On
from omni_proxy.messages import (
    Abort,
    Close,
    Effect,
    Lease,
    OthersHeard,
    Outcome,
    Stage,
    StartDecode,
    StartPrefill,
    Usage,
)
from omni_proxy.scheduler.admission import retry_after_s
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.others import hear
from omni_proxy.scheduler.planner import Planner
from omni_proxy.scheduler.pools import Pools
from omni_proxy.scheduler.queue import WaitingQueue

_OUTCOMES: Final[Mapping[On, Outcome]] = {On(outcome.value): outcome for outcome in Outcome}
WAITING: Final = (Stage.PREFILL_WAITING, Stage.DECODE_WAITING)
MANY: Final = 8
"""From so many that wait on, one walk of the queues serves all events of an instant."""


class Board:
    """Requests and members, and the effects that the event in hand has had so far."""

    def __init__(self, settings: CoreSettings, index: PrefixIndex | None = None) -> None:
        self.settings = settings
        caches = Caches() if settings.prefix_aware and index is None else None
        self.caches: Final = caches
        self.index: PrefixIndex = index if index is not None else caches or NoIndex()
        self.learner: CacheLearner | None = caches
        """Who wants to know what caches should hold; None where nobody does."""
        self.homes = Homes() if settings.prefix_aware else None
        self.ledger = Ledger(settings.max_fails, settings.fail_timeout_s, Random(settings.seed))
        self.pools = Pools(self.ledger, settings.schedule_mode, settings.scheduling.model_modes)
        self.planner = Planner(self.ledger, self.pools, settings.scheduling, self.index, self.homes)
        self.requests: dict[str, Request] = {}
        self.effects: list[Effect] = []
        self.now = 0.0
        self.walk_due: float | None = None
        """The instant of the first event after which the queues have not been walked yet; None: they have."""

    def current(self, lease: Lease) -> Request | None:
        """The request that holds this very lease; None for a message of an earlier attempt or an ended request."""
        request = self.requests.get(lease.rid)
        if request is None:
            return None
        held = request.decode_lease if lease.leg is DECODE_LEG else request.prefill_lease
        return request if held is lease or held == lease else None

    def enqueue(self, request: Request, now: float, retry: bool = False, deadline: float | None = None) -> None:
        """Line up a request that has nothing, where the mode of its pool says; a retry goes first."""
        pool = self.pools.of(request.model)
        alone = request.alone or (pool is not None and pool.mode is AGGREGATED)
        if deadline is None:
            ready = pool is not None and bool(pool.alone if request.alone else pool.ready)
            deadline = now + (self.settings.queue_timeout_s if ready else self.settings.no_worker_timeout_s)
        if retry is False and not alone and pool is not None and self.planner.place_alone(request, now):
            self.start(request, now)
            return
        if alone:
            request.move(On.DECODE_RETRIED if retry else ON_ENQUEUE_DECODE, now)
        else:
            request.move(On.RETRIED if retry else ON_ENQUEUE_PREFILL, now)
        self.line_up(request, now, deadline, retry)

    def line_up(self, request: Request, now: float, deadline: float, first: bool = False) -> None:
        """Straight to its workers where nobody else waits and there is room, else into its line."""
        if self.planner.place_at_once(request, now):
            self.start(request, now)
        else:
            self.planner.wait(request, deadline, first)

    def plan(self, now: float, changed: bool = True) -> None:
        """Send those that wait, as far as there is room. `changed`: something came free, or somebody came.

        A walk costs as much as some events together. So where many wait it is left to the tick that is asked for at
        once: whatever else has come by then shares it.
        """
        planner = self.planner
        if changed:
            planner.changed()
        planner.review(now)
        waiting = len(planner.prefill_queue.waits) + len(planner.decode_queue.waits)
        if waiting >= MANY:
            if self.walk_due is None and planner.is_due(now):
                self.walk_due = now
        elif waiting:
            self.walk(now)

    def walk(self, now: float) -> None:
        """Send those that wait now, as far as there is room."""
        self.walk_due = None
        for request in self.planner.plan(now):
            self.start(request, now)

    def others_heard(self, event: OthersHeard, now: float) -> None:
        """Take into account what other gateways hold, and plan again."""
        hear(self.ledger, event, now)
        self.planner.served_elsewhere(event.served)
        if self.homes is not None:
            self.homes.placed_elsewhere(event.homes)
        self.plan(now)

    def start(self, request: Request, now: float) -> None:
        """Send the legs for which leases have just been booked."""
        if request.prefill_lease is None and request.stage is not DECODE_WAITING:
            request.move(ON_ENQUEUE_DECODE, now)  # its prompt goes to a D whole
        if request.stage is DECODE_WAITING:
            request.move(ON_GRANTED, now)
            assert request.decode_lease is not None
            self._learn_grant(request, request.decode_lease, request.handoff_from is None, now)
            self.effects.append(StartDecode(request.decode_lease, request.handoff_from, request.handoff_until))
        elif request.mode is PARALLEL:
            self._start_pair(request, now)
        else:
            request.move(ON_GRANTED, now)
            assert request.prefill_lease is not None
            self._learn_grant(request, request.prefill_lease, True, now)
            self.effects.append(StartPrefill(request.prefill_lease))

    def _start_pair(self, request: Request, now: float) -> None:
        prefill, decode = request.prefill_lease, request.decode_lease
        assert prefill is not None
        assert decode is not None
        self._learn_grant(request, prefill, True, now)
        self._learn_grant(request, decode, False, now)
        request.fork(now)
        request.move_prefill(ON_GRANTED, now)
        request.move(ON_GRANTED, now)
        self.effects.append(StartPrefill(prefill, decode.worker))
        self.effects.append(StartDecode(decode, prefill.worker))

    def _learn_grant(self, request: Request, lease: Lease, computes: bool, now: float) -> None:
        """The prompt's blocks will be on a worker; note what the one that computes them should find of them."""
        expected = None if self.learner is None else self.learner.granted(lease, request.block_keys, now)
        if computes and request.block_keys:
            expected = request.cached.get(lease.worker, 0) if expected is None else expected
            request.predicted_tokens = min(expected, request.prompt_tokens - 1)

    def learn_answer(self, request: Request, lease: Lease, usage: Usage, computed: bool, now: float) -> None:
        """A worker said what it found cached. `computed`: of a prompt that it was to compute itself."""
        if self.learner is not None:
            predicted = request.predicted_tokens if computed else None
            self.learner.answered(lease, predicted, usage.cached_tokens, now)

    def runs(self, request: Request, lease: Lease, now: float) -> None:
        """A leg is running; an answer says so too, where it overtook `LegSent` or there was none."""
        if request.prefill_stage is not None and lease == request.prefill_lease:
            if request.prefill_stage is PREFILL_SCHEDULED:
                request.move_prefill(ON_SENT, now)
        elif request.stage is PREFILL_SCHEDULED or request.stage is DECODE_SCHEDULED:
            request.move(ON_SENT, now)

    def give_up_kv(self, request: Request, now: float) -> None:
        """Nobody will pull what P keeps for this request: it is freed by a call, or stays load until the lease ends."""
        worker = None if request.handoff_from is None else self.ledger.get(request.handoff_from)
        freed_at = request.handoff_freed_at
        if worker is None or worker.spec.releases_kv or freed_at is None or freed_at <= now:
            self.ledger.drop_hold(request.rid)
        else:
            self.ledger.strand(request.rid, freed_at)

    def start_over(self, request: Request, now: float) -> None:
        """Line up again from the beginning, in front; the KV of earlier attempts is given up."""
        self.give_up_kv(request, now)
        request.start_over()
        self.enqueue(request, now, retry=True)

    def refuse(self, request: Request, refusal: Refusal, now: float) -> None:
        """End a request that gets no work done, because of what it asks or of how much waits."""
        after = retry_after_s(self.planner.drain_s(now)) if refusal.code is ErrorCode.QUEUE_FULL else None
        self.close(request, On.REJECTED, now, refusal.code, refusal.detail, retry_after_s=after)

    def fail(self, request: Request, code: ErrorCode, detail: str, now: float) -> None:
        """End a request for a reason that no worker's answer tells."""
        self.close(request, On.FAILED, now, code, detail)

    def close(
        self,
        request: Request,
        on: On,
        now: float,
        error: ErrorCode | None = None,
        detail: str = "",
        failed: Lease | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """The only end of a request: every lease home, every queue left, one `Close`."""
        waited = request.stage in WAITING
        request.move(on, now)
        if waited:
            self.planner.leave(request)
        self.drop_leases(request, keep=failed)
        if on is ON_COMPLETED:
            self.ledger.drop_hold(request.rid)
        else:
            self.give_up_kv(request, now)
        del self.requests[request.rid]
        outcome = _OUTCOMES[on]
        record = request.record(outcome, error, detail)
        self.effects.append(Close(request.rid, outcome, record, error, detail, failed, retry_after_s))

    def drop_leases(self, request: Request, keep: Lease | None) -> None:
        """Take all leases of a request home and abort its legs, except the one that has ended by itself."""
        for lease in live_leases(request):
            self.planner.learning.dropped(lease, self.now)
            self.ledger.release(lease)
            if self.learner is not None:
                self.learner.dropped(lease)
            if lease != keep:
                self.effects.append(Abort(lease))
        request.prefill_lease = request.decode_lease = None
        request.prefill_stage = None

    def queues(self) -> tuple[WaitingQueue, WaitingQueue]:
        """The lines for P and for D."""
        return self.planner.prefill_queue, self.planner.decode_queue

    def check(self) -> None:
        """Raise AssertionError unless workers hold exactly what live requests hold."""
        self.ledger.check()
        held = {lease for r in self.requests.values() for lease in live_leases(r)}
        assert set(self.ledger.leases()) == held, "leases out without a live request, or the reverse"
        kept = {r.rid for r in self.requests.values() if r.handoff_from is not None}
        assert set(self.ledger.holds()) <= kept, "KV held for a request that will not pull it"
        for request in self.requests.values():
            queued = [q for q in self.queues() if request.rid in q]
            waits = request.stage in WAITING
            assert len(queued) == int(waits), f"{request.rid} in {request.stage.name}: in {len(queued)} queues"
        assert sum(len(q) for q in self.queues()) <= len(self.requests)


def live_leases(request: Request) -> list[Lease]:
    """The leases that a request holds."""
    return [lease for lease in (request.prefill_lease, request.decode_lease) if lease is not None]
