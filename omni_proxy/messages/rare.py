"""What not every request brings: failures, members, caches, other gateways. Pure; structs, which do not compile."""

from __future__ import annotations

from msgspec import Struct

from omni_proxy.messages.usual import Lease, RequestSpec
from omni_proxy.messages.words import FailureKind, Mode, Role


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


class Tokenized(Struct, frozen=True, tag=True):
    """The prompt's tokens were counted; None: it cannot be tokenised, go on with the estimate."""

    rid: str
    prompt_tokens: int | None
    block_keys: tuple[int, ...] = ()


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


# --------------------------------------------------------------------------------------------- effects


class Tokenize(Struct, frozen=True, tag=True):
    """Count the prompt's tokens, off the event loop."""

    rid: str


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
