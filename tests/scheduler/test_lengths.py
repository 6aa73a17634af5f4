"""Lengths of answers, learned online."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.scheduler.lengths import PRIOR_TOKENS, Lengths


def test_quantiles_and_mean_come_near_the_truth() -> None:
    lengths, rng = Lengths(), Random(1)
    seen = sorted(int(rng.lognormvariate(5, 1)) + 1 for _ in range(4000))
    shuffled = seen[:]
    rng.shuffle(shuffled)
    for tokens in shuffled:
        lengths.ended("m", tokens)
    for share in (0.25, 0.5, 0.75, 0.9):
        assert lengths.quantile("m", share) == pytest.approx(seen[int(share * len(seen))], rel=0.35)
    assert lengths.expected("m", None) == pytest.approx(sum(seen) / len(seen), rel=0.4)


def test_models_are_apart_and_the_clients_limit_counts() -> None:
    lengths = Lengths()
    for _ in range(200):
        lengths.ended("short", 10)
    assert lengths.expected("short", None) == 10
    assert lengths.expected("other", None) == PRIOR_TOKENS
    assert lengths.expected("other", 7) == 7


def test_an_answer_is_longer_than_what_it_has_made() -> None:
    lengths = Lengths()
    assert lengths.expected("m", None, made=1000) > 1000
    assert lengths.expected("m", 1001, made=1000) == 1001


@given(st.lists(st.integers(0, 10**7), max_size=100))
def test_quantiles_are_in_order(rows: list[int]) -> None:
    lengths = Lengths()
    for tokens in rows:
        lengths.ended("m", tokens)
    found = [lengths.quantile("m", share) for share in (0.1, 0.25, 0.5, 0.6, 0.75, 0.9, 0.99)]
    assert found == sorted(found)
    assert found[0] > 0


def test_models_are_bounded() -> None:
    lengths = Lengths()
    for n in range(3000):
        lengths.ended(str(n), 5)
    assert len(lengths._models) <= 1000
