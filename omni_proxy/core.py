"""The core: hears events, decides, books, and says what is to be done. Pure.

`handle` is the only way in and the only place where shared state changes; `next_wakeup` says when it wants a `Tick`.
The live gateway and the simulator are two loops around these two calls. What is decided here is booked here, in the
same call: whoever carries the effects out may fail or be cancelled and can lose work, never corrupt state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, assert_never

from omni_proxy.apc.caches import Caches
from omni_proxy.apc.homes import Homes
from omni_proxy.apc.index import CacheLearner, NoIndex, NoLearner, PrefixIndex
from omni_proxy.errors import ErrorCode, Refusal
from omni_proxy.lifecycle.request import Request
from omni_proxy.lifecycle.retries import RetryPolicy, Verdict, error_of
from omni_proxy.lifecycle.stages import On
from omni_proxy.messages import (
    Abort,
    Adopted,
    Arrived,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    Cancelled,
    Close,
    DecodeDone,
    Effect,
    Event,
    Failure,
    FirstToken,
    FrontLost,
    Lease,
    LegFailed,
    LegSent,
    Mode,
    Outcome,
    PrefillDone,
    RequestRecord,
    Stage,
    StartDecode,
    StartPrefill,
    Tick,
    Tokenize,
    Tokenized,
    Usage,
    WorkerAdded,
    WorkerDown,
    WorkerDraining,
    WorkerRemoved,
    WorkerUp,
)
from omni_proxy.scheduler.admission import Admission, retry_after_s
from omni_proxy.scheduler.ledger import Ledger, WorkerLoad
from omni_proxy.scheduler.planner import Planner
from omni_proxy.scheduler.pools import Pools, serves
from omni_proxy.scheduler.queue import WaitingQueue
from omni_proxy.scheduler.settings import SchedulingSettings

_OUTCOMES: Final[Mapping[On, Outcome]] = {On(outcome.value): outcome for outcome in Outcome}
_WAITING: Final = (Stage.PREFILL_WAITING, Stage.DECODE_WAITING)


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """What an operator may set; seconds and tokens as the names say."""

    schedule_mode: Mode | None = None
    """None: what the members can do, sequential before parallel before aggregated."""
    prefix_aware: bool = False
    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)
    queue_timeout_s: float = 60.0
    no_worker_timeout_s: float = 10.0
    admission: Admission = field(default_factory=Admission)
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    max_fails: int = 1
    fail_timeout_s: float = 10.0


class Core:
    """All live requests and all members, and the decisions about them."""

    def __init__(self, settings: CoreSettings, index: PrefixIndex | None = None) -> None:
        self._settings = settings
        caches = Caches() if settings.prefix_aware and index is None else None
        self.caches: Final = caches
        """What the members' caches hold, where prefixes are followed and nobody gave another index."""
        self._index: PrefixIndex = index if index is not None else caches or NoIndex()
        self._learner: CacheLearner = caches or NoLearner()
        self._homes = Homes() if settings.prefix_aware else None
        self._ledger = Ledger(settings.max_fails, settings.fail_timeout_s)
        self._pools = Pools(self._ledger, settings.schedule_mode)
        self._planner = Planner(self._ledger, self._pools, settings.scheduling, self._index, self._homes)
        self._requests: dict[str, Request] = {}
        self._effects: list[Effect] = []
        self._now = 0.0

    # --------------------------------------------------------------------- ways in

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event into account; return what is to be done, in order. `now`: seconds, monotonic."""
        effects: list[Effect] = []
        self._effects = effects
        self._now = now
        match event:
            case Arrived():
                self._arrived(event, now)
            case LegSent(lease):
                self._leg_sent(lease, now)
            case PrefillDone():
                self._prefill_done(event, now)
            case FirstToken(lease):
                self._first_token(lease, now)
            case DecodeDone():
                self._decode_done(event, now)
            case Tokenized():
                self._tokenized(event, now)
            case LegFailed():
                self._leg_failed(event, now)
            case Cancelled(rid):
                self._cancelled(rid, now)
            case WorkerAdded() | WorkerUp() | WorkerDown() | WorkerDraining() | WorkerRemoved():
                self._members_changed(event, now)
            case FrontLost(prefix):
                self._front_lost(prefix, now)
            case Adopted():
                self._adopted(event, now)
            case Tick():
                self._tick(now)
            case BlocksStored() | BlocksRemoved() | CacheCleared():
                self._learner.heard(event)
            case _:
                assert_never(event)
        return effects

    def next_wakeup(self) -> float | None:
        """The instant at which the core wants a `Tick`, or None."""
        prefill, decode = self._queues()
        if not (prefill.waits or decode.waits):
            return None
        # A worker that is trusted again, or starts slowly, may take what waits, and no other event would say so.
        instants = (prefill.next_deadline(), decode.next_deadline(), self._planner.next_wakeup())
        return min((at for at in instants if at is not None), default=None)

    def reconfigure(self, settings: CoreSettings) -> None:
        """Use other limits, waits, bounds of retries and of failing from now on; what shapes the core stays."""
        old = self._settings
        self._settings = replace(
            settings,
            schedule_mode=old.schedule_mode,
            prefix_aware=old.prefix_aware,
            scheduling=old.scheduling,
        )
        self._ledger.blame(settings.max_fails, settings.fail_timeout_s)

    # ------------------------------------------------------------------- questions

    def ready(self) -> bool:
        """Can some model be served from end to end right now?"""
        return self._pools.any_ready()

    def records(self) -> Iterator[RequestRecord]:
        """The live requests as they stand."""
        return (r.record(None, None, "") for r in self._requests.values())

    def live_count(self) -> int:
        """How many requests have not ended."""
        return len(self._requests)

    def workers(self) -> Iterator[WorkerLoad]:
        """The members with their load, by name; to be read only."""
        return iter(self._ledger)

    def waiting(self) -> tuple[int, int]:
        """Waiting requests and their prompt tokens."""
        return sum(len(q) for q in self._queues()), sum(q.tokens for q in self._queues())

    def check(self) -> None:
        """Raise AssertionError unless workers hold exactly what live requests hold."""
        self._ledger.check()
        held = {lease for r in self._requests.values() for lease in _live_leases(r)}
        assert set(self._ledger.leases()) == held, "leases out without a live request, or the reverse"
        kept = {r.rid for r in self._requests.values() if r.handoff_from is not None}
        assert set(self._ledger.holds()) <= kept, "KV held for a request that will not pull it"
        for request in self._requests.values():
            queued = [q for q in self._queues() if request.rid in q]
            waits = request.stage in _WAITING
            assert len(queued) == int(waits), f"{request.rid} in {request.stage.name}: in {len(queued)} queues"
        assert sum(len(q) for q in self._queues()) <= len(self._requests)

    # -------------------------------------------------------------- arrival to queue

    def _arrived(self, event: Arrived, now: float) -> None:
        assert event.rid not in self._requests, f"request {event.rid} arrived twice"
        request = Request(event.rid, event.spec, now)
        self._requests[event.rid] = request
        refusal = self._settings.admission.refuse_arrival(request, self._pools, self._queues())
        if refusal is not None:
            self._refuse(request, refusal, now)
        elif event.spec.tokenize:
            request.move(On.TOKENIZE, now)
            self._effects.append(Tokenize(event.rid))
        else:
            self._admit(request, now)

    def _adopted(self, event: Adopted, now: float) -> None:
        """Take over what another scheduler began: count its leases and wait for its legs to end."""
        leases = [lease for lease in (event.prefill, event.decode) if lease is not None]
        assert leases, f"{event.rid} has nothing to adopt"
        request = Request(event.rid, event.spec, now)
        self._requests[event.rid] = request
        known = all(self._ledger.get(lease.worker) is not None for lease in leases)
        if event.prefill is not None and event.decode is not None:
            request.prefill_stage = Stage.PREFILL_RUNNING
        request.move(On.ADOPTED_DECODE if event.decode is not None else On.ADOPTED_PREFILL, now)
        if not known:
            self._effects.extend(map(Abort, leases))
            self._fail(request, ErrorCode.NO_WORKER, "The worker of this request is no member any more.", now)
            return
        request.first_token_at = now if event.first_token else None
        self._planner.adopt(request, event.prefill, event.decode, event.handoff_from, now)

    def _tokenized(self, event: Tokenized, now: float) -> None:
        request = self._requests.get(event.rid)
        if request is None or request.stage is not Stage.TOKENIZING:
            return
        if event.prompt_tokens is not None:
            request.prompt_tokens = event.prompt_tokens
            request.block_keys = event.block_keys
            refusal = self._settings.admission.refuse_length(request, self._pools)
            if refusal is not None:
                self._refuse(request, refusal, now)
                return
        self._admit(request, now)

    def _admit(self, request: Request, now: float) -> None:
        if self._settings.prefix_aware:
            request.move(On.MATCH, now)
            request.match(self._index.match(request.block_keys), now)
            if self._homes is not None:
                self._homes.saw(request.block_keys)
        self._enqueue(request, now)
        self._plan(now, changed=False)
        if request.stage in _WAITING:
            refusal = self._refuse_wait(request, now)
            if refusal is not None:
                self._refuse(request, refusal, now)

    def _refuse_wait(self, request: Request, now: float) -> Refusal | None:
        admission = self._settings.admission
        refusal = admission.refuse_wait(request, self._queues())
        if refusal is None and request.spec.ttft_target_s is not None:
            refusal = admission.refuse_late(request, self._planner.first_token_at(request, now))
        return refusal

    def _enqueue(self, request: Request, now: float, retry: bool = False, deadline: float | None = None) -> None:
        """Line up a request that has nothing, where the mode of its pool says; a retry goes first."""
        pool = self._pools.of(request.spec.model)
        alone = request.alone or (pool is not None and pool.mode is Mode.AGGREGATED)
        if deadline is None:
            ready = pool is not None and bool(pool.alone if request.alone else pool.ready)
            deadline = now + (self._settings.queue_timeout_s if ready else self._settings.no_worker_timeout_s)
        if retry is False and not alone and pool is not None and self._planner.place_alone(request, now):
            request.move(On.ENQUEUE_DECODE, now)
            self._start(request, now)
            return
        if alone:
            request.move(On.DECODE_RETRIED if retry else On.ENQUEUE_DECODE, now)
        else:
            request.move(On.RETRIED if retry else On.ENQUEUE_PREFILL, now)
        self._line_up(request, now, deadline, retry)

    def _line_up(self, request: Request, now: float, deadline: float, first: bool = False) -> None:
        """Straight to its workers where nobody else waits and there is room, else into its line."""
        if self._planner.place_at_once(request, now):
            self._start(request, now)
        else:
            self._planner.wait(request, deadline, first)

    # --------------------------------------------------------------- grants and legs

    def _plan(self, now: float, changed: bool = True) -> None:
        if changed:
            self._planner.changed()
        if not (self._planner.prefill_queue.waits or self._planner.decode_queue.waits):
            return
        for request in self._planner.plan(now):
            self._start(request, now)

    def _start(self, request: Request, now: float) -> None:
        """Send the legs for which leases have just been booked."""
        if request.stage is Stage.DECODE_WAITING:
            request.move(On.GRANTED, now)
            assert request.decode_lease is not None
            self._learn_grant(request, request.decode_lease, request.handoff_from is None, now)
            self._effects.append(StartDecode(request.decode_lease, request.handoff_from))
        elif request.mode is Mode.PARALLEL:
            self._start_pair(request, now)
        else:
            request.move(On.GRANTED, now)
            assert request.prefill_lease is not None
            self._learn_grant(request, request.prefill_lease, True, now)
            self._effects.append(StartPrefill(request.prefill_lease))

    def _start_pair(self, request: Request, now: float) -> None:
        prefill, decode = request.prefill_lease, request.decode_lease
        assert prefill is not None
        assert decode is not None
        self._learn_grant(request, prefill, True, now)
        self._learn_grant(request, decode, False, now)
        request.fork(now)
        request.move_prefill(On.GRANTED, now)
        request.move(On.GRANTED, now)
        self._effects.append(StartPrefill(prefill, decode.worker))
        self._effects.append(StartDecode(decode, prefill.worker))

    def _learn_grant(self, request: Request, lease: Lease, computes: bool, now: float) -> None:
        """The prompt's blocks will be on a worker; note what the one that computes them should find of them."""
        expected = self._learner.granted(lease, request.block_keys, now)
        if computes and request.block_keys:
            expected = request.cached.get(lease.worker, 0) if expected is None else expected
            request.predicted_tokens = min(expected, request.prompt_tokens - 1)

    def _learn_answer(self, request: Request, lease: Lease, usage: Usage, computed: bool, now: float) -> None:
        predicted = request.predicted_tokens if computed else None
        self._learner.answered(lease, predicted, usage.cached_tokens, now)

    def _current(self, lease: Lease) -> Request | None:
        """The request that holds this very lease; None for a message of an earlier attempt or an ended request."""
        request = self._requests.get(lease.rid)
        if request is None or lease not in (request.prefill_lease, request.decode_lease):
            return None
        return request

    def _leg_sent(self, lease: Lease, now: float) -> None:
        request = self._current(lease)
        if request is not None:
            self._runs(request, lease, now)

    def _runs(self, request: Request, lease: Lease, now: float) -> None:
        """A leg is running; an answer says so too, where it overtook `LegSent` or there was none."""
        if request.prefill_stage is not None and lease == request.prefill_lease:
            if request.prefill_stage is Stage.PREFILL_SCHEDULED:
                request.move_prefill(On.SENT, now)
        elif request.stage in (Stage.PREFILL_SCHEDULED, Stage.DECODE_SCHEDULED):
            request.move(On.SENT, now)

    def _prefill_done(self, event: PrefillDone, now: float) -> None:
        request = self._current(event.lease)
        if request is None or event.lease != request.prefill_lease:
            return
        self._runs(request, event.lease, now)
        worker = self._ledger.holder(event.lease)
        self._ledger.succeeded(worker)
        request.learn(event.usage)
        self._planner.learning.computed(request, event.lease, event.usage.cached_tokens, now)
        self._ledger.release(event.lease)
        request.prefill_lease = None
        request.prefill_done_at = now
        self._learn_answer(request, event.lease, event.usage, True, now)
        if request.mode is Mode.PARALLEL:
            request.join()
        elif event.ended:
            request.first_token_at = now
            self._close(request, On.COMPLETED, now)
        elif not event.handoff:
            self._handoff_missed(request, now)
        elif not self._ledger.is_member(worker):
            self._start_over(request, now)
        else:
            self._await_decode(request, event.lease.worker, now)
        self._plan(now)

    def _await_decode(self, request: Request, prefill: str, now: float) -> None:
        request.handoff_from = prefill
        self._ledger.hold(request.rid, prefill, request.prompt_tokens)
        request.move(On.PREFILL_DONE, now)
        self._line_up(request, now, now + self._settings.queue_timeout_s)

    def _handoff_missed(self, request: Request, now: float) -> None:
        """P gave nothing to pull: somebody who can do both starts anew, which costs time and is always right."""
        pool = self._pools.of(request.spec.model)
        if pool is None or not pool.can_alone:
            self._fail(request, ErrorCode.HANDOFF_MISSED, "The prefill worker gave no KV parameters.", now)
            return
        request.alone = True
        request.move(On.PREFILL_DONE, now)
        self._line_up(request, now, now + self._settings.queue_timeout_s)

    def _first_token(self, lease: Lease, now: float) -> None:
        request = self._current(lease)
        if request is None or lease != request.decode_lease or request.first_token_at is not None:
            return
        request.first_token_at = now
        self._planner.learning.computed(request, lease, None, now)
        self._planner.learning.answering(request, lease, now)
        self._ledger.prefilled(lease)
        self._ledger.drop_hold(request.rid)
        self._plan(now)

    def _decode_done(self, event: DecodeDone, now: float) -> None:
        request = self._current(event.lease)
        if request is None or event.lease != request.decode_lease:
            return
        self._runs(request, event.lease, now)
        self._ledger.succeeded(self._ledger.holder(event.lease))
        request.learn(event.usage)
        self._learn_answer(request, event.lease, event.usage, request.mode is Mode.AGGREGATED, now)
        self._planner.learning.answered(request, event.lease, now)
        request.decode_lease = None
        self._ledger.release(event.lease)
        self._close(request, On.COMPLETED, now)
        self._plan(now)

    # ----------------------------------------------------------------- failing legs

    def _leg_failed(self, event: LegFailed, now: float) -> None:
        request = self._current(event.lease)
        if request is None:
            return
        lease, failure = event.lease, event.failure
        worker = self._ledger.holder(lease)
        if self._settings.retries.blames_worker(failure):
            self._ledger.failed(worker, failure.kind, now)
        verdict = self._verdict(request, lease, failure, worker)
        self._drop_leases(request, keep=lease)
        if verdict is Verdict.FAIL or self._pools.of(request.spec.model) is None:
            code, detail = error_of(failure)
            self._close(request, On.FAILED, now, code, detail, lease)
        else:
            self._retry(request, lease, verdict, now)
        self._plan(now)

    def _verdict(self, request: Request, lease: Lease, failure: Failure, worker: WorkerLoad) -> Verdict:
        if request.first_token_at is not None:
            return Verdict.FAIL  # the client has seen a part of this answer
        reusable = request.handoff_from is not None and worker.spec.handoff_reusable
        prefilled = request.prefill_done_at is not None
        return self._settings.retries.verdict(lease.leg, failure, request.retries, prefilled, reusable)

    def _drop_leases(self, request: Request, keep: Lease | None) -> None:
        """Take all leases of a request home and abort its legs, except the one that has ended by itself."""
        for lease in _live_leases(request):
            self._planner.learning.dropped(lease, self._now)
            self._ledger.release(lease)
            self._learner.dropped(lease)
            if lease != keep:
                self._effects.append(Abort(lease))
        request.prefill_lease = request.decode_lease = None
        request.prefill_stage = None

    def _retry(self, request: Request, lease: Lease, verdict: Verdict, now: float) -> None:
        request.retries += 1
        request.avoid = request.avoid | {lease.worker}
        if verdict is Verdict.DECODE_AGAIN:
            request.move(On.DECODE_RETRIED, now)
            self._line_up(request, now, now + self._settings.queue_timeout_s, first=True)
        else:
            self._start_over(request, now)

    def _start_over(self, request: Request, now: float) -> None:
        """Line up again from the beginning, in front; the KV of earlier attempts is given up."""
        self._ledger.drop_hold(request.rid)
        request.start_over()
        self._enqueue(request, now, retry=True)

    # ------------------------------------------------------------------ other events

    def _cancelled(self, rid: str, now: float) -> None:
        request = self._requests.get(rid)
        if request is not None:
            self._close(request, On.CANCELLED, now, ErrorCode.CLIENT_GONE, "The client left.")
            self._plan(now)

    def _front_lost(self, prefix: str, now: float) -> None:
        for request in [r for rid, r in self._requests.items() if rid.startswith(prefix)]:
            self._close(request, On.CANCELLED, now, ErrorCode.CLIENT_GONE, "The front process of this client died.")
        self._plan(now)

    def _members_changed(self, event: Event, now: float) -> None:
        match event:
            case WorkerAdded(spec):
                self._ledger.add(spec)
                self._learner.member(spec)
            case WorkerUp(spec):
                self._ledger.put(spec, now)
                self._learner.member(spec)
            case WorkerDown(name, reason):
                self._ledger.down(name, reason)
                self._learner.lost(name, removed=False)
            case WorkerDraining(name):
                self._ledger.drain(name)
            case WorkerRemoved(name):
                self._ledger.remove(name)
                self._learner.lost(name, removed=True)
            case _:
                raise AssertionError(event)
        self._pools.changed()
        if isinstance(event, WorkerRemoved):
            self._forget_handoffs(event.name)
        self._realign(now)
        self._plan(now)

    def _forget_handoffs(self, name: str) -> None:
        """What a removed P had ready is gone, also when its name comes back."""
        for request in self._requests.values():
            if request.handoff_from == name:
                self._ledger.drop_hold(request.rid)
                request.handoff_from = None

    def _realign(self, now: float) -> None:
        """Let waiting requests change lines where theirs leads nowhere any more, because a member changed."""
        for request in self._planner.strayed():
            deadline = self._planner.leave(request)
            if request.prefill_done_at is None:
                self._enqueue(request, now, deadline=deadline)
            else:
                self._start_over(request, now)

    def _tick(self, now: float) -> None:
        for queue in self._queues():
            while (rid := queue.overdue(now)) is not None:
                self._give_up(self._requests[rid], now)
        self._plan(now, changed=False)

    def _give_up(self, request: Request, now: float) -> None:
        pool = self._pools.of(request.spec.model)
        if pool is None or not pool.ready:
            code, detail = ErrorCode.NO_WORKER, _what_is_missing(request.spec.model, self._ledger)
        else:
            code, detail = ErrorCode.QUEUE_TIMEOUT, "The request waited too long for a free worker."
        self._close(request, On.TIMED_OUT, now, code, detail)

    # -------------------------------------------------------------------- the one end

    def _refuse(self, request: Request, refusal: Refusal, now: float) -> None:
        after = retry_after_s(self._planner.drain_s(now)) if refusal.code is ErrorCode.QUEUE_FULL else None
        self._close(request, On.REJECTED, now, refusal.code, refusal.detail, retry_after_s=after)

    def _fail(self, request: Request, code: ErrorCode, detail: str, now: float) -> None:
        self._close(request, On.FAILED, now, code, detail)

    def _close(
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
        waited = request.stage in _WAITING
        request.move(on, now)
        if waited:
            self._planner.leave(request)
        self._drop_leases(request, keep=failed)
        self._ledger.drop_hold(request.rid)
        del self._requests[request.rid]
        outcome = _OUTCOMES[on]
        record = request.record(outcome, error, detail)
        self._effects.append(Close(request.rid, outcome, record, error, detail, failed, retry_after_s))

    def _queues(self) -> tuple[WaitingQueue, WaitingQueue]:
        return self._planner.prefill_queue, self._planner.decode_queue


def _live_leases(request: Request) -> list[Lease]:
    return [lease for lease in (request.prefill_lease, request.decode_lease) if lease is not None]


def _what_is_missing(model: str, ledger: Ledger) -> str:
    """One sentence on why a model cannot be served; worker names only, no addresses."""
    down = [f"{w.spec.name} ({w.reason})" for w in ledger if serves(w, model) and (not w.up or w.draining)]
    return f"No worker can serve {model!r} now" + (f"; not usable: {', '.join(down)}." if down else ".")
