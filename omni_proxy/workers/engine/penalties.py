"""What a request does to its logits before a draw: biases, penalties for what was said, a floor of likelihood.

As vLLM and OpenAI define them. Changes nothing, and copies nothing, where no row asks for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import log
from typing import Final, NamedTuple

import torch
from torch import Tensor

from omni_proxy.workers.engine.types import SamplingParams


class Said(NamedTuple):
    """What a request has said before a draw."""

    tokens: Sequence[int]
    """Prompt and answer."""
    prompt_len: int


NOTHING_SAID: Final = Said((), 0)


def shaped(logits: Tensor, params: Sequence[SamplingParams], said: Sequence[Said]) -> Tensor:
    """`logits` [n, vocab], changed as each row's request wants."""
    wanted = [i for i, p in enumerate(params) if p.shapes_logits]
    if not wanted:
        return logits
    logits = logits.clone()
    for i in wanted:
        _bias(logits[i], params[i])
        if params[i].counts_tokens:
            _penalise(logits[i], params[i], said[i])
        if params[i].min_p > 0 and params[i].temperature > 0:
            floor = logits[i].max() + params[i].temperature * log(params[i].min_p)
            logits[i].masked_fill_(logits[i] < floor, -torch.inf)
    return logits


def _bias(row: Tensor, params: SamplingParams) -> None:
    for token, bias in params.logit_bias:
        row[token] += bias


def _penalise(row: Tensor, params: SamplingParams, said: Said) -> None:
    """Repetition counts prompt and answer, presence and frequency the answer alone."""
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(said.tokens)))
        values = row[seen]
        row[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    counts = Counter(said.tokens[said.prompt_len :])
    if counts:
        ids, times = torch.tensor(list(counts)), torch.tensor(list(counts.values()), dtype=row.dtype)
        row[ids] -= times * params.frequency_penalty + params.presence_penalty
