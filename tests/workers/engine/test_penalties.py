"""Biases, penalties and the floor of likelihood: against transformers' processors, and through the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from omni_proxy.workers.engine.penalties import Said, shaped
from omni_proxy.workers.engine.types import InvalidRequest, SamplingParams
from tests.workers.engine.helpers import generate, greedy, prompt, request, running

TOKENS = (3, 5, 3, 9, 9, 9, 7)
SAID = Said(TOKENS, 3)


def one(logits: torch.Tensor, **params: Any) -> torch.Tensor:
    return shaped(logits.unsqueeze(0), [SamplingParams(8, **params)], [SAID])[0]


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(20, generator=torch.Generator().manual_seed(0))


def test_repetition_counts_the_prompt_too(logits: torch.Tensor) -> None:
    want = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([TOKENS]), logits.unsqueeze(0))[0]
    torch.testing.assert_close(one(logits, repetition_penalty=1.7), want)


def test_presence_and_frequency_count_the_answer(logits: torch.Tensor) -> None:
    got = one(logits, presence_penalty=0.5, frequency_penalty=0.25)
    want = logits.clone()
    want[9] -= 0.5 + 3 * 0.25
    want[7] -= 0.5 + 0.25
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_min_p_keeps_what_is_likely_enough(logits: torch.Tensor, temperature: float) -> None:
    got = one(logits, min_p=0.3, temperature=temperature)
    ids: Any = torch.tensor([[0]])
    want = MinPLogitsWarper(0.3)(ids, (logits / temperature).unsqueeze(0))[0]
    assert got.isinf().equal(want.isinf())
    assert 0 < got.isinf().sum() < 20


def test_biases_are_added(logits: torch.Tensor) -> None:
    got = one(logits, logit_bias=((4, 2.0), (6, -100.0)))
    assert (got - logits).nonzero().flatten().tolist() == [4, 6]


def test_rows_that_want_nothing_are_left_alone(logits: torch.Tensor) -> None:
    rows = torch.stack((logits, logits))
    assert shaped(rows, [SamplingParams(8)] * 2, [SAID] * 2) is rows
    got = shaped(rows, [SamplingParams(8), SamplingParams(8, presence_penalty=1.0)], [SAID] * 2)
    assert got[0].equal(logits)
    assert not got[1].equal(logits)


def test_an_engine_says_nothing_twice(tied: Path) -> None:
    tokens = prompt(20)
    with running(tied) as engine:
        plain = generate(engine, "plain", tokens, 30)
        assert len(set(plain)) < 30
        once = generate(engine, "once", tokens, 30, sampling=greedy(30, presence_penalty=1000.0))
        assert len(set(once)) == 30
        assert once[0] == plain[0]
        forced = greedy(5, logit_bias=((11, 1000.0),))
        assert generate(engine, "forced", tokens, 5, sampling=forced) == [11] * 5


@pytest.mark.parametrize(
    ("field", "value"),
    [("min_p", 2.0), ("repetition_penalty", 0.0), ("presence_penalty", float("nan")), ("logit_bias", ((999, 1.0),))],
)
def test_impossible_values_are_refused(tied: Path, field: str, value: Any) -> None:
    with running(tied) as engine, pytest.raises(InvalidRequest, match=field):
        engine.submit(request("r", (1, 2), sampling=greedy(1, **{field: value})), lambda _: None)
