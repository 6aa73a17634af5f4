"""The answers that one worker makes for us: how long its steps take, and what each answer teaches. Pure.

An answer that took 3 s for 100 tokens tells the mean of its steps. What the steps had in them meanwhile is kept as two
integrals over time, of sequences and of their tokens, so that their means over the same 3 s follow by subtraction; so
does for how long prompts held it up.
"""

from __future__ import annotations

from math import inf
from typing import Final

from omni_proxy.messages import Lease
from omni_proxy.scheduler.cost import DecodeCost

_LEAST_TOKENS: Final = 8
"""Shorter answers tell little of a step."""


class _Answer:
    __slots__ = ("begun", "kv_token_s", "kv_tokens", "paused_s", "seq_s")

    def __init__(self, begun: float, kv_tokens: int, seq_s: float, kv_token_s: float, paused_s: float) -> None:
        self.begun = begun
        self.kv_tokens = kv_tokens
        self.seq_s = seq_s
        self.kv_token_s = kv_token_s
        self.paused_s = paused_s


class Decoding:
    """Answers under way on one worker, from their first token on. Instants in seconds, monotonic."""

    __slots__ = (
        "_answers",
        "_at",
        "_kv_token_s",
        "_kv_tokens",
        "_other_kv_tokens",
        "_other_seqs",
        "_paused_s",
        "_seq_s",
        "cost",
    )

    def __init__(self, peers: DecodeCost | None = None) -> None:
        self.cost = DecodeCost(peers)
        self._answers: dict[Lease, _Answer] = {}
        self._kv_tokens = 0
        self._at = 0.0
        self._seq_s = 0.0
        self._kv_token_s = 0.0
        self._other_seqs = 0
        self._other_kv_tokens = 0
        self._paused_s = 0.0
        """For how long prompts have held up whatever was answered, ever."""

    def others(self, seqs: int, kv_tokens: int, now: float) -> None:
        """Other gateways have so many sequences in its steps."""
        self._advance(now)
        self._other_seqs, self._other_kv_tokens = seqs, kv_tokens

    def __len__(self) -> int:
        return len(self._answers)

    def begun(self, lease: Lease, kv_tokens: int, now: float) -> None:
        """The first token has come; `kv_tokens` is the context, with half of the expected answer."""
        self._advance(now)
        self._kv_tokens += kv_tokens
        self._answers[lease] = _Answer(now, kv_tokens, self._seq_s, self._kv_token_s, self._paused_s)

    def ended(self, lease: Lease, tokens: int | None, now: float) -> None:
        """An answer has ended: after `tokens`, or None where nobody counted or it did not end by itself."""
        answer = self._answers.get(lease)
        if answer is None:
            return
        self._advance(now)
        del self._answers[lease]
        self._kv_tokens -= answer.kv_tokens
        lasted = now - answer.begun
        made_s = lasted - (self._paused_s - answer.paused_s)
        if tokens is None or tokens < _LEAST_TOKENS or made_s <= 0:
            return
        seqs = (self._seq_s - answer.seq_s) / lasted
        kv_tokens = (self._kv_token_s - answer.kv_token_s) / lasted
        self.cost.observe(seqs, kv_tokens, made_s / (tokens - 1))

    def paused(self, seconds: float) -> None:
        """A prompt in the steps holds up all answers for so long."""
        self._paused_s += seconds

    def ahead_s(self, limit_s: float, step_s: float, now: float) -> float:
        """For how long steps of `step_s` may pause until an answer has taken more than `limit_s` for each token."""
        least_s = inf
        for answer in self._answers.values():
            lasted = now - answer.begun
            made_s = lasted - (self._paused_s - answer.paused_s)
            least_s = min(least_s, made_s / step_s * limit_s - lasted)
        return least_s

    def step_s(self, more_seqs: int = 0, more_kv_tokens: int = 0) -> float:
        """How long a step should take now, or with so much more in it; seconds."""
        return self.cost.step_s(
            len(self._answers) + self._other_seqs + more_seqs, self._kv_tokens + self._other_kv_tokens + more_kv_tokens
        )

    def _advance(self, now: float) -> None:
        past = now - self._at
        self._at = now
        self._seq_s += past * (len(self._answers) + self._other_seqs)
        self._kv_token_s += past * (self._kv_tokens + self._other_kv_tokens)
