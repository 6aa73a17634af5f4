"""One request inside the engine: its tokens, its blocks and how far its KV is valid. Pure.

```
tokens   | prompt ............ | generated ... |
         0        kv_len                 len(tokens)
KV       | valid  | to be computed, at least one |
```
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from enum import Enum

from omni_proxy.workers.engine.blocks import Key, chain_key, root_key
from omni_proxy.workers.engine.types import EngineRequest, FinishReason, TokenLogprob


class Phase(Enum):
    """Where a sequence is. A preempted one is WAITING again."""

    WAITING = "waiting"
    PULLING = "pulling"
    """Holds blocks into which another worker's KV is being copied."""
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """State of one request. The planner moves it; nobody else writes to it."""

    __slots__ = (
        "_keys",
        "admissions",
        "admitted",
        "arrival",
        "block_size",
        "blocks",
        "cached_tokens",
        "kv_len",
        "phase",
        "prompt_len",
        "published",
        "pulled",
        "request",
        "scores",
        "seed",
        "tokens",
    )

    def __init__(self, request: EngineRequest, block_size: int, seed: int = 0) -> None:
        self.request = request
        self.block_size = block_size
        self.seed = seed
        """Of this request's draws: the client's seed, or one that the engine chose."""
        self.tokens = list(request.prompt_token_ids)
        self.prompt_len = len(self.tokens)
        self.phase = Phase.WAITING
        self.arrival = 0
        self.admitted = 0
        """Place of the last admission among all sequences' admissions."""
        self.admissions = 0
        """How often it was admitted: more than once after a preemption."""
        self.blocks: list[int] = []
        self.kv_len = 0
        self.published = 0
        """Leading blocks that were offered to the prefix cache."""
        self.pulled = False
        """The pull has ended, well or not: it is not tried again."""
        self.cached_tokens = 0
        """Prompt tokens that the first admission found in the cache, or that were pulled."""
        self.scores: list[TokenLogprob] = []
        """Log-probabilities of the prompt's tokens from the second on, as far as computed; filled by the runner."""
        self._keys: list[Key] = []

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def start(self) -> int:
        """First token to compute. The last token is always computed, as its logits are wanted."""
        last = len(self.tokens) - 1
        return last if last < self.kv_len else self.kv_len

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be drawn; 1 when decoding."""
        missing = len(self.tokens) - self.kv_len
        return missing if missing > 1 else 1

    @property
    def wants_pull(self) -> bool:
        return not self.pulled and (self.request.pull is not None or self.request.join is not None)

    @property
    def pulled_tokens(self) -> int:
        """Prompt tokens whose KV another worker gives."""
        pull = self.request.pull
        return self.prompt_len if pull is None else min(pull.num_tokens, self.prompt_len)

    @property
    def handoff_word(self) -> str:
        """How another worker's KV comes to this decode leg."""
        return "pull" if self.request.join is None else "push"

    @property
    def wants_scores(self) -> bool:
        """Log-probabilities of prompt tokens are still to be computed."""
        return self.request.prompt_logprobs is not None and len(self.scores) < self.prompt_len - 1

    @property
    def draws_plainly(self) -> bool:
        """Tokens after this one need nothing but logits and chance, and nobody waits for this one by itself."""
        request = self.request
        sampling = request.sampling
        return (
            self.num_generated >= max(1, sampling.min_tokens)
            and request.guide is None
            and request.room is None
            and sampling.logprobs is None
            and not sampling.shapes_logits
        )

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def keys(self, tokens: int) -> Seq[Key]:
        """Keys of the blocks that the first `tokens` tokens fill."""
        count = tokens // self.block_size
        while len(self._keys) < count:
            parent = self._keys[-1] if self._keys else root_key(self.request.cache_salt)
            first = len(self._keys) * self.block_size
            self._keys.append(chain_key(parent, self.tokens[first : first + self.block_size]))
        return self._keys[:count]

    def prompt_digest(self, tokens: int) -> str:
        """Names the first `tokens` prompt tokens and the salt: equal exactly when their KV is."""
        full = self.keys(tokens)
        parent = full[-1] if full else root_key(self.request.cache_salt)
        return chain_key(parent, self.tokens[len(full) * self.block_size : tokens]).hex()


def ending_tokens(seq: Sequence, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """Which tokens end the sequence."""
    sampling = seq.request.sampling
    open_ended = sampling.ignore_eos and seq.request.guide is None
    return sampling.stop_token_ids if open_ended else sampling.stop_token_ids | eos_token_ids


def finish_reason(seq: Sequence, eos_token_ids: frozenset[int], max_model_len: int) -> FinishReason | None:
    """Whether the last drawn token ends the sequence. A stop before `min_tokens` cannot be drawn."""
    sampling = seq.request.sampling
    if seq.tokens[-1] in ending_tokens(seq, eos_token_ids):
        return FinishReason.STOP
    if seq.num_generated >= sampling.max_tokens or len(seq.tokens) >= max_model_len:
        return FinishReason.LENGTH
    return None
