"""Draws follow the distribution asked for and depend on seed and position alone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from omni_proxy.workers.engine.sampler import Draw, sample, uniform
from omni_proxy.workers.engine.types import SamplingParams

PROBS = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
LOGITS = PROBS.log()


def draw(index: int = 0, seed: int = 1, forbidden: tuple[int, ...] = (), **sampling: Any) -> Draw:
    return Draw(SamplingParams(64, **sampling), seed, index, frozenset(forbidden))


def shares(count: int = 4000, **sampling: Any) -> dict[int, float]:
    """Share of each token in `count` draws."""
    draws = [draw(i, **sampling) for i in range(count)]
    drawn = sample(LOGITS.expand(count, -1), draws)
    return {token: n / count for token, n in Counter(d.token_id for d in drawn).items()}


def expect(got: dict[int, float], want: dict[int, float]) -> None:
    assert set(got) == set(want)
    for token, share in want.items():
        assert got[token] == pytest.approx(share, abs=0.03)


def test_uniforms_are_spread_and_repeatable() -> None:
    values = [uniform(3, i) for i in range(4000)]
    assert values == [uniform(3, i) for i in range(4000)]
    assert values != [uniform(4, i) for i in range(4000)]
    assert all(0 <= v < 1 for v in values)
    tenths = Counter(int(v * 10) for v in values)
    assert all(320 < tenths[t] < 480 for t in range(10))
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_temperature_zero_takes_the_largest() -> None:
    assert shares(3, temperature=0.0) == {1: 1.0}


def test_temperature_one_is_the_models_distribution() -> None:
    expect(shares(), dict(enumerate(PROBS.tolist())))


def test_temperature_sharpens() -> None:
    sharp = (PROBS**2 / (PROBS**2).sum()).tolist()
    expect(shares(temperature=0.5), dict(enumerate(sharp)))


def test_top_k_keeps_the_k_largest() -> None:
    expect(shares(top_k=2), {1: 0.4 / 0.65, 3: 0.25 / 0.65})
    assert shares(50, top_k=1) == {1: 1.0}
    assert set(shares(top_k=99)) == set(range(5))


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    expect(shares(top_p=0.6), {1: 0.4 / 0.65, 3: 0.25 / 0.65})
    assert shares(50, top_p=1e-9) == {1: 1.0}
    assert set(shares(top_p=0.9999999)) == set(range(5))


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    expect(shares(top_k=3, top_p=0.7), {1: 0.4 / 0.65, 3: 0.25 / 0.65})


def test_forbidden_tokens_are_not_drawn() -> None:
    assert sample(LOGITS[None], [draw(temperature=0.0, forbidden=(1,))])[0].token_id == 3
    drawn = sample(LOGITS.expand(300, -1), [draw(i, forbidden=(1, 3)) for i in range(300)])
    assert {d.token_id for d in drawn} == {0, 2, 4}


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    asked = [
        draw(0, temperature=0.0),
        draw(3, seed=9),
        draw(4, seed=9, top_k=5),
        draw(5, seed=2, top_p=0.5, temperature=1.7),
        draw(6, seed=9, logprobs=3),
        draw(7, forbidden=(3,)),
    ]
    together = sample(logits, asked)
    alone = [sample(logits[i : i + 1], [one])[0] for i, one in enumerate(asked)]
    assert [d.token_id for d in together] == [d.token_id for d in alone]


def test_logprobs_are_those_before_temperature_and_masks() -> None:
    asked = draw(temperature=0.0, forbidden=(1,), logprobs=3)
    logprob = sample(LOGITS[None], [asked])[0].logprob
    assert logprob is not None
    assert logprob.token_id == 3
    assert logprob.logprob == pytest.approx(PROBS[3].log().item())
    assert [token for token, _ in logprob.top] == [1, 3, 4]
    assert logprob.top[0][1] == pytest.approx(PROBS[1].log().item())


def test_logprobs_zero_reports_the_drawn_token_alone_and_none_nothing() -> None:
    both = sample(LOGITS.expand(2, -1), [draw(logprobs=0), draw()])
    assert both[0].logprob is not None
    assert both[0].logprob.top == ()
    assert both[1].logprob is None
