"""One live request: where it is, what it holds, what has happened to it. Pure.

Only the core changes a request, and its stages only through `move` and `move_prefill`.
"""

from __future__ import annotations

from collections.abc import Mapping

from omni_proxy.errors import ErrorCode
from omni_proxy.lifecycle.enums import DECODE_WAITING, RECEIVED
from omni_proxy.lifecycle.stages import On, advance
from omni_proxy.messages import (
    Lease,
    Leg,
    Mark,
    Mode,
    Outcome,
    Placement,
    RequestRecord,
    RequestSpec,
    Resume,
    Stage,
    Usage,
)


class Request:
    """The state of a request between `Arrived` and `Close`.

    `stage` is the track that ends the request. In parallel mode `prefill_stage` is the second track, None before the
    fork and after P has answered.
    """

    __slots__ = (
        "alone",
        "answering",
        "arrived_at",
        "attempt",
        "avoid",
        "best_cached",
        "block_keys",
        "cached",
        "cached_tokens",
        "completion_tokens",
        "decode_lease",
        "first_token_at",
        "handoff_freed_at",
        "handoff_from",
        "handoff_until",
        "marks",
        "matched_at",
        "mode",
        "model",
        "placements",
        "predicted_first_at",
        "predicted_tokens",
        "prefill_done_at",
        "prefill_lease",
        "prefill_stage",
        "prompt_tokens",
        "queued_at",
        "resumed_tokens",
        "resumes",
        "retries",
        "rid",
        "spec",
        "stage",
        "ttft_target_s",
        "work_s",
    )

    def __init__(self, rid: str, spec: RequestSpec, now: float) -> None:
        self.rid = rid
        self.spec = spec
        self.model = spec.model
        self.arrived_at = now
        self.stage = RECEIVED
        self.prefill_stage: Stage | None = None
        self.mode: Mode | None = None
        self.alone = spec.whole
        """One worker does both legs, whatever the pool's mode is."""
        self.attempt = 0
        self.retries = 0
        self.avoid: frozenset[str] = frozenset()
        self.prefill_lease: Lease | None = None
        self.decode_lease: Lease | None = None
        self.handoff_from: str | None = None
        """The P whose KV this request may pull; None: no handoff is waiting."""
        self.handoff_until: float | None = None
        """From this instant on that KV must not be asked for; None: it is not known when P frees it."""
        self.handoff_freed_at: float | None = None
        """When P frees it, if nobody comes."""
        self.prompt_tokens = spec.prompt_tokens
        self.block_keys: tuple[int, ...] = ()
        self.cached: Mapping[str, int] = {}
        """What each worker has cached of the prompt, in tokens, when that was last looked up."""
        self.best_cached = 0
        """The most that any of them has."""
        self.matched_at = now
        """When that was."""
        self.queued_at = now
        """When it lined up first."""
        self.ttft_target_s = spec.ttft_target_s
        """In so many seconds its first token should come: its own target, or that of its class; None: nobody says."""
        self.work_s = 0.0
        """For so long the prefill workers together should be busy with its prompt, as it looked when it lined up."""
        self.predicted_tokens: int | None = None
        """What the worker that computes the prompt should find cached."""
        self.predicted_first_at: float | None = None
        """When its first token should come, as predicted when its prompt was sent to be computed."""
        self.cached_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.marks: list[Mark] = [(RECEIVED, now, 0)]
        self.prefill_done_at: float | None = None
        self.first_token_at: float | None = None
        self.answering = False
        """Has the running attempt shown a part of the answer?"""
        self.resumes: list[Resume] = []
        self.resumed_tokens = 0
        """Tokens at the end of the prompt that are the answer's own, shown by workers that were lost."""
        self.placements: list[Placement] = []

    def move(self, on: On, now: float) -> None:
        """Advance the track that ends the request. Raises IllegalTransition and then changes nothing."""
        self.stage = stage = advance(self.stage, on)
        self.marks.append((stage, now, self.attempt))

    def move_prefill(self, on: On, now: float) -> None:
        """Advance the prefill track of a parallel request."""
        assert self.prefill_stage is not None
        self.prefill_stage = stage = advance(self.prefill_stage, on)
        self.marks.append((stage, now, self.attempt))

    def fork(self, now: float) -> None:
        """Begin the second track: P goes on from its queue, the main track waits for D from here on."""
        self.prefill_stage = self.stage
        self.stage = DECODE_WAITING
        self.marks.append((DECODE_WAITING, now, self.attempt))

    def join(self) -> None:
        """P has answered; only the decode track is left."""
        self.prefill_stage = None

    def resume(self, worker: str, emitted_tokens: int, now: float) -> None:
        """The answer goes on elsewhere: what has been shown of it is part of the next attempt's prompt."""
        self.resumes.append(Resume(now, worker, emitted_tokens))
        self.prompt_tokens += emitted_tokens - self.resumed_tokens
        self.resumed_tokens = emitted_tokens
        self.answering = False

    def start_over(self) -> None:
        """Forget what earlier attempts computed and counted; the next one serves the request from its beginning.

        What was found cached of the prompt that the client sent stands once a part of the answer has been shown.
        """
        self.handoff_from = self.handoff_until = self.handoff_freed_at = None
        self.prefill_done_at = None
        if not self.resumes:
            self.cached_tokens = None
        self.predicted_tokens = None
        self.predicted_first_at = None
        self.completion_tokens = None

    def match(self, cached: Mapping[str, int], now: float) -> None:
        """Take over what workers have cached of the prompt by now."""
        self.cached = cached
        self.matched_at = now
        self.best_cached = min(max(cached.values()), self.prompt_tokens - 1) if cached else 0

    def uncached_on(self, worker: str) -> int:
        """Prompt tokens that a worker would have to compute; it always computes the last one."""
        return self.prompt_tokens - min(self.cached.get(worker, 0), max(self.prompt_tokens - 1, 0))

    def new_lease(self, worker: str, leg: Leg) -> Lease:
        """A lease that no earlier message can carry."""
        self.attempt += 1
        return Lease(self.rid, self.attempt, worker, leg)

    def learn(self, usage: Usage) -> None:
        """Take over what workers counted; the first to tell the cached tokens is P, and P's count stands."""
        if usage.prompt_tokens is not None and not self.resumes:
            self.prompt_tokens = usage.prompt_tokens
        if usage.completion_tokens is not None:
            self.completion_tokens = usage.completion_tokens
        if usage.cached_tokens is not None and self.cached_tokens is None:
            self.cached_tokens = usage.cached_tokens

    def record(self, outcome: Outcome | None, error: ErrorCode | None, detail: str) -> RequestRecord:
        """What there is to tell of this request by now."""
        spec = self.spec
        return RequestRecord(
            rid=self.rid,
            external_id=spec.external_id,
            model=self.model,
            endpoint=spec.endpoint,
            stream=spec.stream,
            mode=self.mode,
            marks=tuple(self.marks),
            prefill_done_at=self.prefill_done_at,
            first_token_at=self.first_token_at,
            outcome=outcome,
            error=error,
            detail=detail,
            placements=tuple(self.placements),
            attempts=self.attempt,
            prompt_tokens=self.prompt_tokens - self.resumed_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            tenant=spec.tenant,
            predicted_tokens=self.predicted_tokens,
            predicted_first_at=self.predicted_first_at,
            resumes=tuple(self.resumes),
            ttft_target_s=self.ttft_target_s,
            encode_s=spec.encode_s,
        )
