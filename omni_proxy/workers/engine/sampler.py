"""Logits -> drawn tokens. What a request draws depends on its seed and position, never on its neighbours.

Chance comes from a counter: draw number i of a seed is a hash of both (SplitMix64, Steele et al. 2014), mapped through
the inverse of the cumulative distribution. Preemption and batch composition therefore change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from omni_proxy.workers.engine.types import SamplingParams, TokenLogprob

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Draw:
    """What one row of logits is drawn with."""

    sampling: SamplingParams
    seed: int
    index: int
    """Number of tokens that the request has drawn before."""
    forbidden: frozenset[int] = frozenset()
    """Token ids that must not be drawn (end tokens before `min_tokens`)."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token, with its log-probability if the request wants it."""

    token_id: int
    logprob: TokenLogprob | None = None


def uniform(seed: int, index: int) -> float:
    """Draw number `index` of `seed`, in [0, 1)."""
    z = (_mix(seed & _MASK) + (index + 1) * _GOLDEN) & _MASK
    return (_mix(z) >> 11) * 2.0**-53


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """Draw one token for each row of `logits` [n, vocab].

    Reported log-probabilities are those of the model's own distribution, before temperature and masks.
    """
    logits = logits.float()
    masked = _forbid(logits, draws)
    tokens = masked.argmax(-1).tolist()
    rows = [i for i, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if rows:
        picked = masked if len(rows) == len(draws) else masked[rows]
        for i, token in zip(rows, _sample_rows(picked, [draws[i] for i in rows]), strict=True):
            tokens[i] = token
    logprobs = _logprobs(logits, draws, tokens)
    return [Drawn(token, logprobs.get(i)) for i, token in enumerate(tokens)]


def _forbid(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    if not any(draw.forbidden for draw in draws):
        return logits
    masked = logits.clone()
    for row, draw in zip(masked, draws, strict=True):
        if draw.forbidden:
            row[sorted(draw.forbidden)] = -torch.inf
    return masked


def _sample_rows(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """Temperature, then top-k, then top-p over what is left, then the inverse of the cumulative distribution.

    The distribution is always walked in order of token ids, so that a neighbour's options change no draw.
    """
    params = [draw.sampling for draw in draws]
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64)
    probs = torch.softmax(logits.double() / temperature.unsqueeze(1), -1)
    if any(p.top_k > 0 or p.top_p < 1 for p in params):
        largest, order = torch.sort(probs, stable=True, dim=-1, descending=True)
        probs = torch.empty_like(probs).scatter_(-1, order, _truncate(largest, params))
    cumulative = probs.cumsum(-1)
    uniforms = torch.tensor([[uniform(d.seed, d.index)] for d in draws], dtype=torch.float64)
    picks = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    # A uniform just below 1 may land, by rounding, on or past the total: the last possible token then.
    last = (probs > 0).long().mul_(torch.arange(1, probs.shape[1] + 1)).argmax(-1, keepdim=True)
    return [int(pick) for pick in torch.minimum(picks, last)[:, 0].tolist()]


def _truncate(probs: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Zero what top-k and top-p leave out of rows `probs`, sorted from large to small.

    top-p keeps the fewest tokens whose share of what top-k left reaches it; the first always stays.
    """
    vocab = probs.shape[1]
    top_k = torch.tensor([[p.top_k if p.top_k > 0 else vocab] for p in params])
    top_p = torch.tensor([[p.top_p] for p in params], dtype=torch.float64)
    probs = probs.masked_fill(torch.arange(vocab) >= top_k, 0.0)
    before = probs.cumsum(-1) - probs
    enough = before >= top_p * probs.sum(-1, keepdim=True)
    enough &= top_p < 1
    enough[:, 0] = False
    return probs.masked_fill(enough, 0.0)


def _logprobs(logits: Tensor, draws: Sequence[Draw], tokens: Sequence[int]) -> dict[int, TokenLogprob]:
    rows = [i for i, draw in enumerate(draws) if draw.sampling.logprobs is not None]
    if not rows:
        return {}
    logprobs = torch.log_softmax(logits[rows], -1)
    chosen = logprobs.gather(-1, torch.tensor([[tokens[i]] for i in rows]))[:, 0].tolist()
    wanted = [draws[i].sampling.logprobs or 0 for i in rows]
    values, ids = logprobs.topk(min(max(wanted), logprobs.shape[1]), -1)
    result: dict[int, TokenLogprob] = {}
    for place, i in enumerate(rows):
        top = zip(ids[place].tolist(), values[place].tolist(), strict=True)
        result[i] = TokenLogprob(tokens[i], chosen[place], tuple(top)[: wanted[place]])
    return result
