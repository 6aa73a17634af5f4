"""What work costs on a worker: the numbers of one engine on one kind of machine, and the arithmetic on them. Pure.

A step is one forward pass over a batch. Its time is

    step_s                                         whatever is in it
    + token_s · tokens + pair_s · pairs            prefill: computed tokens, and (query, key) pairs of attention
    + decode_s + seq_s · n + kv_s · kv             decode, where n sequences with kv tokens of context are in it

with pairs = Σ chunk · (context before it + chunk / 2). The same form as roofline arithmetic gives: compute for prefill,
weights and KV cache read from memory for decode.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct, structs

Cost = Annotated[float, Meta(ge=0)]
Size = Annotated[int, Meta(ge=1)]


class EngineModel(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of worker. Seconds, tokens and bytes as the names say."""

    about: str = ""
    """Which hardware and model this is, and where its numbers are from."""
    step_s: Cost
    token_s: Cost
    pair_s: Cost = 0.0
    decode_s: Cost
    seq_s: Cost = 0.0
    kv_s: Cost = 0.0
    max_batch_tokens: Size
    """Tokens in one step: longer prompts are computed in chunks."""
    max_prefill_seqs: Size
    """Sequences that a worker for prefill may run at once."""
    max_decode_seqs: Size
    """Sequences that a worker for decode, or for both, may run at once."""
    kv_capacity_tokens: Size
    max_model_len: Size
    kv_bytes_per_token: Cost
    link_bytes_per_s: Annotated[float, Meta(gt=0)]
    """Of one worker's network towards all others."""
    link_s: Cost = 0.0
    """Time of a KV transfer besides its bytes: handshake, descriptors, notification."""
    request_s: Cost = 0.0
    """From the arrival of a request at a worker until its engine knows it: HTTP, tokenizer, queue between processes."""
    first_token_s: Cost = 0.0
    """From the end of a step until its tokens leave the worker."""

    def slower(self, factor: float) -> EngineModel:
        """The same worker when all that it computes takes `factor` times as long."""
        costs = ("step_s", "token_s", "pair_s", "decode_s", "seq_s", "kv_s")
        return structs.replace(self, **{name: getattr(self, name) * factor for name in costs})

    def prefill_s(self, tokens: int, pairs: float) -> float:
        """Computing `tokens` of prompts in one step, without the step's own time."""
        return self.token_s * tokens + self.pair_s * pairs

    def decode_step_s(self, seqs: int, kv_tokens: int) -> float:
        """One token for each of `seqs` sequences, without the step's own time."""
        return self.decode_s + self.seq_s * seqs + self.kv_s * kv_tokens if seqs else 0.0

    def decode_run_s(self, steps: int, seqs: int, kv_tokens: int) -> float:
        """`steps` steps in a row of the same sequences, whose KV grows by one token each in every step."""
        grown = seqs * steps * (steps - 1) / 2
        one = self.step_s + self.decode_s + self.seq_s * seqs
        return steps * (one + self.kv_s * kv_tokens) + self.kv_s * grown

    def alone_s(self, tokens: int, context: int = 0) -> float:
        """Prefill of `tokens` behind `context` cached tokens on an idle worker."""
        steps = -(-tokens // self.max_batch_tokens)
        return steps * self.step_s + self.prefill_s(tokens, pairs(tokens, context))

    def transfer_s(self, tokens: int) -> float:
        """Time for which a transfer of so many tokens of KV occupies both links."""
        return self.kv_bytes_per_token * tokens / self.link_bytes_per_s


def pairs(tokens: int, context: int) -> float:
    """(query, key) pairs of causal attention of `tokens` behind `context`."""
    return tokens * (context + tokens / 2)
