"""The vocabulary shared by the engine's parts: what a request asks for and what comes out. Pure.

The HTTP server turns JSON into these, the engine turns these into tokens. Neither knows the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple, Protocol

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]

DEFAULT_LEASE_S: Final = 30.0
DEFAULT_PULL_TIMEOUT_S: Final = 5.0


class InvalidRequest(ValueError):
    """A request that can never be served; `field` names the argument at fault."""

    def __init__(self, field: str, detail: str) -> None:
        super().__init__(f"{field}: {detail}")
        self.field = field
        self.detail = detail


class RequestTooLong(InvalidRequest):
    """A prompt that does not fit the model's context or the KV cache, even when nothing else runs."""


class Guide(Protocol):
    """Which tokens an answer may go on with; one for each answer, used by the engine's thread."""

    def allowed(self) -> Any:
        """[vocab] bool array of the tokens that may come next; at least one."""
        ...

    def accept(self, token: int) -> None:
        """The answer goes on with this token."""
        ...


class FinishReason(Enum):
    """Why a request ended, in the words of the OpenAI API (the last three never reach a client as 200)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    ABANDONED = "abandoned"
    """Through no fault of its own: another worker, or another try from the prompt, may well answer it."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1.0 filter nothing."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    """Number of alternatives reported for each token; 0 reports the drawn token alone; None reports nothing."""
    min_p: float = 0.0
    """Least likelihood of a token, as a share of the likeliest one's."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, and what is added to their logits."""

    @property
    def counts_tokens(self) -> bool:
        """What was said before changes what is drawn."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def shapes_logits(self) -> bool:
        """The logits are changed before a token is drawn."""
        return self.counts_tokens or self.min_p > 0 or bool(self.logit_bias)


@dataclass(frozen=True, slots=True)
class PullFrom:
    """Where a decode worker finds the KV blocks of a prompt that a prefill worker has computed."""

    engine_id: str
    request_id: str
    host: str
    port: int
    block_ids: tuple[int, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class JoinRoom:
    """Where a decode worker meets the prefill worker that computes its prompt and pushes the KV meanwhile."""

    host: str
    port: int
    room: int


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to continue. `keep_kv` makes this a prefill leg, `pull` or `join` a decode leg; none means mixed."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    keep_kv: bool = False
    """Pin the prompt's blocks after the end until they are pulled or the lease ends."""
    room: int | None = None
    """Of a prefill leg: who joins this room gets the KV pushed while it is computed."""
    pull: PullFrom | None = None
    join: JoinRoom | None = None
    guide: Guide | None = field(default=None, compare=False)
    """The structure of the answer; it ends at an end token whatever `ignore_eos` and `min_tokens` say."""
    prompt_logprobs: int | None = None
    """As `SamplingParams.logprobs`, of the prompt's tokens: they are then all computed, none taken from the cache."""
    cache_salt: str = ""
    """Prompts share cached blocks only with prompts of the same salt."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a drawn token and of the most likely alternatives, most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None
    """1 for the most likely token; of prompt tokens only."""


@dataclass(frozen=True, slots=True)
class Handoff:
    """What a prefill leg leaves behind for the decode leg; the server writes it as `kv_transfer_params`."""

    engine_id: str
    request_id: str
    host: str
    port: int
    block_ids: tuple[int, ...]
    num_tokens: int
    cached_tokens: int
    expires_in_s: float


class Output(NamedTuple):
    """New tokens of one request after one engine step. The last one carries `finish_reason`."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    """Prompt tokens that were not computed here: found in the prefix cache, or (decode leg) pulled."""
    handoff: Handoff | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    """With the first tokens, if asked for: of each prompt token but the first."""
    queued_s: float = 0.0
    """With the first tokens: how long the request waited in the engine until it was admitted first."""


Emit = Callable[[Output], None]
"""Called from the engine's thread, once per step in which the request got tokens or ended; must not block."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One reading of the engine's gauges and counters (counters only rise)."""

    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    blocks_leased: int
    """Blocks pinned for a pull that has not come yet; included in `blocks_used`."""
    block_size: int
    block_bytes: int
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    prompt_tokens_pulled: int
    generation_tokens: int
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    kv_bytes_sent: int
    kv_bytes_received: int
    kv_transfers: int
    kv_transfer_failures: int
    kv_leases_expired: int
    pull_queries: int = 0
    """Prompt tokens whose KV was asked of another worker."""
    kv_pushes: int = 0
    """Prompts pushed, layer by layer, to the last piece."""
    kv_push_hidden_s: float = 0.0
    """Time with pieces on the way while their prompt was still being computed."""
    kv_push_exposed_s: float = 0.0
    """Time with pieces on the way after it was computed."""
    spec_drafts: int = 0
    """Drafts of speculative decoding."""
    spec_draft_tokens: int = 0
    """Their tokens."""
    spec_accepted_tokens: int = 0
    """Those that were what was drawn."""
    spec_accepted_places: tuple[int, ...] = ()
    """The same, by their place in the draft."""
    spec_guessed_tokens: int = 0
    """Tokens of drafts that the model's own head has made; the others' come from the text."""
    spec_guessed_accepted: int = 0
    requests_finished: Mapping[str, int] = field(default_factory=dict)
    """By FinishReason value."""
    expert_tokens: tuple[tuple[int, ...], ...] = ()
    """Tokens routed to [layer][expert] since start."""
    expert_imbalance: tuple[float, ...] = ()
    """Largest over mean rows per rank, for each MoE layer; empty without expert parallelism."""
    experts_copied: int = 0
    """Experts whose weights have been copied to another rank."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of one engine. `kv_cache_bytes` bounds the paged KV cache; the block count follows from it."""

    model: str
    role: str = "mixed"
    """prefill, decode or mixed: what it tells others; every role can do everything."""
    engine_id: str = "engine"
    block_size: int = 16
    kv_cache_bytes: int = 256 << 20
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    """None takes the model's own limit, or what the KV cache holds if that is less."""
    host: str = "127.0.0.1"
    """Where the side channel listens."""
    advertise_host: str | None = None
    """The address under which others reach `host`; None: the same."""
    side_channel_port: int = 0
    """TCP port from which KV blocks are pulled; 0 lets the system choose."""
    kv_events_port: int | None = None
    """TCP port on which changes of the prefix cache are published; 0 lets the system choose; None publishes none."""
    kv_lease_s: float = DEFAULT_LEASE_S
    kv_pull_timeout_s: float = DEFAULT_PULL_TIMEOUT_S
    """Silence from the prefill worker after which a pull has failed."""
    kv_load_failure_policy: str = "fail"
    """fail or recompute: what a decode leg does when its pull fails."""
    prefix_caching: bool = True
    dtype: str = "float32"
    quantization: str | None = None
    """int8 keeps the matrices in 8 bits, quantised at load; w8a8 also makes the rows that meet them whole numbers of 8
    bits; None keeps what the checkpoint holds."""
    threads: int | None = None
    speculation: str = "ngram"
    """ngram: what a text has said before is tried as what it says next; head: a draft head guesses too; or off."""
    draft_model: str | None = None
    """Folder of an EAGLE head for `speculation` head; None: the checkpoint's own."""
    speculative_tokens: int = 8
    """The longest draft."""
    burst_steps: int = 16
    """Most steps that one call takes while a batch only decodes; 1: each by itself."""
    expert_parallel: int = 1
    """Processes that share the experts; 1 keeps them all in this one."""
    expert_redundancy: int | None = None
    """Extra replicas per MoE layer, all ranks together; None gives each rank one more slot."""
    expert_window_steps: int = 256
    """Steps between two looks at where experts should be; 0 leaves them where they are."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What is known of an engine once its checkpoint is loaded; none of it changes afterwards."""

    model_type: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    block_size: int
    num_blocks: int
    block_bytes: int
    dtype: str
    side_channel_port: int
