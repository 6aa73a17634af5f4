"""The figures that are promised for 256 experts: max/mean rank load, mean over layers, at each cluster shape."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.placement.drift import MOST_MOVES, Result, run
from benchmarks.placement.drift import _policies as policies
from benchmarks.placement.loads import FAST, SLOW, Drift, windows, zipf_loads
from benchmarks.placement.redundancy import budgets
from omni_proxy.workers.engine.placement.place import Memory, Options, place
from omni_proxy.workers.engine.placement.public import public_placement
from omni_proxy.workers.engine.placement.score import bound_of, imbalance
from omni_proxy.workers.engine.placement.shares import Split
from omni_proxy.workers.engine.placement.topology import Topology

LAYERS = 58
EVEN, LEVEL = Split.EVEN, Split.PROPORTIONAL
FIXED, POOLED = Memory.FIXED, Memory.POOLED
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "extra", "exponent", "split", "memory", "most"),
    [
        (32, 32, 0.3, EVEN, FIXED, 1.005),
        (32, 32, 0.5, EVEN, FIXED, 1.005),
        (32, 32, 0.8, EVEN, FIXED, 1.005),
        (64, 64, 0.3, EVEN, FIXED, 1.005),
        (64, 64, 0.5, EVEN, FIXED, 1.005),
        (64, 64, 0.8, EVEN, FIXED, 1.005),
        (144, 32, 0.3, LEVEL, FIXED, 1.05),
        (144, 32, 0.3, LEVEL, POOLED, 1.05),
        (144, 32, 0.5, LEVEL, POOLED, 1.10),
        (144, 32, 0.8, LEVEL, POOLED, 1.50),
        (288, 320, 0.3, LEVEL, FIXED, 1.02),
        (288, 320, 0.5, LEVEL, FIXED, 1.02),
        (288, 320, 0.8, LEVEL, FIXED, 1.02),
    ],
)
def test_promised_balance(ranks: int, extra: int, exponent: float, split: Split, memory: Memory, most: float) -> None:
    loads = zipf_loads(exponent, LAYERS)
    placement = place(loads, Topology(ranks), Options(extra, split, memory))
    assert imbalance(placement, loads).mean() <= most
    assert placement.slots_used().max() <= LAYERS * (256 + extra) // ranks


@pytest.mark.parametrize("exponent", [0.3, 0.5, 0.8])
def test_one_slot_a_rank_is_at_the_lower_bound(exponent: float) -> None:
    loads = zipf_loads(exponent, LAYERS)
    placement = place(loads, Topology(288), Options(32))
    assert imbalance(placement, loads) == pytest.approx(bound_of(placement, loads), rel=1e-9)


@pytest.mark.parametrize(
    ("ranks", "extra", "exponent", "known"),
    [
        (144, 32, 0.3, 1.065),
        (144, 32, 0.5, 1.185),
        (144, 32, 0.8, 1.606),
        (288, 32, 0.3, 1.593),
        (288, 32, 0.5, 1.965),
        (288, 32, 0.8, 2.987),
    ],
)
def test_the_baseline_scores_what_is_known_of_the_published_algorithm(
    ranks: int, extra: int, exponent: float, known: float
) -> None:
    loads = zipf_loads(exponent, LAYERS)
    published = imbalance(public_placement(loads, Topology(ranks), extra), loads).mean()
    assert published == pytest.approx(known, rel=0.01)


@pytest.mark.parametrize("split", list(Split))
def test_half_the_redundancy_in_the_right_layers_keeps_nine_tenths_of_its_gain(split: Split) -> None:
    half = next(row for row in budgets(split, LAYERS) if row.fraction == 0.5)
    assert half.gain_kept >= 0.9


@pytest.mark.parametrize("exponent", [0.5, 0.8])
@pytest.mark.parametrize(("drift", "most"), [(SLOW, 1.12), (FAST, 1.25)])
def test_small_moves_follow_drift_at_a_fiftieth_of_the_traffic(drift: Drift, most: float, exponent: float) -> None:
    stream = list(windows(drift, exponent, 50, layers=3))
    small = _result(drift, stream, "small moves, proportional")
    anew = _result(drift, stream[:9], "published, every window")
    assert small.next_window <= most
    assert small.copied * 50 <= anew.copied
    assert small.copied <= MOST_MOVES


def _result(drift: Drift, stream: list[np.ndarray], name: str) -> Result:
    start, policy = policies(stream[0])[name]
    return run(drift, 0.8, name, stream, start, policy)
