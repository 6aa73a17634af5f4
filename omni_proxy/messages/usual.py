"""What every request brings: a handful of events and effects, and what they carry. Pure, and compiled.

A request has some fifteen of these, and each is read some fifteen times on its way: attributes of native classes cost
a tenth of a struct's, and are made at a third of the price. As dataclasses they compare, show themselves, and are
written by msgspec like structs (`wire`). Nobody changes one that has been made.

What mypyc keeps of an annotation is its class, or a string as it stands: hence the quotation marks.
"""

from dataclasses import dataclass
from typing import Final, Optional, final

from omni_proxy.errors import ErrorCode
from omni_proxy.messages.records import RequestRecord
from omni_proxy.messages.words import Leg, Outcome


@final
@dataclass
class Lease:
    """A grant of one worker's capacity to one attempt of one request. Worker messages carry it back."""

    rid: str
    attempt: int
    """Counts the leases of the request; a plain sequential one gets two."""
    worker: str
    leg: Leg

    def __init__(self, rid: str, attempt: int, worker: str, leg: Leg) -> None:
        self.rid = rid
        self.attempt = attempt
        self.worker = worker
        self.leg = leg

    def __hash__(self) -> int:
        return hash(self.rid)  # two of a request are rarely out: not worth arithmetic on large integers

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Lease)
            and self.attempt == other.attempt
            and self.rid == other.rid
            and self.leg is other.leg
            and self.worker == other.worker
        )


@final
@dataclass
class Usage:
    """Tokens as the workers counted them. None where a worker did not say."""

    prompt_tokens: "Optional[int]"
    completion_tokens: "Optional[int]"
    cached_tokens: "Optional[int]"

    def __init__(
        self, prompt_tokens: int | None = None, completion_tokens: int | None = None, cached_tokens: int | None = None
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens
        self.cached_tokens = cached_tokens


@final
@dataclass
class RequestSpec:
    """What the core needs to know of a request; its body stays at the edge."""

    model: str
    endpoint: str
    prompt_tokens: int
    """An estimate until `Tokenized` brings the true count."""
    max_tokens: "Optional[int]"
    stream: bool
    priority: int
    tokenize: bool
    external_id: str
    """The client's `x-request-id`, or ours."""
    tenant: str
    whole: bool
    """One worker must do it all: several answers of one prompt, several prompts, or an answer about the prompt."""
    thinking: bool
    """The answer begins with thoughts; its length is predicted with those of its like."""
    session: str
    """The client's `x-session-id`: its requests belong together."""
    ttft_target_s: "Optional[float]"
    """In so many seconds after its arrival its first token should come."""
    encode_s: "Optional[float]"
    """How long its images and sound were with encode workers, before it arrived; None: nothing was encoded."""

    def __init__(
        self,
        model: str,
        endpoint: str,
        prompt_tokens: int,
        max_tokens: int | None = None,
        stream: bool = False,
        priority: int = 0,
        tokenize: bool = False,
        external_id: str = "",
        tenant: str = "",
        whole: bool = False,
        thinking: bool = False,
        session: str = "",
        ttft_target_s: float | None = None,
        encode_s: float | None = None,
    ) -> None:
        self.model = model
        self.endpoint = endpoint
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.stream = stream
        self.priority = priority
        self.tokenize = tokenize
        self.external_id = external_id
        self.tenant = tenant
        self.whole = whole
        self.thinking = thinking
        self.session = session
        self.ttft_target_s = ttft_target_s
        self.encode_s = encode_s


NO_USAGE: Final = Usage()
"""No worker said anything."""


# ---------------------------------------------------------------------------------------------- events


@final
@dataclass
class Arrived:
    """A valid request has been read whole."""

    rid: str
    spec: RequestSpec

    def __init__(self, rid: str, spec: RequestSpec) -> None:
        self.rid = rid
        self.spec = spec


@final
@dataclass
class LegSent:
    """The whole request of a leg was handed to the worker's connection."""

    lease: Lease

    def __init__(self, lease: Lease) -> None:
        self.lease = lease


@final
@dataclass
class PrefillDone:
    """P answered. `handoff`: D may take over; `ended`: the answer ended with P's own token."""

    lease: Lease
    handoff: bool
    ended: bool
    usage: Usage

    def __init__(self, lease: Lease, handoff: bool, ended: bool = False, usage: Usage = NO_USAGE) -> None:
        self.lease = lease
        self.handoff = handoff
        self.ended = ended
        self.usage = usage


@final
@dataclass
class FirstToken:
    """The first content token of the answer passed on its way to the client."""

    lease: Lease

    def __init__(self, lease: Lease) -> None:
        self.lease = lease


@final
@dataclass
class DecodeDone:
    """D's answer was relayed whole."""

    lease: Lease
    usage: Usage

    def __init__(self, lease: Lease, usage: Usage = NO_USAGE) -> None:
        self.lease = lease
        self.usage = usage


# --------------------------------------------------------------------------------------------- effects


@final
@dataclass
class StartPrefill:
    """Send the P leg. `peer` is D's name where both run together (parallel)."""

    lease: Lease
    peer: "Optional[str]"

    def __init__(self, lease: Lease, peer: str | None = None) -> None:
        self.lease = lease
        self.peer = peer


@final
@dataclass
class StartDecode:
    """Send the D leg. `peer` is P's name; None: this worker does both (aggregated)."""

    lease: Lease
    peer: "Optional[str]"
    pull_until: "Optional[float]"
    """The instant from which P may have given up the KV: the leg is not sent then. None: nobody knows of one."""

    def __init__(self, lease: Lease, peer: str | None = None, pull_until: float | None = None) -> None:
        self.lease = lease
        self.peer = peer
        self.pull_until = pull_until


@final
@dataclass
class Close:
    """The request has ended; all its leases are home. Sent exactly once for each request.

    `failure` names the worker's answer that the client should see, where one decided the end.
    """

    rid: str
    outcome: Outcome
    record: RequestRecord
    error: "Optional[ErrorCode]"
    detail: str
    failed: "Optional[Lease]"
    retry_after_s: "Optional[float]"

    def __init__(
        self,
        rid: str,
        outcome: Outcome,
        record: RequestRecord,
        error: ErrorCode | None = None,
        detail: str = "",
        failed: Lease | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        self.rid = rid
        self.outcome = outcome
        self.record = record
        self.error = error
        self.detail = detail
        self.failed = failed
        self.retry_after_s = retry_after_s
