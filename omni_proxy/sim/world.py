"""The discrete-event world: the live core, simulated workers, a workload, and a clock that jumps. Pure.

The second loop around `Core.handle` and `Core.next_wakeup`; the first is `driver.py`. What the edge does on sockets is
done here by instants on one heap: an effect becomes work on an engine, an engine's notice an event for the core.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Final, assert_never

from omni_proxy.messages import (
    Abort,
    Arrived,
    BlocksRemoved,
    BlocksStored,
    Close,
    DecodeBroke,
    DecodeDone,
    Effect,
    Event,
    Failure,
    FailureKind,
    FirstToken,
    Foresee,
    Forget,
    Lease,
    Leg,
    LegFailed,
    LegSent,
    PrefillDone,
    Prewarm,
    StartDecode,
    StartPrefill,
    Tick,
    Tokenize,
    Tokenized,
    Usage,
    WorkerUp,
)
from omni_proxy.sim.cluster import SimWorker, with_blocks
from omni_proxy.sim.deaths import Deaths
from omni_proxy.sim.engine import Engine
from omni_proxy.sim.exact_index import ExactIndex
from omni_proxy.sim.job import Job
from omni_proxy.sim.legs import Legs, SimLeg
from omni_proxy.sim.links import Links
from omni_proxy.sim.next_turns import NextTurns
from omni_proxy.sim.notices import Notice, Notices
from omni_proxy.sim.outages import OutagePlan
from omni_proxy.sim.run import CoreLike, Delays, Run
from omni_proxy.sim.workload import SimRequest, Workload

_NO_KV: Final = Failure(FailureKind.STATUS, "no KV", 500, answered=True)


MakeCore = Callable[[ExactIndex], CoreLike]
Observer = Callable[[float, Event, Sequence[Effect]], None]


class World:
    """One run. Every choice is determined by its arguments: the same give the same result."""

    def __init__(
        self,
        workload: Workload,
        workers: Sequence[SimWorker],
        make_core: MakeCore,
        delays: Delays | None = None,
        observers: Iterable[Observer] = (),
        samples: int = 300,
        outages: OutagePlan | None = None,
    ) -> None:
        self._delays = Delays() if delays is None else delays
        self._outages = OutagePlan() if outages is None else outages
        self._observers = tuple(observers)
        workers = [with_blocks(worker, workload.block_tokens) for worker in workers]
        self._index = ExactIndex([w.spec.name for w in workers], workload.block_tokens)
        self._engines = tuple(map(self._engine, workers, repeat(workload.block_tokens)))
        self._models = tuple(w.model for w in workers)
        self._places = {w.spec.name: place for place, w in enumerate(workers)}
        self._links = Links(self._models)
        self._core = make_core(self._index)
        self._run = Run(workload, tuple(workers), self._engines, outages=self._outages.outages)
        self._requests: dict[str, SimRequest] = {}
        self._followers: dict[int, list[int]] = {}
        self._ahead = NextTurns(workload)
        self._legs = Legs(workload.block_tokens)
        self._deaths = Deaths(self._outages, [w.spec for w in workers], self._at, self._tell, self._lose)
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        self._tick_at: float | None = None
        self._now = 0.0
        self._wakes = [-1.0 for _ in workers]
        self._sample_count = samples

    def run(self) -> Run:
        """Until every request has ended."""
        for worker in self._run.workers:
            self._tell(WorkerUp(worker.spec), 0.0)
        self._schedule_arrivals()
        self._deaths.schedule()
        heap, now = self._heap, 0.0
        step = max(self._run.workload.span_s / self._sample_count, 0.001)
        next_sample = 0.0
        while heap and len(self._run.records) < len(self._run.workload.requests):
            now, _, action = heapq.heappop(heap)
            while now >= next_sample:
                self._run.sample(next_sample, *self._core.waiting())
                next_sample += step
            self._run.events += 1
            self._now = now
            action(now)
        self._run.ended_at = max((r.ended_at or 0.0 for r in self._run.records), default=0.0)
        return self._run

    # ----------------------------------------------------------------------- clock

    def _at(self, instant: float, action: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (instant, self._order, action))

    # --------------------------------------------------------------------- workload

    def _schedule_arrivals(self) -> None:
        for number, request in enumerate(self._run.workload.requests):
            if request.after is None:
                self._at(request.arrival_s, partial(self._arrive, number))
            else:
                self._followers.setdefault(request.after, []).append(number)

    def _arrive(self, number: int, now: float) -> None:
        request = self._run.workload.requests[number]
        rid = f"r{number:07d}"
        self._requests[rid] = request
        self._tell(Arrived(rid, request.spec(rid)), now)

    def _ended(self, close: Close, now: float) -> None:
        self._run.records.append(close.record)
        del self._requests[close.rid]
        held = self._legs.closed(close.rid)
        if held is not None:
            self._release(held, now)
        for number in self._followers.pop(int(close.rid[1:]), ()):
            self._at(now + self._run.workload.requests[number].arrival_s, partial(self._arrive, number))

    # ------------------------------------------------------------------------- core

    def _tell(self, event: Event, now: float) -> None:
        """Bring an event to the core, then carry its effects out; those may bring events at once, as live."""
        inbox: list[Event] = [event]
        for following in inbox:
            effects = self._core.handle(following, now)
            for observe in self._observers:
                observe(now, following, effects)
            for effect in effects:
                self._perform(effect, now, inbox)
        self._set_tick(now)

    def _set_tick(self, now: float) -> None:
        at = self._core.next_wakeup()
        if at is None or (self._tick_at is not None and self._tick_at <= at):
            return
        self._tick_at = at = max(at, now)
        self._at(at, self._tick)

    def _tick(self, now: float) -> None:
        if self._tick_at is None or now < self._tick_at:
            return  # an earlier instant was asked for since, and its tick has come
        self._tick_at = None
        if self._requests or self._ahead:
            self._tell(Tick(), now)

    def _perform(self, effect: Effect, now: float, inbox: list[Event]) -> None:
        match effect:
            case Tokenize(rid):
                tokens = self._requests[rid].prompt_tokens
                delay = self._delays.tokenize_s + self._delays.tokenize_token_s * tokens
                self._at(now + delay, partial(self._tokenized, rid))
            case StartPrefill(lease, _):
                self._start_prefill(lease, now)
                inbox.append(LegSent(lease))
            case StartDecode(lease, peer):
                leg = self._legs.decode(
                    lease, self._requests[lease.rid], self._places[lease.worker], pull=peer is not None
                )
                if leg is None:
                    inbox.append(LegFailed(lease, _NO_KV))
                else:
                    self._send(leg, now)
                    inbox.append(LegSent(lease))
            case Abort(lease):
                self._abort(lease, now)
                if lease.leg is Leg.PREWARM:
                    self._ahead.forget(lease.rid)
            case Foresee(rid):
                self._foresee(rid, now)
            case Forget(rid):
                self._ahead.forget(rid)
            case Prewarm(lease):
                self._prewarm(lease, now)
            case Close():
                self._ended(effect, now)
            case _:
                assert_never(effect)

    def _tokenized(self, rid: str, now: float) -> None:
        request = self._requests.get(rid)
        if request is not None:
            keys = request.unit_keys(self._run.workload.block_tokens)
            self._tell(Tokenized(rid, request.prompt_tokens, keys), now)

    # -------------------------------------------------------------- computed ahead

    def _foresee(self, rid: str, now: float) -> None:
        request = self._ahead.foresee(rid, int(rid[1:]))
        told = Tokenized(rid, request.prompt_tokens, request.unit_keys(self._run.workload.block_tokens))
        delay = self._delays.tokenize_s + self._delays.tokenize_token_s * request.prompt_tokens
        self._at(now + delay, partial(self._tell, told))

    def _prewarm(self, lease: Lease, now: float) -> None:
        self._send(self._legs.ahead(lease, self._ahead[lease.rid], self._places[lease.worker]), now)

    # ------------------------------------------------------------------------- legs

    def _start_prefill(self, lease: Lease, now: float) -> None:
        leg, before = self._legs.prefill(lease, self._requests[lease.rid], self._places[lease.worker])
        if before is not None:
            self._release(before, now)
        self._send(leg, now)

    def _send(self, leg: SimLeg, now: float) -> None:
        self._at(now + self._delays.network_s + self._models[leg.engine].request_s, partial(self._submit, leg))

    def _submit(self, leg: SimLeg, now: float) -> None:
        if leg not in self._legs:
            return  # aborted on its way
        engine = self._engines[leg.engine]
        if leg.engine in self._deaths:
            self._fail(leg, Failure(FailureKind.CONNECT, "connection refused"), now)
        elif not engine.can_ever_hold(leg.job):
            detail = "the request is larger than the KV cache"
            self._fail(leg, Failure(FailureKind.STATUS, detail, 400, answered=True), now)
        else:
            self._hear(leg.engine, engine.submit(leg.job, now), now)

    def _fail(self, leg: SimLeg, failure: Failure, now: float) -> None:
        self._legs.done(leg)
        self._tell(LegFailed(leg.lease, failure), now)

    def _abort(self, lease: Lease, now: float) -> None:
        leg = self._legs.aborted(lease)
        if leg is not None:
            self._hear(leg.engine, self._engines[leg.engine].abort(leg.job, now), now)

    def _release(self, leg: SimLeg, now: float) -> None:
        self._hear(leg.engine, self._engines[leg.engine].release(leg.job, now), now)

    # ---------------------------------------------------------------------- engines

    def _hear(self, place: int, notices: Notices, now: float) -> None:
        """Take in what an engine tells, and be there when it wants to go on."""
        for notice, job in notices:
            assert isinstance(job.tag, SimLeg)
            self._notice(notice, job.tag, now)
        wake = self._engines[place].wake_at
        if wake is not None and wake != self._wakes[place]:
            self._wakes[place] = wake
            self._at(wake, partial(self._advance, place))

    def _advance(self, place: int, now: float) -> None:
        engine = self._engines[place]
        if engine.wake_at is not None and now >= engine.wake_at:
            self._wakes[place] = -1.0
            self._hear(place, engine.advance(now), now)

    def _notice(self, notice: Notice, leg: SimLeg, now: float) -> None:
        out = now + self._delays.network_s + self._models[leg.engine].first_token_s
        match notice:
            case Notice.PULL:
                self._pull(leg, now)
            case Notice.PREFILLED:
                leg.prefilled = True
                self._at(out, partial(self._prefilled, leg))
                waiting = self._legs.waiting_for(leg)
                if waiting is not None:
                    self._transfer(waiting, leg, now)
            case Notice.FIRST:
                self._at(out, partial(self._tell_leg, leg, FirstToken(leg.lease)))
            case Notice.FINISHED:
                self._at(out, partial(self._finished, leg))
            case Notice.TOKEN:
                raise AssertionError("the world asked for no single tokens")
            case _:
                assert_never(notice)

    def _pull(self, leg: SimLeg, now: float) -> None:
        source = leg.source
        assert source is not None
        if source.lost:
            self._at(now + self._delays.network_s, partial(self._pull_failed, leg))
        elif source.prefilled:
            self._transfer(leg, source, now)
        else:
            self._legs.waits_for_push(leg)

    def _transfer(self, leg: SimLeg, source: SimLeg, now: float) -> None:
        """Move what D does not have yet."""
        tokens = leg.job.target - leg.job.cached_tokens
        there_at = self._links.arrives_at(source.engine, leg.engine, tokens, now)
        self._at(there_at, partial(self._pulled, leg, source))

    def _pulled(self, leg: SimLeg, source: SimLeg, now: float) -> None:
        if leg not in self._legs:
            return  # aborted; P keeps its KV for another D, or until the request ends
        if source.lost:
            self._pull_failed(leg, now)
            return
        self._legs.pulled(leg, source)
        self._release(source, now)
        self._hear(leg.engine, self._engines[leg.engine].pulled(leg.job, now), now)

    def _pull_failed(self, leg: SimLeg, now: float) -> None:
        """P died with the KV that D wanted."""
        if leg in self._legs:
            self._hear(leg.engine, self._engines[leg.engine].abort(leg.job, now), now)
            self._fail(leg, _NO_KV, now)

    # ----------------------------------------------------------------- workers that die

    def _lose(self, place: int, now: float) -> None:
        """A worker is gone with all that it had; those who talk to it notice at once."""
        self._index.clear(self._run.workers[place].spec.name)
        self._engines[place].die(now)
        self._wakes[place] = -1.0
        for leg in self._legs.lost_with(place):
            self._at(now + self._delays.network_s, partial(self._broke, leg))

    def _broke(self, leg: SimLeg, now: float) -> None:
        """The connection that carried a leg was closed."""
        failure = Failure(FailureKind.CLOSED, "the worker died", answered=leg.shown)
        if leg.lease.leg is Leg.PREWARM:
            self._ahead.forget(leg.lease.rid)
        elif leg.shown and self._outages.resume and leg.lease.rid in self._requests:
            self._tell(DecodeBroke(leg.lease, self._legs.goes_on(leg), failure), now)
            return
        self._tell(LegFailed(leg.lease, failure), now)

    # ------------------------------------------------------------- what workers answer

    def _tell_leg(self, leg: SimLeg, event: Event, now: float) -> None:
        if leg in self._legs:
            leg.shown = True
            self._tell(event, now)

    def _prefilled(self, leg: SimLeg, now: float) -> None:
        if leg in self._legs:
            self._legs.done(leg)
            if leg.lease.leg is Leg.PREWARM:
                self._ahead.forget(leg.lease.rid)
                self._release(leg, now)
            usage = Usage(leg.job.prompt_tokens, None, leg.job.cached_tokens)
            self._tell(PrefillDone(leg.lease, handoff=True, usage=usage), now)

    def _finished(self, leg: SimLeg, now: float) -> None:
        if leg not in self._legs:
            return
        self._legs.done(leg)
        job = leg.job
        before = self._legs.tokens_before(leg.lease.rid)
        cached = job.cached_tokens if leg.source is None else None
        self._tell(DecodeDone(leg.lease, Usage(job.prompt_tokens, before + job.generated, cached)), now)

    # ----------------------------------------------------------------------- KV events

    def _engine(self, worker: SimWorker, block_tokens: int) -> Engine:
        name = worker.spec.name

        def on_stored(job: Job, keys: list[int]) -> None:
            self._index.store(name, keys)
            self._later(BlocksStored(name, 0, block_tokens, tuple(keys)))

        def on_removed(keys: list[int]) -> None:
            self._index.remove(name, keys)
            self._later(BlocksRemoved(name, 0, tuple(keys)))

        return Engine(worker.model, worker.max_seqs, block_tokens, on_stored, on_removed)

    def _later(self, event: BlocksStored | BlocksRemoved) -> None:
        """KV events reach the gateway after their way through the network, in their order."""
        self._at(self._now + self._delays.kv_event_s, partial(self._tell, event))
