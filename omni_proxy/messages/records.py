"""What is told of a request: where its legs went and why, and when it was where. Pure, and compiled as `usual` is."""

from dataclasses import dataclass
from typing import Final, Optional, final

from omni_proxy.errors import ErrorCode
from omni_proxy.messages.words import Leg, Mark, Mode, Outcome, Stage

_FINISHED: Final = Stage.FINISHED


@final
@dataclass
class Placement:
    """Where a leg goes and why: the candidates with the load on which they were compared, best first."""

    worker: str
    leg: Leg
    reason: str
    candidates: tuple[tuple[str, float], ...]
    start_s: "Optional[float]"
    """In so many seconds from the decision the worker should begin with it."""
    finish_s: "Optional[float]"
    """And in so many it should have ended."""
    cached_tokens: "Optional[int]"
    """What the worker should find cached of it."""

    def __init__(
        self,
        worker: str,
        leg: Leg,
        reason: str,
        candidates: tuple[tuple[str, float], ...] = (),
        start_s: float | None = None,
        finish_s: float | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        self.worker = worker
        self.leg = leg
        self.reason = reason
        self.candidates = candidates
        self.start_s = start_s
        self.finish_s = finish_s
        self.cached_tokens = cached_tokens


@final
@dataclass
class Resume:
    """An answer lost its worker, and is continued elsewhere from so many of its tokens."""

    at: float
    worker: str
    tokens: int

    def __init__(self, at: float, worker: str, tokens: int) -> None:
        self.at = at
        self.worker = worker
        self.tokens = tokens


@final
@dataclass
class RequestRecord:
    """Everything worth telling of one request: source of timeline, metrics and access log.

    Instants are seconds of the core's clock. `marks` is in order of time; in parallel mode the stages of both legs
    are in it, and the leg that a stage belongs to follows from its name.
    """

    rid: str
    external_id: str
    model: str
    endpoint: str
    stream: bool
    mode: "Optional[Mode]"
    marks: tuple[Mark, ...]
    prefill_done_at: "Optional[float]"
    first_token_at: "Optional[float]"
    outcome: "Optional[Outcome]"
    error: "Optional[ErrorCode]"
    detail: str
    placements: tuple[Placement, ...]
    attempts: int
    prompt_tokens: int
    cached_tokens: "Optional[int]"
    completion_tokens: "Optional[int]"
    tenant: str
    predicted_tokens: "Optional[int]"
    """Of the last prompt that was sent to be computed: what its worker was expected to have cached."""
    predicted_first_at: "Optional[float]"
    """When the first token should have come, as predicted when the prompt was sent to be computed."""
    resumes: tuple[Resume, ...]
    ttft_target_s: "Optional[float]"
    """In so many seconds its first token should have come, as its client or the config says; None: nobody does."""
    encode_s: "Optional[float]"

    def __init__(
        self,
        rid: str,
        external_id: str,
        model: str,
        endpoint: str,
        stream: bool,
        mode: Mode | None,
        marks: tuple[Mark, ...],
        prefill_done_at: float | None,
        first_token_at: float | None,
        outcome: Outcome | None,
        error: ErrorCode | None,
        detail: str,
        placements: tuple[Placement, ...],
        attempts: int,
        prompt_tokens: int,
        cached_tokens: int | None,
        completion_tokens: int | None,
        tenant: str = "",
        predicted_tokens: int | None = None,
        predicted_first_at: float | None = None,
        resumes: tuple[Resume, ...] = (),
        ttft_target_s: float | None = None,
        encode_s: float | None = None,
    ) -> None:
        self.rid = rid
        self.external_id = external_id
        self.model = model
        self.endpoint = endpoint
        self.stream = stream
        self.mode = mode
        self.marks = marks
        self.prefill_done_at = prefill_done_at
        self.first_token_at = first_token_at
        self.outcome = outcome
        self.error = error
        self.detail = detail
        self.placements = placements
        self.attempts = attempts
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
        self.completion_tokens = completion_tokens
        self.tenant = tenant
        self.predicted_tokens = predicted_tokens
        self.predicted_first_at = predicted_first_at
        self.resumes = resumes
        self.ttft_target_s = ttft_target_s
        self.encode_s = encode_s

    @property
    def arrived_at(self) -> float:
        return self.marks[0][1]

    @property
    def ended_at(self) -> float | None:
        stage, at, _ = self.marks[-1]
        return at if stage is _FINISHED else None
