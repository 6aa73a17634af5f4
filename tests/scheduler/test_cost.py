"""Costs that are learned: they come near the truth, are never negative, and nonsense does not move them."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.scheduler.cost import DecodeCost, PrefillCost, pairs

TRUTH = (0.008, 33e-6, 1.6e-9)


def took(uncached: int, cached: int, speed: float = 1.0) -> float:
    return (TRUTH[0] + TRUTH[1] * uncached + TRUTH[2] * pairs(uncached, cached)) / speed


def feed(cost: PrefillCost, rng: Random, count: int, speed: float = 1.0, noise: float = 0.05) -> None:
    for _ in range(count):
        uncached, cached = int(rng.lognormvariate(8, 1)) + 1, rng.randrange(20_000)
        seconds = took(uncached, cached, speed) * rng.uniform(1 - noise, 1 + noise)
        cost.observe(1, uncached, pairs(uncached, cached), seconds)


@pytest.mark.parametrize("speed", [1.0, 0.02, 10.0])
def test_prefill_cost_comes_near_the_truth(speed: float) -> None:
    cost = PrefillCost()
    feed(cost, Random(1), 100, speed)
    for uncached, cached in ((300, 0), (3000, 0), (3000, 20_000), (30_000, 0)):
        assert cost.seconds(uncached, cached) == pytest.approx(took(uncached, cached, speed), rel=0.15)
    assert cost.fit.error < 0.15


def test_the_prior_is_sane_and_the_first_prompts_correct_it() -> None:
    cost = PrefillCost()
    assert 0.05 < cost.seconds(4000, 0) < 2.0
    feed(cost, Random(2), 3, speed=0.1, noise=0.0)
    assert cost.seconds(4000, 0) == pytest.approx(took(4000, 0, 0.1), rel=0.3)


@pytest.mark.parametrize("tokens", [10, 200, 8000, 100_000])
@pytest.mark.parametrize("seconds", [0.0003, 0.003, 0.03, 0.3])
def test_work_that_is_always_the_same_is_learned(tokens: int, seconds: float) -> None:
    cost = PrefillCost()
    for _ in range(6):
        cost.observe(1, tokens, pairs(tokens, 0), seconds)
    assert cost.seconds(tokens, 0) == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("tokens", [262, 8218])
def test_work_that_is_always_the_same_stays_learned(tokens: int) -> None:
    cost, rng = PrefillCost(), Random(6)
    for n in range(5000):
        count, each = rng.choice((1, 1, 2, 3)), tokens + rng.randrange(3)
        took_s = count * 0.0003 * rng.lognormvariate(0, 0.6)
        cost.observe(count, count * each, count * pairs(each, 0), took_s)
        assert n < 20 or 0.0001 < cost.seconds(tokens, 0) < 0.001, n


def test_stalls_are_left_out() -> None:
    cost, rng = PrefillCost(), Random(3)
    feed(cost, rng, 50)
    before = cost.seconds(4000, 0)
    for _ in range(10):
        cost.observe(1, 4000, pairs(4000, 0), 8.0)
        feed(cost, rng, 5)
    assert cost.fit.rejected == 10
    assert cost.seconds(4000, 0) == pytest.approx(before, rel=0.05)


def test_a_worker_that_has_changed_is_learned_anew() -> None:
    cost, rng = PrefillCost(), Random(4)
    feed(cost, rng, 100)
    feed(cost, rng, 30, speed=0.2)
    assert cost.seconds(4000, 0) == pytest.approx(took(4000, 0, 0.2), rel=0.15)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e9])
def test_nonsense_teaches_nothing(seconds: float) -> None:
    cost = PrefillCost()
    before = cost.fit.weights
    assert not cost.observe(1, 100, 5000.0, seconds)
    assert not cost.observe(1, 100, float("nan"), 1.0)
    assert cost.fit.weights == before


@given(
    st.lists(
        st.tuples(st.integers(0, 200_000), st.integers(0, 200_000), st.floats(0, 1e5, allow_nan=False)), max_size=60
    )
)
def test_costs_are_never_negative_nor_lost(rows: list[tuple[int, int, float]]) -> None:
    cost = PrefillCost()
    for uncached, cached, seconds in rows:
        cost.observe(1, uncached, pairs(uncached, cached), seconds)
        assert all(0.0 <= w < float("inf") for w in cost.fit.weights)
        assert 0.0 <= cost.seconds(1000, 1000) < float("inf")


def test_decode_steps() -> None:
    cost, rng = DecodeCost(), Random(5)
    for _ in range(200):
        seqs, kv = rng.uniform(1, 100), rng.uniform(1e3, 1e6)
        cost.observe(seqs, kv, (0.015 + 0.23e-3 * seqs + 5e-9 * kv) * rng.uniform(0.97, 1.03))
    assert cost.step_s(64, 500_000) == pytest.approx(0.015 + 0.23e-3 * 64 + 5e-9 * 500_000, rel=0.05)
