"""Routers to compare the scheduler with: they choose on arrival and hold nothing back, as other gateways do. Pure.

Each answers the same two calls as the live core, so the same world runs it. They know the cached blocks of every worker
exactly and at once, which is more than a router that guesses from what it has sent. Not for service: no retries, no
limits, no faults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from omni_proxy.apc.index import PrefixIndex
from omni_proxy.messages import (
    Arrived,
    Close,
    DecodeDone,
    Effect,
    Event,
    FirstToken,
    Lease,
    Leg,
    LegFailed,
    LegSent,
    Mark,
    Mode,
    Outcome,
    Placement,
    PrefillDone,
    RequestRecord,
    RequestSpec,
    Role,
    Stage,
    StartDecode,
    StartPrefill,
    Tokenize,
    Tokenized,
    WorkerUp,
)


@dataclass(slots=True)
class RouterWorker:
    """A worker as a router sees it: what it was sent and has not answered."""

    name: str
    place: int
    requests: int = 0
    tokens: int = 0
    """Of their prompts, as far as the worker did not hold them."""
    last_used: int = 0


@dataclass(slots=True)
class _Routed:
    rid: str
    spec: RequestSpec
    marks: list[Mark]
    prompt_tokens: int = 0
    tokens: int = 0
    """What the leg under way counts for on its worker."""
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    prefill: str | None = None
    prefill_done_at: float | None = None
    first_token_at: float | None = None
    placements: list[Placement] = field(default_factory=list)


class Route(Protocol):
    """Chooses a worker for a prompt: `cached` is the part of it, in tokens, that each worker holds."""

    def __call__(
        self, workers: Sequence[RouterWorker], prompt_tokens: int, cached: Mapping[str, int]
    ) -> RouterWorker: ...


def least_requests(workers: Sequence[RouterWorker], prompt_tokens: int, cached: Mapping[str, int]) -> RouterWorker:
    """The worker with the fewest requests under way, the least recently used among equals."""
    return min(workers, key=lambda w: (w.requests, w.last_used, w.place))


def round_robin(workers: Sequence[RouterWorker], prompt_tokens: int, cached: Mapping[str, int]) -> RouterWorker:
    """Each in turn."""
    return min(workers, key=lambda w: (w.last_used, w.place))


MATCH_THRESHOLD: Final = 0.5
IMBALANCE_REQUESTS: Final = 32
IMBALANCE_FACTOR: Final = 1.1
"""The defaults with which cache-aware routers are shipped."""


def match_ratio(workers: Sequence[RouterWorker], prompt_tokens: int, cached: Mapping[str, int]) -> RouterWorker:
    """The worker that holds most of the prompt, if that is over half of it; else the least loaded.

    When the loads lie too far apart the cache does not count.
    """
    most, fewest = max(w.requests for w in workers), min(w.requests for w in workers)
    balanced = most - fewest <= IMBALANCE_REQUESTS or most <= IMBALANCE_FACTOR * fewest
    if balanced:
        best = max(workers, key=lambda w: (cached.get(w.name, 0), -w.requests, -w.last_used))
        if cached.get(best.name, 0) / prompt_tokens > MATCH_THRESHOLD:
            return best
    return least_requests(workers, prompt_tokens, cached)


def longest_match(workers: Sequence[RouterWorker], prompt_tokens: int, cached: Mapping[str, int]) -> RouterWorker:
    """The worker with the best mean of matched share and free share, weighed equally."""
    most = max(1, *(w.requests for w in workers))

    def score(worker: RouterWorker) -> tuple[float, int]:
        return cached.get(worker.name, 0) / prompt_tokens - worker.requests / most, -worker.last_used

    return max(workers, key=score)


def token_cost(workers: Sequence[RouterWorker], prompt_tokens: int, cached: Mapping[str, int]) -> RouterWorker:
    """The worker with the fewest prompt tokens to compute, this prompt's included."""
    return min(workers, key=lambda w: (w.tokens - cached.get(w.name, 0), w.requests, w.last_used, w.place))


BASELINES: Final[Mapping[str, Route]] = {
    "match-ratio": match_ratio,
    "match-and-load": longest_match,
    "token-cost": token_cost,
    "least-requests": least_requests,
    "round-robin": round_robin,
}


class RouterCore:
    """A router for P and D: P is chosen by `route` when the prompt is known, D by fewest requests after P's answer."""

    def __init__(self, route: Route, index: PrefixIndex) -> None:
        self._route = route
        self._index = index
        self._prefill: list[RouterWorker] = []
        self._decode: list[RouterWorker] = []
        self._by_name: dict[str, RouterWorker] = {}
        self._requests: dict[str, _Routed] = {}
        self._clock = 0

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event into account; return what is to be done."""
        match event:
            case WorkerUp(spec):
                self._add(spec.name, spec.role)
                return []
            case Arrived(rid, request_spec):
                self._requests[rid] = _Routed(rid, request_spec, [(Stage.RECEIVED, now, 0)])
                self._mark(rid, now, Stage.TOKENIZING)
                return [Tokenize(rid)]
            case Tokenized():
                return self._tokenized(event, now)
            case LegSent(lease):
                self._mark(lease.rid, now, Stage.PREFILL_RUNNING if lease.leg is Leg.PREFILL else Stage.DECODE_RUNNING)
                return []
            case PrefillDone():
                return self._prefill_done(event, now)
            case FirstToken(lease):
                self._requests[lease.rid].first_token_at = now
                return []
            case DecodeDone():
                return self._decode_done(event, now)
            case LegFailed(lease, failure):
                return self._end(lease, Outcome.FAILED, failure.detail, now)
            case _:
                return []

    def next_wakeup(self) -> float | None:
        """Routers have no timers."""
        return None

    def waiting(self) -> tuple[int, int]:
        """Nothing waits in a router."""
        return 0, 0

    # ------------------------------------------------------------------------ steps

    def _add(self, name: str, role: Role) -> None:
        worker = self._by_name[name] = RouterWorker(name, len(self._by_name))
        if role is not Role.DECODE:
            self._prefill.append(worker)
        if role is not Role.PREFILL:
            self._decode.append(worker)

    def _tokenized(self, event: Tokenized, now: float) -> list[Effect]:
        request = self._requests[event.rid]
        request.prompt_tokens = event.prompt_tokens or request.spec.prompt_tokens
        self._mark(event.rid, now, Stage.APC_MATCHING, Stage.PREFILL_WAITING, Stage.PREFILL_SCHEDULED)
        cached = self._index.match(event.block_keys)
        worker = self._route(self._prefill, request.prompt_tokens, cached)
        request.prefill = worker.name
        request.tokens = request.prompt_tokens - cached.get(worker.name, 0)
        return [StartPrefill(self._take(request, worker, Leg.PREFILL))]

    def _prefill_done(self, event: PrefillDone, now: float) -> list[Effect]:
        lease = event.lease
        request = self._requests[lease.rid]
        self._give(request, lease)
        request.prefill_done_at = now
        request.cached_tokens = event.usage.cached_tokens
        self._mark(lease.rid, now, Stage.DECODE_WAITING, Stage.DECODE_SCHEDULED)
        request.tokens = request.prompt_tokens
        worker = least_requests(self._decode, request.prompt_tokens, {})
        return [StartDecode(self._take(request, worker, Leg.DECODE), request.prefill)]

    def _decode_done(self, event: DecodeDone, now: float) -> list[Effect]:
        self._requests[event.lease.rid].completion_tokens = event.usage.completion_tokens
        return self._end(event.lease, Outcome.COMPLETED, "", now)

    def _end(self, lease: Lease, outcome: Outcome, detail: str, now: float) -> list[Effect]:
        request = self._requests.pop(lease.rid)
        self._give(request, lease)
        request.marks.append((Stage.FINISHED, now, lease.attempt))
        return [Close(lease.rid, outcome, _record(request, outcome, detail, lease.attempt), detail=detail)]

    # ------------------------------------------------------------------ bookkeeping

    def _mark(self, rid: str, now: float, *stages: Stage) -> None:
        request = self._requests[rid]
        request.marks += [(stage, now, len(request.placements)) for stage in stages]

    def _take(self, request: _Routed, worker: RouterWorker, leg: Leg) -> Lease:
        self._clock += 1
        worker.last_used = self._clock
        worker.requests += 1
        worker.tokens += request.tokens
        request.placements.append(Placement(worker.name, leg, "router"))
        return Lease(request.rid, len(request.placements), worker.name, leg)

    def _give(self, request: _Routed, lease: Lease) -> None:
        worker = self._by_name[lease.worker]
        worker.requests -= 1
        worker.tokens -= request.tokens


def _record(request: _Routed, outcome: Outcome, detail: str, attempts: int) -> RequestRecord:
    return RequestRecord(
        rid=request.rid,
        external_id=request.spec.external_id,
        model=request.spec.model,
        endpoint=request.spec.endpoint,
        stream=request.spec.stream,
        mode=Mode.SEQUENTIAL,
        marks=tuple(request.marks),
        prefill_done_at=request.prefill_done_at,
        first_token_at=request.first_token_at,
        outcome=outcome,
        error=None,
        detail=detail,
        placements=tuple(request.placements),
        attempts=attempts,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        completion_tokens=request.completion_tokens,
    )


def router(name: str) -> Callable[[PrefixIndex], RouterCore]:
    """Makes the router of that name."""
    route = BASELINES[name]
    return lambda index: RouterCore(route, index)
