"""What the core hears and what it asks for: the closed unions `Event` and `Effect`. Pure.

Events are past tense, effects are imperative. Both are frozen msgspec structs: creation costs a tenth of a frozen
dataclass, and the same values travel between processes and into event logs without a second definition.
Nothing here knows HTTP, sockets or token bytes: those stay on the data road.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import final

from msgspec import Struct

from omni_proxy.errors import ErrorCode


class Stage(IntEnum):
    """The ten stages of a request, in the order of the timeline, the metrics and the access log."""

    RECEIVED = 0
    TOKENIZING = 1
    APC_MATCHING = 2
    PREFILL_WAITING = 3
    PREFILL_SCHEDULED = 4
    PREFILL_RUNNING = 5
    DECODE_WAITING = 6
    DECODE_SCHEDULED = 7
    DECODE_RUNNING = 8
    FINISHED = 9


class Outcome(StrEnum):
    """How a request ended; few values, because it is a metric label."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


class Role(StrEnum):
    """What a worker may be asked to do."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    ENCODE = "encode"
    """Turns images and sound into what P computes with; asked at the edge, before a request is scheduled."""


class Mode(StrEnum):
    """In which order the legs of a request run (design: the ten stages)."""

    SEQUENTIAL = "sequential"
    PARALLEL = "parallel"
    AGGREGATED = "aggregated"


class Leg(StrEnum):
    """The half of a request that a lease is for. An aggregated request has a decode leg only."""

    PREFILL = "prefill"
    DECODE = "decode"
    PREWARM = "prewarm"
    """Of no request: what a next turn will begin with, computed while a prefill worker idles."""


class FailureKind(StrEnum):
    """What went wrong on a leg, as far as the edge can tell."""

    CONNECT = "connect"
    """No connection, or a reused one that died before any response byte: nothing was processed."""
    CLOSED = "closed"
    """The worker closed the connection before its answer was whole."""
    TIMEOUT = "timeout"
    STATUS = "status"
    """A whole answer with an error status."""
    GARBAGE = "garbage"
    """An answer that is not HTTP, or not what the protocol promises."""
    GAVE_UP = "gave_up"
    """The worker ended the answer early and in good order: it needs the room (vLLM-Ascend: recomputed), or cannot go
    on through no fault of the request (the embedded engine: abandoned)."""
    LATE = "late"
    """Not sent: by the time there was a connection, what the leg was to pull might have been gone."""


class Lease(Struct, frozen=True):
    """A grant of one worker's capacity to one attempt of one request. Worker messages carry it back."""

    rid: str
    attempt: int
    """Counts the leases of the request; a plain sequential one gets two."""
    worker: str
    leg: Leg


class Usage(Struct, frozen=True):
    """Tokens as the workers counted them. None where a worker did not say."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class Failure(Struct, frozen=True):
    """Why a leg failed. `answered` says that the worker had begun its answer."""

    kind: FailureKind
    detail: str
    status: int | None = None
    answered: bool = False


class WorkerSpec(Struct, frozen=True):
    """One worker as the scheduler sees it. Limits are None where neither config nor worker names one."""

    name: str
    role: Role
    models: tuple[str, ...] = ()
    """Model names it serves; empty means any."""
    modes: tuple[Mode, ...] = (Mode.SEQUENTIAL, Mode.AGGREGATED)
    """What its connector can do."""
    group: str = ""
    """P hands KV only to D of the same group."""
    connector: str = ""
    """P hands KV only to D that speaks the same protocol."""
    max_seqs: int = 32
    max_batch_tokens: int = 32_000
    """Outstanding prompt tokens that a prefill worker may hold; not for workers that do both."""
    max_model_len: int | None = None
    kv_capacity_tokens: int | None = None
    handoff_reusable: bool = False
    """Another D may be tried with the same KV parameters after one failed before its first byte."""
    kv_lease_s: float | None = None
    """How long a prefill worker keeps KV that nobody pulls; None: nobody knows."""
    releases_kv: bool = False
    """It frees such KV when it is told that nobody will come."""
    weight: float = 1.0
    backup: bool = False
    """Gets work only where no other can."""
    slow_start_s: float = 0.0
    """How long it takes to come back to its full share after it was down or ejected."""
    max_fails: int | None = None
    """Failures within `fail_timeout_s` that eject it; None in either: as for all workers."""
    fail_timeout_s: float | None = None
    block_tokens: int | None = None
    """Tokens in a block of its KV cache."""
    endpoint: str = ""
    """The worker of the config whose data-parallel rank this is; empty where that is one engine."""
    engine: str = ""
    """What it says that it is."""


class RequestSpec(Struct, frozen=True):
    """What the core needs to know of a request; its body stays at the edge."""

    model: str
    endpoint: str
    prompt_tokens: int
    """An estimate until `Tokenized` brings the true count."""
    max_tokens: int | None = None
    stream: bool = False
    priority: int = 0
    tokenize: bool = False
    external_id: str = ""
    """The client's `x-request-id`, or ours."""
    tenant: str = ""
    whole: bool = False
    """One worker must do it all: several answers of one prompt, several prompts, or an answer about the prompt."""
    thinking: bool = False
    """The answer begins with thoughts; its length is predicted with those of its like."""
    session: str = ""
    """The client's `x-session-id`: its requests belong together."""
    ttft_target_s: float | None = None
    """In so many seconds after its arrival its first token should come."""
    encode_s: float | None = None
    """How long its images and sound were with encode workers, before it arrived; None: nothing was encoded."""


# ---------------------------------------------------------------------------------------------- events


@final
class Arrived(Struct, frozen=True, tag=True):
    """A valid request has been read whole."""

    rid: str
    spec: RequestSpec


class Tokenized(Struct, frozen=True, tag=True):
    """The prompt's tokens were counted; None: it cannot be tokenised, go on with the estimate."""

    rid: str
    prompt_tokens: int | None
    block_keys: tuple[int, ...] = ()


@final
class LegSent(Struct, frozen=True, tag=True):
    """The whole request of a leg was handed to the worker's connection."""

    lease: Lease


@final
class PrefillDone(Struct, frozen=True, tag=True):
    """P answered. `handoff`: D may take over; `ended`: the answer ended with P's own token."""

    lease: Lease
    handoff: bool
    ended: bool = False
    usage: Usage = Usage()


@final
class FirstToken(Struct, frozen=True, tag=True):
    """The first content token of the answer passed on its way to the client."""

    lease: Lease


@final
class DecodeDone(Struct, frozen=True, tag=True):
    """D's answer was relayed whole."""

    lease: Lease
    usage: Usage = Usage()


class LegFailed(Struct, frozen=True, tag=True):
    """A leg ended without its result."""

    lease: Lease
    failure: Failure


class DecodeBroke(Struct, frozen=True, tag=True):
    """D was lost when a part of its answer had been shown, and the front can have it continued from its tokens."""

    lease: Lease
    emitted_tokens: int
    """Tokens of the answer, counted from its beginning, with which the continuation's prompt ends."""
    failure: Failure


class Cancelled(Struct, frozen=True, tag=True):
    """The client left."""

    rid: str


class WorkerAdded(Struct, frozen=True, tag=True):
    """A worker is a member, but nobody has seen it answer yet."""

    worker: WorkerSpec


class WorkerUp(Struct, frozen=True, tag=True):
    """A worker can be used, also one that was draining, or its description changed."""

    worker: WorkerSpec


class WorkerDown(Struct, frozen=True, tag=True):
    """A worker cannot be used for now; legs that run on it end by their own failures."""

    name: str
    reason: str


class WorkerDraining(Struct, frozen=True, tag=True):
    """A worker takes no new work; old work ends."""

    name: str


class WorkerRemoved(Struct, frozen=True, tag=True):
    """A worker is no longer a member, and the KV that it held is gone."""

    name: str


class FrontLost(Struct, frozen=True, tag=True):
    """The front process that owned these requests died; their clients are gone with it."""

    rid_prefix: str
    """With its delimiter, or of a fixed length: no other front's prefix may begin with it."""


class Adopted(Struct, frozen=True, tag=True):
    """A request that a scheduler before this one had placed; its legs go on and its leases count again."""

    rid: str
    spec: RequestSpec
    prefill: Lease | None
    decode: Lease | None
    handoff_from: str | None = None
    first_token: bool = False


class BlocksStored(Struct, frozen=True, tag=True):
    """A worker's cache holds these blocks from now on."""

    worker: str
    rank: int
    """Of the data-parallel rank whose cache it is; 0 where a worker has one cache."""
    block_tokens: int
    keys: tuple[int, ...]
    """For each block the key of the prefix that ends with it (`apc.keys`)."""
    tier: int = 0
    """0 device, 1 CPU memory, 2 farther away (`apc.index.Tier`)."""


class BlocksRemoved(Struct, frozen=True, tag=True):
    """A worker's cache has lost these blocks."""

    worker: str
    rank: int
    keys: tuple[int, ...]
    tier: int = 0


class CacheCleared(Struct, frozen=True, tag=True):
    """A worker's cache is empty, or it is not known any more what is in it."""

    worker: str
    rank: int


class WorkerShare(Struct, frozen=True, array_like=True):
    """What other gateways have put on one worker, together."""

    worker: str
    seqs: int
    prefill_tokens: int
    kv_tokens: int
    busy_s: float
    """How long it should take for their prompts, from the instant of the event on."""


class OthersHeard(Struct, frozen=True, tag=True):
    """What the other gateways were last known to hold, whole: a worker that is not named has nothing of theirs."""

    gateways: int
    """So many others live; 0: this one is alone."""
    place: int = 0
    """Of this gateway among all of them, from 0 on."""
    turn_s: float = 0.0
    """How long it takes until one of them has heard of what another has done."""
    loads: tuple[WorkerShare, ...] = ()
    waiting: int = 0
    """Prompts that wait in them."""
    served: tuple[tuple[str, int], ...] = ()
    """Prompt tokens that tenants got through them since the last event."""
    homes: tuple[tuple[str, str], ...] = ()
    """Sessions that they placed since the last event, and the prefill worker of each."""
    distrusted: tuple[tuple[str, float], ...] = ()
    """Workers that most of them have ejected, and for how many seconds more."""


class Reconfigured(Struct, frozen=True, tag=True):
    """The operator wants other settings from now on; as plain values (`flow.settings`)."""

    settings: dict[str, object]


class Tick(Struct, frozen=True, tag=True):
    """The instant that `next_wakeup` named has come."""


Event = (
    Arrived
    | Tokenized
    | LegSent
    | PrefillDone
    | FirstToken
    | DecodeDone
    | LegFailed
    | DecodeBroke
    | Cancelled
    | WorkerAdded
    | WorkerUp
    | WorkerDown
    | WorkerDraining
    | WorkerRemoved
    | FrontLost
    | Adopted
    | OthersHeard
    | Reconfigured
    | Tick
    | BlocksStored
    | BlocksRemoved
    | CacheCleared
)


# --------------------------------------------------------------------------------------------- effects


class Placement(Struct, frozen=True):
    """Where a leg goes and why: the candidates with the load on which they were compared, best first."""

    worker: str
    leg: Leg
    reason: str
    candidates: tuple[tuple[str, float], ...] = ()
    start_s: float | None = None
    """In so many seconds from the decision the worker should begin with it."""
    finish_s: float | None = None
    """And in so many it should have ended."""
    cached_tokens: int | None = None
    """What the worker should find cached of it."""


Mark = tuple[Stage, float, int]
"""The stage, the instant at which a request entered it, and which of its attempts that was.

A request has eight or more, and each is looked at several times when it ends: to take a tuple apart costs a tenth of
what attributes do.
"""


class Resume(Struct, frozen=True, array_like=True):
    """An answer lost its worker, and is continued elsewhere from so many of its tokens."""

    at: float
    worker: str
    tokens: int


class RequestRecord(Struct, frozen=True):
    """Everything worth telling of one request: source of timeline, metrics and access log.

    Instants are seconds of the core's clock. `marks` is in order of time; in parallel mode the stages of both legs
    are in it, and the leg that a stage belongs to follows from its name.
    """

    rid: str
    external_id: str
    model: str
    endpoint: str
    stream: bool
    mode: Mode | None
    marks: tuple[Mark, ...]
    prefill_done_at: float | None
    first_token_at: float | None
    outcome: Outcome | None
    error: ErrorCode | None
    detail: str
    placements: tuple[Placement, ...]
    attempts: int
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int | None
    tenant: str = ""
    predicted_tokens: int | None = None
    """Of the last prompt that was sent to be computed: what its worker was expected to have cached."""
    predicted_first_at: float | None = None
    """When the first token should have come, as predicted when the prompt was sent to be computed."""
    resumes: tuple[Resume, ...] = ()
    ttft_target_s: float | None = None
    """In so many seconds its first token should have come, as its client or the config says; None: nobody does."""
    encode_s: float | None = None

    @property
    def arrived_at(self) -> float:
        return self.marks[0][1]

    @property
    def ended_at(self) -> float | None:
        stage, at, _ = self.marks[-1]
        return at if stage is Stage.FINISHED else None


class Tokenize(Struct, frozen=True, tag=True):
    """Count the prompt's tokens, off the event loop."""

    rid: str


@final
class StartPrefill(Struct, frozen=True, tag=True):
    """Send the P leg. `peer` is D's name where both run together (parallel)."""

    lease: Lease
    peer: str | None = None


@final
class StartDecode(Struct, frozen=True, tag=True):
    """Send the D leg. `peer` is P's name; None: this worker does both (aggregated)."""

    lease: Lease
    peer: str | None = None
    pull_until: float | None = None
    """The instant from which P may have given up the KV: the leg is not sent then. None: nobody knows of one."""


class Foresee(Struct, frozen=True, tag=True):
    """Render what the next turn of a conversation will begin with, and tell its `Tokenized`; before its `Close`."""

    rid: str


class Forget(Struct, frozen=True, tag=True):
    """What was foreseen of this conversation is not needed any more."""

    rid: str


class Prewarm(Struct, frozen=True, tag=True):
    """Have a worker compute what was foreseen, as the least of its work; tell `PrefillDone` or `LegFailed`."""

    lease: Lease


class Abort(Struct, frozen=True, tag=True):
    """End a leg that is not needed any more; its messages are stale from now on."""

    lease: Lease


@final
class Close(Struct, frozen=True, tag=True):
    """The request has ended; all its leases are home. Sent exactly once for each request.

    `failure` names the worker's answer that the client should see, where one decided the end.
    """

    rid: str
    outcome: Outcome
    record: RequestRecord
    error: ErrorCode | None = None
    detail: str = ""
    failed: Lease | None = None
    retry_after_s: float | None = None


Effect = Tokenize | StartPrefill | StartDecode | Abort | Close | Foresee | Forget | Prewarm
