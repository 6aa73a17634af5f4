"""The core: hears events, decides, books, and says what is to be done. Pure.

`handle` is the only way in and the only place where shared state changes; `next_wakeup` says when it wants a `Tick`.
The live gateway and the simulator are two loops around these two calls. What is decided here is booked here, in the
same call: whoever carries the effects out may fail or be cancelled and can lose work, never corrupt state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final, assert_never

from omni_proxy.apc.index import PrefixIndex
from omni_proxy.errors import ErrorCode, Refusal
from omni_proxy.flow.adoption import adopted
from omni_proxy.flow.board import WAITING, Board
from omni_proxy.flow.failing import decode_broke, leg_failed
from omni_proxy.flow.handoffs import await_decode, drop_stale
from omni_proxy.flow.membership import members_changed, what_is_missing
from omni_proxy.flow.prewarming import PrewarmCounts, Prewarming
from omni_proxy.flow.settings import CoreSettings, settings_from
from omni_proxy.lifecycle.enums import (
    AGGREGATED,
    DECODE_LEG,
    ON_COMPLETED,
    ON_MATCH,
    ON_PREFILL_DONE,
    PARALLEL,
    PREFILL_LEG,
    PREWARM_LEG,
)
from omni_proxy.lifecycle.request import Request
from omni_proxy.lifecycle.stages import On
from omni_proxy.messages import (
    Adopted,
    Arrived,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    Cancelled,
    Close,
    DecodeBroke,
    DecodeDone,
    Effect,
    Event,
    FirstToken,
    FrontLost,
    Lease,
    LegFailed,
    LegSent,
    OthersHeard,
    PrefillDone,
    RareEvent,
    Reconfigured,
    RequestRecord,
    Stage,
    Tick,
    Tokenize,
    Tokenized,
    WorkerAdded,
    WorkerDown,
    WorkerDraining,
    WorkerRemoved,
    WorkerUp,
)
from omni_proxy.scheduler.instants import sooner
from omni_proxy.scheduler.load import WorkerLoad

__all__ = ["Core", "CoreSettings"]


class Core:
    """All live requests and all members, and the decisions about them."""

    def __init__(self, settings: CoreSettings, index: PrefixIndex | None = None) -> None:
        self._board = Board(settings, index)
        self.caches: Final = self._board.caches
        """What the members' caches hold, where prefixes are followed and nobody gave another index."""
        self._prewarming: Prewarming | None = None
        self._prewarm(settings)

    # --------------------------------------------------------------------- ways in

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event into account; return what is to be done, in order. `now`: seconds, monotonic."""
        board = self._board
        effects: list[Effect] = []
        board.effects = effects
        board.now = now
        drop_stale(board, now)
        # What every request brings, by the exact type: a class pattern costs a call for each that does not fit.
        if type(event) is LegSent:
            self._leg_sent(event.lease, now)
        elif type(event) is PrefillDone:
            if event.lease.leg is PREWARM_LEG:
                self._prewarmed(event, now)
            else:
                self._prefill_done(event, now)
        elif type(event) is Arrived:
            self._arrived(event, now)
        elif type(event) is DecodeDone:
            self._decode_done(event, now)
        elif type(event) is FirstToken:
            self._first_token(event.lease, now)
        else:
            self._happened(event, now)
        if self._prewarming is not None:
            self._review_prewarming(self._prewarming, effects, now)
        return effects

    def _happened(self, event: RareEvent, now: float) -> None:
        """What not every request brings."""
        board = self._board
        match event:
            case Tokenized():
                self._tokenized(event, now)
            case LegFailed(lease):
                if lease.leg is not PREWARM_LEG:
                    leg_failed(board, event, now)
                elif self._prewarming is not None:
                    self._prewarming.failed(lease)
            case DecodeBroke():
                decode_broke(board, event, now)
            case Cancelled(rid):
                self._cancelled(rid, now)
            case WorkerAdded() | WorkerUp() | WorkerDown() | WorkerDraining() | WorkerRemoved():
                members_changed(board, event, now)
            case FrontLost(prefix):
                self._front_lost(prefix, now)
            case Adopted():
                adopted(board, event, now)
            case OthersHeard():
                board.others_heard(event, now)
            case Reconfigured(fields):
                self._reconfigured(settings_from(fields), now)
            case Tick():
                self._tick(now)
            case BlocksStored() | BlocksRemoved() | CacheCleared():
                if board.learner is not None:
                    board.learner.heard(event)
            case _:
                assert_never(event)

    def next_wakeup(self) -> float | None:
        """The instant at which the core wants a `Tick`, or None."""
        prefill, decode = self._board.queues()
        freed = self._board.ledger.next_expiry()
        if self._prewarming is not None and (at := self._prewarming.next_wakeup()) is not None:
            freed = sooner(at, freed)
        if not (prefill.waits or decode.waits):
            return freed
        if self._board.walk_due is not None:
            return self._board.walk_due
        # A worker that is trusted again, or starts slowly, may take what waits, and no other event would say so.
        waits_until = sooner(prefill.next_deadline(), decode.next_deadline())
        return sooner(sooner(waits_until, self._board.planner.next_wakeup()), freed)

    # ------------------------------------------------------------------- questions

    def ready(self) -> bool:
        """Can some model be served from end to end right now?"""
        return self._board.pools.any_ready()

    def records(self) -> Iterator[RequestRecord]:
        """The live requests as they stand."""
        return (r.record(None, None, "") for r in self._board.requests.values())

    def live_count(self) -> int:
        """How many requests have not ended."""
        return len(self._board.requests)

    def workers(self) -> Iterator[WorkerLoad]:
        """The members with their load, by name; to be read only."""
        return iter(self._board.ledger)

    def waiting(self) -> tuple[int, int]:
        """Waiting requests and their prompt tokens."""
        return sum(len(q) for q in self._board.queues()), sum(q.tokens for q in self._board.queues())

    def prewarms(self) -> PrewarmCounts | None:
        """What was computed ahead and what became of it; None: nothing ever is."""
        return None if self._prewarming is None else self._prewarming.counts

    def check(self) -> None:
        """Raise AssertionError unless workers hold exactly what live requests hold."""
        if self._prewarming is not None:
            self._prewarming.check()
        self._board.check()

    # -------------------------------------------------------------- arrival to queue

    def _arrived(self, event: Arrived, now: float) -> None:
        board = self._board
        assert event.rid not in board.requests, f"request {event.rid} arrived twice"
        request = Request(event.rid, event.spec, now)
        request.ttft_target_s = board.planner.ttft_target_s(event.spec)
        board.requests[event.rid] = request
        refusal = board.settings.admission.refuse_arrival(request, board.pools, board.queues())
        if refusal is not None and board.walk_due is not None:
            board.walk(now)  # it may make room
            refusal = board.settings.admission.refuse_arrival(request, board.pools, board.queues())
        if refusal is not None:
            board.refuse(request, refusal, now)
        elif event.spec.tokenize:
            request.move(On.TOKENIZE, now)
            board.effects.append(Tokenize(event.rid))
        else:
            self._admit(request, now)

    def _tokenized(self, event: Tokenized, now: float) -> None:
        board = self._board
        request = board.requests.get(event.rid)
        if request is None and self._prewarming is not None:
            self._prewarming.foreseen(event, board.effects)
        if request is None or request.stage is not Stage.TOKENIZING:
            return
        if event.prompt_tokens is not None:
            request.prompt_tokens = event.prompt_tokens
            request.block_keys = event.block_keys
            refusal = board.settings.admission.refuse_length(request, board.pools)
            if refusal is not None:
                board.refuse(request, refusal, now)
                return
        self._admit(request, now)

    def _admit(self, request: Request, now: float) -> None:
        board = self._board
        if board.settings.prefix_aware:
            request.move(ON_MATCH, now)
            request.match(board.index.match(request.block_keys), now)
            if self._prewarming is not None:
                self._prewarming.came(request, board.effects)
        board.enqueue(request, now)
        board.plan(now, changed=False)
        if request.stage in WAITING:
            refusal = self._refuse_wait(request, now)
            if refusal is not None and board.walk_due is not None:
                board.walk(now)  # it may find a worker, or those before it may
                refusal = self._refuse_wait(request, now) if request.stage in WAITING else None
            if refusal is not None:
                board.refuse(request, refusal, now)

    def _refuse_wait(self, request: Request, now: float) -> Refusal | None:
        board = self._board
        admission = board.settings.admission
        refusal = admission.refuse_wait(request, board.queues())
        if refusal is None and request.spec.ttft_target_s is not None:
            refusal = admission.refuse_late(request, board.planner.first_token_at(request, now))
        return refusal

    # --------------------------------------------------------------- grants and legs

    def _leg_sent(self, lease: Lease, now: float) -> None:
        request = self._board.current(lease)
        if request is not None:
            self._board.runs(request, lease, now)

    def _prefill_done(self, event: PrefillDone, now: float) -> None:
        board = self._board
        request = board.current(event.lease)
        if request is None or event.lease.leg is not PREFILL_LEG:
            return
        board.runs(request, event.lease, now)
        worker = board.ledger.holder(event.lease)
        board.ledger.succeeded(worker)
        request.learn(event.usage)
        board.planner.learning.computed(request, event.lease, event.usage.cached_tokens, now)
        board.ledger.release(event.lease)
        request.prefill_lease = None
        request.prefill_done_at = now
        board.learn_answer(request, event.lease, event.usage, True, now)
        if request.mode is PARALLEL:
            request.join()
        elif event.ended:
            request.first_token_at = now
            board.close(request, ON_COMPLETED, now)
        elif not event.handoff:
            self._handoff_missed(request, now)
        elif not board.ledger.is_member(worker):
            board.start_over(request, now)
        else:
            await_decode(board, request, event.lease.worker, now)
        board.plan(now)

    def _handoff_missed(self, request: Request, now: float) -> None:
        """P gave nothing to pull: somebody who can do both starts anew, which costs time and is always right."""
        board = self._board
        pool = board.pools.of(request.model)
        if pool is None or not pool.can_alone:
            board.fail(request, ErrorCode.HANDOFF_MISSED, "The prefill worker gave no KV parameters.", now)
            return
        request.alone = True
        request.move(ON_PREFILL_DONE, now)
        board.line_up(request, now, now + board.settings.queue_timeout_s)

    def _first_token(self, lease: Lease, now: float) -> None:
        board = self._board
        request = board.current(lease)
        if request is None or lease.leg is not DECODE_LEG or request.answering:
            return
        request.answering = True
        if request.first_token_at is None:
            request.first_token_at = now
        board.planner.learning.computed(request, lease, None, now)
        board.planner.learning.answering(request, lease, now)
        board.ledger.prefilled(lease)
        board.ledger.drop_hold(request.rid)
        board.plan(now)

    def _decode_done(self, event: DecodeDone, now: float) -> None:
        board = self._board
        request = board.current(event.lease)
        if request is None or event.lease.leg is not DECODE_LEG:
            return
        board.runs(request, event.lease, now)
        board.ledger.succeeded(board.ledger.holder(event.lease))
        request.learn(event.usage)
        board.learn_answer(request, event.lease, event.usage, request.mode is AGGREGATED, now)
        board.planner.learning.answered(request, event.lease, now)
        request.decode_lease = None
        board.ledger.release(event.lease)
        if self._prewarming is not None:
            self._prewarming.ended(request, now, board.effects)
        board.close(request, ON_COMPLETED, now)
        board.plan(now)

    # ------------------------------------------------------------------ other events

    def _cancelled(self, rid: str, now: float) -> None:
        board = self._board
        request = board.requests.get(rid)
        if request is not None:
            board.close(request, On.CANCELLED, now, ErrorCode.CLIENT_GONE, "The client left.")
            board.plan(now)

    def _front_lost(self, prefix: str, now: float) -> None:
        board = self._board
        if self._prewarming is not None:
            self._prewarming.front_lost(prefix)
        for request in [r for rid, r in board.requests.items() if rid.startswith(prefix)]:
            board.close(request, On.CANCELLED, now, ErrorCode.CLIENT_GONE, "The front process of this client died.")
        board.plan(now)

    def _reconfigured(self, settings: CoreSettings, now: float) -> None:
        """Use other settings from now on; the mode and whether prefixes are followed stay."""
        board = self._board
        old = board.settings
        board.settings = replace(
            settings, schedule_mode=old.schedule_mode, prefix_aware=old.prefix_aware, seed=old.seed
        )
        board.ledger.blame(settings.max_fails, settings.fail_timeout_s)
        board.planner.configure(settings.scheduling)
        self._prewarm(settings)
        board.plan(now)

    # ------------------------------------------------------------ computing ahead

    def _prewarm(self, settings: CoreSettings) -> None:
        """Begin, go on with other settings, or end; ending takes back what runs by `Forget`."""
        board, wanted = self._board, settings.prewarm if self._board.settings.prefix_aware else None
        if self._prewarming is None:
            if wanted is not None:
                self._prewarming = Prewarming(wanted, board.ledger, board.index, board.learner)
        elif wanted is not None:
            self._prewarming.configure(wanted)
        else:
            self._prewarming.end(board.effects)
            self._prewarming = None

    def _prewarmed(self, event: PrefillDone, now: float) -> None:
        if self._prewarming is not None:
            self._prewarming.finished(event.lease, event.usage, now)

    def _review_prewarming(self, prewarming: Prewarming, effects: list[Effect], now: float) -> None:
        for effect in effects:
            if type(effect) is Close:
                prewarming.closed(effect.rid)
        prefill, _ = self._board.queues()
        prewarming.review(now, effects, bool(prefill.waits))

    def _tick(self, now: float) -> None:
        board = self._board
        freed = board.ledger.expire(now)
        for queue in board.queues():
            while (rid := queue.overdue(now)) is not None:
                self._give_up(board.requests[rid], now)
        board.plan(now, changed=freed)
        if board.walk_due is not None:
            board.walk(now)

    def _give_up(self, request: Request, now: float) -> None:
        board = self._board
        pool = board.pools.of(request.model)
        if pool is None or not pool.ready:
            code, detail = ErrorCode.NO_WORKER, what_is_missing(request.model, board.ledger)
        else:
            code, detail = ErrorCode.QUEUE_TIMEOUT, "The request waited too long for a free worker."
        board.close(request, On.TIMED_OUT, now, code, detail)
