"""The core: hears events, decides, books, and says what is to be done. Pure.

`handle` is the only way in and the only place where shared state changes; `next_wakeup` says when it wants a `Tick`.
The live gateway and the simulator are two loops around these two calls. What is decided here is booked here, in the
same call: whoever carries the effects out may fail or be cancelled and can lose work, never corrupt state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from msgspec import Struct

from omni_proxy.apc.index import NoIndex, PrefixIndex
from omni_proxy.errors import ErrorCode, Refusal
from omni_proxy.lifecycle.request import Request
from omni_proxy.lifecycle.retries import RetryPolicy, Verdict, error_of
from omni_proxy.lifecycle.stages import On
from omni_proxy.messages import (
    Abort,
    Arrived,
    Cancelled,
    Close,
    DecodeDone,
    Effect,
    Event,
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
    WorkerAdded,
    WorkerDown,
    WorkerDraining,
    WorkerRemoved,
    WorkerUp,
)
from omni_proxy.scheduler.admission import Admission
from omni_proxy.scheduler.ledger import Ledger, WorkerLoad
from omni_proxy.scheduler.placement import Placer
from omni_proxy.scheduler.planner import Planner
from omni_proxy.scheduler.pools import Pools
from omni_proxy.scheduler.queue import WaitingQueue
from omni_proxy.scheduler.registry import DECODE_PLACERS, PREFILL_PLACERS


class CoreSettings(Struct, frozen=True):
    """What an operator may set; seconds and tokens as the names say."""

    schedule_mode: Mode | None = None
    """None: what the members can do, sequential before parallel before aggregated."""
    prefix_aware: bool = False
    prefill_placer: str = "fewest-tokens"
    decode_placer: str = "fewest-kv-tokens"
    queue_timeout_s: float = 60.0
    no_worker_timeout_s: float = 10.0
    admission: Admission = Admission()
    retries: RetryPolicy = RetryPolicy()
    max_fails: int = 1
    fail_timeout_s: float = 10.0


class Core:
    """All live requests and all members, and the decisions about them."""

    def __init__(self, settings: CoreSettings, index: PrefixIndex | None = None) -> None:
        self._settings = settings
        self._index = index or NoIndex()
        self._ledger = Ledger(settings.max_fails, settings.fail_timeout_s)
        self._pools = Pools(self._ledger, settings.schedule_mode)
        prefill: Placer = PREFILL_PLACERS[settings.prefill_placer]()
        decode: Placer = DECODE_PLACERS[settings.decode_placer]()
        self._planner = Planner(self._ledger, self._pools, prefill, decode)
        self._requests: dict[str, Request] = {}
        self._effects: list[Effect] = []

    # --------------------------------------------------------------------- ways in

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event into account; return what is to be done, in order. `now`: seconds, monotonic."""
        effects: list[Effect] = []
        self._effects = effects
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
                for rid in [r for r in self._requests if r.startswith(prefix)]:
                    self._cancelled(rid, now)
            case Tick():
                self._tick(now)
            case _:
                assert_never(event)
        return effects

    def next_wakeup(self) -> float | None:
        """The instant at which the core wants a `Tick`, or None."""
        deadlines = [d for q in self._queues() if (d := q.next_deadline()) is not None]
        return min(deadlines, default=None)

    # ------------------------------------------------------------------- questions

    def ready(self) -> bool:
        """Can some model be served from end to end right now?"""
        return self._pools.any_ready()

    def records(self) -> Iterator[RequestRecord]:
        """The live requests as they stand."""
        return (r.record(None, None, "") for r in self._requests.values())

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
            waits = request.stage in (Stage.PREFILL_WAITING, Stage.DECODE_WAITING)
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
        if self._settings.prefix_aware and request.block_keys:
            request.move(On.MATCH, now)
        self._enqueue(request, now, first=False)
        self._plan(now)

    def _enqueue(self, request: Request, now: float, first: bool) -> None:
        pool = self._pools.of(request.spec.model)
        ready = pool is not None and pool.ready
        patience = self._settings.queue_timeout_s if ready else self._settings.no_worker_timeout_s
        if pool is not None and pool.mode is Mode.AGGREGATED:
            request.move(On.ENQUEUE_DECODE, now)
            self._planner.decode_queue.push(request, now + patience, first)
        else:
            request.move(On.ENQUEUE_PREFILL, now)
            self._planner.prefill_queue.push(request, now + patience, first)

    # --------------------------------------------------------------- grants and legs

    def _plan(self, now: float) -> None:
        for request in self._planner.plan(now):
            if request.stage is Stage.DECODE_WAITING:
                request.move(On.GRANTED, now)
                self._start_decode(request)
            elif request.mode is Mode.PARALLEL:
                self._start_pair(request, now)
            else:
                request.move(On.GRANTED, now)
                assert request.prefill_lease is not None
                self._effects.append(StartPrefill(request.prefill_lease))

    def _start_decode(self, request: Request) -> None:
        assert request.decode_lease is not None
        self._effects.append(StartDecode(request.decode_lease, request.handoff_from))

    def _start_pair(self, request: Request, now: float) -> None:
        prefill, decode = request.prefill_lease, request.decode_lease
        assert prefill is not None and decode is not None
        request.fork(now)
        request.move_prefill(On.GRANTED, now)
        request.move(On.GRANTED, now)
        self._effects.append(StartPrefill(prefill, decode.worker))
        self._effects.append(StartDecode(decode, prefill.worker))

    def _current(self, lease: Lease) -> Request | None:
        """The request that holds this very lease; None for a message of an earlier attempt or an ended request."""
        request = self._requests.get(lease.rid)
        if request is None or lease not in (request.prefill_lease, request.decode_lease):
            return None
        return request

    def _leg_sent(self, lease: Lease, now: float) -> None:
        request = self._current(lease)
        if request is None:
            return
        if lease is not request.decode_lease and lease != request.decode_lease and request.prefill_stage is not None:
            request.move_prefill(On.SENT, now)
        else:
            request.move(On.SENT, now)

    def _prefill_done(self, event: PrefillDone, now: float) -> None:
        request = self._current(event.lease)
        if request is None or event.lease != request.prefill_lease:
            return
        self._ledger.release(event.lease)
        self._ledger.succeeded(event.lease.worker)
        request.prefill_lease = None
        request.prefill_done_at = now
        request.learn(event.usage)
        if request.mode is Mode.PARALLEL:
            request.join()
        elif event.ended:
            request.first_token_at = now
            self._close(request, On.COMPLETED, now)
        elif not event.handoff:
            self._fail(request, ErrorCode.HANDOFF_MISSED, "The prefill worker gave no KV parameters.", now)
        else:
            self._await_decode(request, event.lease.worker, now)
        self._plan(now)

    def _await_decode(self, request: Request, prefill: str, now: float) -> None:
        request.handoff_from = prefill
        self._ledger.hold(request.rid, prefill, request.prompt_tokens)
        request.move(On.PREFILL_DONE, now)
        self._planner.decode_queue.push(request, now + self._settings.queue_timeout_s)

    def _first_token(self, lease: Lease, now: float) -> None:
        request = self._current(lease)
        if request is not None and request.first_token_at is None:
            request.first_token_at = now
            self._ledger.drop_hold(request.rid)

    def _decode_done(self, event: DecodeDone, now: float) -> None:
        request = self._current(event.lease)
        if request is None or event.lease != request.decode_lease:
            return
        self._ledger.succeeded(event.lease.worker)
        request.learn(event.usage)
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
        if self._settings.retries.blames_worker(failure):
            self._ledger.failed(lease.worker, failure.kind, now)
        parked = request.handoff_from
        self._drop_leases(request, keep=lease)
        pool = self._pools.of(request.spec.model)
        peer = self._ledger.get(lease.worker)
        reusable = parked is not None and peer is not None and peer.spec.handoff_reusable
        verdict = self._settings.retries.verdict(lease.leg, failure, request.retries, reusable)
        if verdict is Verdict.FAIL or pool is None:
            code, detail = error_of(failure)
            self._close(request, On.FAILED, now, code, detail, lease)
        else:
            self._retry(request, lease, parked if verdict is Verdict.DECODE_AGAIN else None, now)
        self._plan(now)

    def _drop_leases(self, request: Request, keep: Lease | None) -> None:
        """Take all leases of a request home and abort its legs, except the one that has ended by itself."""
        for lease in _live_leases(request):
            self._ledger.release(lease)
            if lease != keep:
                self._effects.append(Abort(lease))
        request.prefill_lease = request.decode_lease = None
        request.prefill_stage = None

    def _retry(self, request: Request, lease: Lease, parked: str | None, now: float) -> None:
        request.retries += 1
        request.avoid = request.avoid | {lease.worker}
        if parked is not None:
            request.move(On.DECODE_RETRIED, now)
            self._planner.decode_queue.push(request, now + self._settings.queue_timeout_s, first=True)
            return
        request.handoff_from = None
        self._ledger.drop_hold(request.rid)
        pool = self._pools.of(request.spec.model)
        if pool is not None and pool.mode is Mode.AGGREGATED:
            request.move(On.DECODE_RETRIED, now)
            self._planner.decode_queue.push(request, now + self._settings.queue_timeout_s, first=True)
        else:
            request.move(On.RETRIED, now)
            self._planner.prefill_queue.push(request, now + self._settings.queue_timeout_s, first=True)

    # ------------------------------------------------------------------ other events

    def _cancelled(self, rid: str, now: float) -> None:
        request = self._requests.get(rid)
        if request is not None:
            self._close(request, On.CANCELLED, now, ErrorCode.CLIENT_GONE, "The client left.")
            self._plan(now)

    def _members_changed(self, event: Event, now: float) -> None:
        match event:
            case WorkerAdded(spec):
                self._ledger.add(spec)
            case WorkerUp(spec):
                self._ledger.put(spec)
            case WorkerDown(name, reason):
                self._ledger.down(name, reason)
            case WorkerDraining(name):
                self._ledger.drain(name)
            case WorkerRemoved(name):
                self._ledger.remove(name)
            case _:
                raise AssertionError(event)
        self._pools.changed()
        self._plan(now)

    def _tick(self, now: float) -> None:
        for queue in self._queues():
            while (rid := queue.overdue(now)) is not None:
                self._give_up(self._requests[rid], now)
        self._plan(now)

    def _give_up(self, request: Request, now: float) -> None:
        pool = self._pools.of(request.spec.model)
        if pool is None or not pool.ready:
            code, detail = ErrorCode.NO_WORKER, _what_is_missing(request.spec.model, self._ledger)
        else:
            code, detail = ErrorCode.QUEUE_TIMEOUT, "The request waited too long for a free worker."
        self._close(request, On.TIMED_OUT, now, code, detail)

    # -------------------------------------------------------------------- the one end

    def _refuse(self, request: Request, refusal: Refusal, now: float) -> None:
        self._close(request, On.REJECTED, now, refusal.code, refusal.detail, retry_after_s=refusal.retry_after_s)

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
        request.move(on, now)
        for queue in self._queues():
            queue.remove(request)
        self._drop_leases(request, keep=failed)
        self._ledger.drop_hold(request.rid)
        del self._requests[request.rid]
        outcome = Outcome(on.value)
        record = request.record(outcome, error, detail)
        self._effects.append(Close(request.rid, outcome, record, error, detail, failed, retry_after_s))

    def _queues(self) -> tuple[WaitingQueue, WaitingQueue]:
        return self._planner.prefill_queue, self._planner.decode_queue


def _live_leases(request: Request) -> list[Lease]:
    return [lease for lease in (request.prefill_lease, request.decode_lease) if lease is not None]


def _what_is_missing(model: str, ledger: Ledger) -> str:
    """One sentence on why a model cannot be served; worker names only, no addresses."""
    down = [f"{w.spec.name} ({w.reason or 'draining'})" for w in ledger if not w.up or w.draining]
    return f"No worker can serve {model!r} now" + (f"; not usable: {', '.join(down)}." if down else ".")
