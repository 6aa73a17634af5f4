"""Logits -> drawn tokens. What a request draws depends on its seed and position, never on its neighbours.

Chance comes from a counter: draw number i of a seed is a hash of both (SplitMix64, Steele et al. 2014), mapped through
the inverse of the cumulative distribution. Preemption and batch composition therefore change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import omni_kernels as ops
from omni_proxy.workers.engine.penalties import NOTHING_SAID, Said, shaped
from omni_proxy.workers.engine.types import SamplingParams, TokenLogprob

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class Draw:
    """What one row of logits is drawn with. Nobody changes it; see `Chunk`."""

    sampling: SamplingParams
    seed: int
    index: int
    """Number of tokens that the request has drawn before."""
    forbidden: frozenset[int] = frozenset()
    """Token ids that must not be drawn (end tokens before `min_tokens`)."""
    allowed: NDArray[np.bool_] | None = None
    """[vocab] of the tokens that may be drawn (a structured answer); None: all."""
    said: Said = NOTHING_SAID
    """Prompt and answer so far, for penalties."""


class Drawn(NamedTuple):
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
    wanted = shaped(logits, [draw.sampling for draw in draws], [draw.said for draw in draws])
    tokens = _pick(_forbid(wanted, draws), draws)
    logprobs = _logprobs(logits, draws, tokens)
    return [Drawn(token, logprobs.get(i)) for i, token in enumerate(tokens)]


def _pick(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    params = [draw.sampling for draw in draws]
    if not any(p.temperature for p in params):
        greedy: list[int] = logits.numpy().argmax(-1).tolist()  # 20 times as fast as torch's here
        return greedy
    tokens: list[int] = ops.sample(
        logits,
        torch.tensor([p.temperature for p in params], dtype=torch.float64),
        torch.tensor([max(p.top_k, 0) for p in params]),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.tensor([uniform(draw.seed, draw.index) for draw in draws], dtype=torch.float64),
    ).tolist()
    return tokens


def uniforms(draws: Sequence[Draw], count: int) -> NDArray[np.float64]:
    """[count, n]: `uniform` of so many draws after one another, for each of `draws`."""
    seeds = np.array([_mix(draw.seed & _MASK) for draw in draws], np.uint64)
    first = np.array([draw.index + 1 for draw in draws], np.uint64)
    z = seeds + (first + np.arange(count, dtype=np.uint64)[:, None]) * np.uint64(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    drawn: NDArray[np.float64] = ((z ^ (z >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return drawn


def chances(draws: Sequence[Draw], tokens: int) -> ops.Chances | None:
    """How so many tokens of each row are drawn that ask for nothing but chance; None: all greedily."""
    params = [draw.sampling for draw in draws]
    if not any(p.temperature for p in params):
        return None
    return ops.Chances(
        torch.tensor([p.temperature for p in params], dtype=torch.float64),
        torch.tensor([max(p.top_k, 0) for p in params]),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.from_numpy(uniforms(draws, tokens)),
    )


def _forbid(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    if not any(draw.forbidden or draw.allowed is not None for draw in draws):
        return logits
    masked = logits.clone()
    for row, draw in zip(masked, draws, strict=True):
        if draw.forbidden:
            row[sorted(draw.forbidden)] = -torch.inf
        if draw.allowed is not None:
            row.masked_fill_(torch.from_numpy(~draw.allowed), -torch.inf)
    return masked


def score(logits: Tensor, tokens: Sequence[int], alternatives: int) -> list[TokenLogprob]:
    """Log-probabilities of given tokens, one for each row of `logits` [n, vocab]."""
    logprobs = torch.log_softmax(logits.float(), -1)
    chosen = logprobs.gather(-1, torch.tensor(tokens).unsqueeze(1))[:, 0].tolist()
    ranks = ((logprobs > logprobs.gather(-1, torch.tensor(tokens).unsqueeze(1))).sum(-1) + 1).tolist()
    values, ids = logprobs.topk(min(alternatives, logprobs.shape[1]), -1)
    top = [tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    return [TokenLogprob(*entry) for entry in zip(tokens, chosen, top, ranks, strict=True)]


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
