"""The parts on their own: copies, packing, shares, budgets, bounds, names of bins, forecast and controller."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.workers.engine.placement.bounds import lower_bound
from omni_proxy.workers.engine.placement.budget import divide, hull
from omni_proxy.workers.engine.placement.controller import Controller, ControllerOptions
from omni_proxy.workers.engine.placement.copies import replicate
from omni_proxy.workers.engine.placement.draft import scaled
from omni_proxy.workers.engine.placement.errors import Fault, PlacementError
from omni_proxy.workers.engine.placement.forecast import Forecast, deviation
from omni_proxy.workers.engine.placement.match import Kind, moves_between
from omni_proxy.workers.engine.placement.moves import MoveOptions, improved, reshared
from omni_proxy.workers.engine.placement.packing import pack
from omni_proxy.workers.engine.placement.place import Options, place, redundancy_of
from omni_proxy.workers.engine.placement.plan import Placement, contiguous, from_json
from omni_proxy.workers.engine.placement.pooled import name_bins
from omni_proxy.workers.engine.placement.public import public_placement
from omni_proxy.workers.engine.placement.score import imbalance, scored
from omni_proxy.workers.engine.placement.shares import Split, even, water
from omni_proxy.workers.engine.placement.topology import Topology


def test_copies_go_to_the_largest_load_per_copy() -> None:
    weights = np.array([[12.0, 5.0, 3.0]])
    plan = replicate(weights, 3, 4)
    assert plan.order.tolist() == [[0, 0, 1]]
    assert plan.peak.tolist() == [[12.0, 6.0, 5.0, 4.0]]
    assert plan.copies(np.array([2])).tolist() == [[3, 1, 1]]


def test_no_expert_gets_more_copies_than_ranks() -> None:
    plan = replicate(np.array([[100.0, 1.0, 1.0]]), 3, 2)
    assert plan.copies(np.array([3])).tolist() == [[2, 2, 2]]
    with pytest.raises(PlacementError) as caught:
        replicate(np.array([[100.0, 1.0, 1.0]]), 4, 2)
    assert caught.value.fault is Fault.TOO_MANY_SLOTS


def test_twins_are_parted_when_packing_runs_into_them() -> None:
    weights = scaled(np.array([[9.0, 1.0, 1.0, 1.0]]), 3)
    draft = pack(weights, np.array([[3, 2, 2, 2]]), 3, 3)
    assert all(len(set(slots)) == 3 for slots in draft.slots[0].tolist())


def test_water_levels_and_leaves_high_places_dry() -> None:
    assert water(np.array([[1.0, 2.0, 9.0, np.inf]]), np.array([3.0])).tolist() == [[2.0, 1.0, 0.0, 0.0]]
    assert even(np.array([[1.0, 2.0, np.inf]]), np.array([3.0])).tolist() == [[1.5, 1.5, 0.0]]


def test_proportional_shares_level_what_even_shares_cannot() -> None:
    # expert 0 on both ranks; rank 0 also has expert 1, rank 1 has expert 2
    slots = np.array([[[0, 1], [0, 2]]])
    shares = np.array([[[0.5, 1.0], [0.5, 1.0]]])
    placement = Placement(3, slots, shares)
    loads = np.array([[4.0, 3.0, 1.0]])
    assert imbalance(placement, loads).tolist() == [1.25]
    levelled = reshared(placement, loads)
    assert imbalance(levelled, loads) == pytest.approx([1.0])
    assert levelled.shares[0, :, 0] == pytest.approx([0.25, 0.75])


def test_shares_sum_to_one_beside_loads_a_million_million_times_larger() -> None:
    loads = np.ones((1, 8))
    loads[0, 1:] = 1e-13
    placement = place(loads, Topology(4), Options(8, Split.PROPORTIONAL))
    for expert in range(8):
        assert placement.shares[placement.slots == expert].sum() == pytest.approx(1.0)


def test_a_budget_buys_the_steepest_pieces_and_all_of_it() -> None:
    flat_then_fall = np.array([5.0, 5.0, 1.0])
    falls_at_once = np.array([3.0, 2.0, 2.0])
    assert hull(flat_then_fall) == [(0, 2, 2.0)]
    curves = np.stack([flat_then_fall, falls_at_once])
    assert divide(curves, 2).tolist() == [2, 0]
    assert divide(curves, 3).tolist() == [2, 1]
    assert divide(curves, 99).tolist() == [2, 2]


@given(st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_the_bound_holds_for_the_best_of_all_placements(seed: int) -> None:
    """Four experts, one extra copy, two ranks of three or so slots: try them all."""
    loads = np.random.default_rng(seed).gamma(0.7, size=(1, 4)) + 1e-3
    weights = scaled(loads, 2)
    best = min(
        _two_rank_peak(weights[0], doubled, sides)
        for doubled in range(4)
        for sides in itertools.product((0, 1), repeat=3)
    )
    assert lower_bound(weights, 2, np.array([1]), None)[0] <= best + 1e-9


def _two_rank_peak(weights: np.ndarray, doubled: int, sides: tuple[int, ...]) -> float:
    loads = [0.0, 0.0]
    for expert, side in zip([e for e in range(4) if e != doubled], sides, strict=True):
        loads[side] += weights[expert]
    return float(max(max(loads), (sum(loads) + weights[doubled]) / 2))


@given(st.integers(0, 999), st.integers(2, 9), st.integers(5, 40))
@settings(max_examples=60, deadline=None)
def test_bins_are_named_so_that_ranks_hold_alike(seed: int, ranks: int, layers: int) -> None:
    counts = np.random.default_rng(seed).integers(1, 4, size=(layers, ranks))
    names = name_bins(counts)
    held = np.take_along_axis(counts, names, axis=1).sum(axis=0)
    assert (np.sort(names, axis=1) == np.arange(ranks)).all()
    assert held.max() - held.min() <= 2


def test_the_published_example() -> None:
    """Two layers of twelve experts in four groups, sixteen replicas on eight ranks of two nodes."""
    loads = [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
    placement = public_placement(np.array(loads, float), Topology(8, 2, 4), 4)
    published = [
        [[5, 6], [5, 7], [8, 4], [3, 4], [10, 9], [10, 2], [0, 1], [11, 1]],
        [[7, 10], [6, 8], [6, 11], [8, 9], [2, 4], [5, 1], [5, 0], [3, 1]],
    ]
    for ours, theirs in zip(placement.slots.tolist(), published, strict=True):
        assert sorted(map(sorted, ours)) == sorted(map(sorted, theirs))


def test_forecast_takes_the_memory_that_predicts_best() -> None:
    chance = np.random.default_rng(0)
    still = np.array([[4.0, 3.0, 2.0, 1.0]])
    noisy, wandering = Forecast((0.0, 0.8)), Forecast((0.0, 0.8))
    for step in range(40):
        expected = noisy.observe(still * np.exp(0.3 * chance.normal(size=still.shape)))
        moving = np.roll(still, step // 10, axis=1)
        followed = wandering.observe(moving)
    assert np.abs(expected - still / 10).max() < 0.06
    assert followed == pytest.approx(moving / 10)


def test_forecast_keeps_a_layer_without_tokens() -> None:
    forecast = Forecast((0.0,))
    forecast.observe(np.array([[3.0, 1.0], [1.0, 1.0]]))
    assert forecast.observe(np.array([[0.0, 0.0], [1.0, 3.0]])).tolist() == [[0.75, 0.25], [0.25, 0.75]]


def test_deviation_is_that_of_the_noise() -> None:
    chance = np.random.default_rng(0)
    windows = np.exp(0.1 * chance.normal(size=(12, 4, 200)))
    assert deviation(windows) == pytest.approx(0.1, rel=0.25)  # the forecast is off by a little as well
    assert deviation(windows[:1]) == 0.0


def test_controller_moves_every_interval_and_reshares_between() -> None:
    loads = np.random.default_rng(3).gamma(1.0, size=(4, 16)) + 0.01
    controller = Controller(place(loads, Topology(4), Options(4)), ControllerOptions(interval=2))
    hot = loads.copy()
    hot[:, 0] *= 10
    first, second = controller.observe(hot), controller.observe(hot)
    assert first.moves == ()
    assert 0 < len(second.moves) <= 4 * 2 * 4
    assert imbalance(second.placement, hot).mean() < imbalance(first.placement, hot).mean()
    assert controller.observe(np.zeros_like(hot)).moves == ()


def test_moves_that_cost_more_than_they_gain_are_not_made() -> None:
    loads = np.random.default_rng(3).gamma(1.0, size=(4, 16)) + 0.01
    placement = place(loads, Topology(4), Options(4))
    hot = loads.copy()
    hot[:, 0] *= 10
    assert moves_between(placement, improved(placement, hot, MoveOptions(4, copy_cost=0.0)))
    assert not moves_between(placement, improved(placement, hot, MoveOptions(4, copy_cost=99.0)))


def test_a_swap_is_two_halves_with_each_other_as_source() -> None:
    before = contiguous(1, 4, 2)
    after = Placement(4, np.array([[[2, 1], [0, 3]]]), np.ones((1, 2, 2)))
    moves = moves_between(before, after)
    assert [(m.kind, m.rank, m.expert, m.evicted, m.source) for m in moves] == [
        (Kind.SWAP, 0, 2, 0, 1),
        (Kind.SWAP, 1, 0, 2, 0),
    ]


def test_a_removed_replica_is_a_move_without_a_copy() -> None:
    before = Placement(2, np.array([[[0, 1], [0, -1]]]), np.array([[[0.5, 1.0], [0.5, 0.0]]]))
    after = Placement(2, np.array([[[0, 1], [-1, -1]]]), np.array([[[1.0, 1.0], [0.0, 0.0]]]))
    assert [(m.kind, m.rank, m.evicted) for m in moves_between(before, after)] == [(Kind.REMOVE, 1, 0)]
    assert scored(after, np.ones((1, 2)), before).copied.tolist() == [0]


def test_json_and_pattern_say_what_the_placement_is() -> None:
    placement = place(np.random.default_rng(0).gamma(1.0, size=(3, 8)), Topology(4), Options(4, Split.PROPORTIONAL))
    again = from_json(placement.to_json())
    assert (again.slots == placement.slots).all()
    assert again.shares == pytest.approx(placement.shares, abs=1e-8)
    pattern = placement.pattern()
    assert pattern.shape == (4, 3, 8)
    assert (pattern.sum(axis=0) == placement.copies()).all()


@pytest.mark.parametrize(
    ("slots", "shares"),
    [
        ([[[0, 0]]], [[[0.5, 0.5]]]),  # expert 1 nowhere
        ([[[0, 1]]], [[[0.5, 1.0]]]),  # shares of expert 0 sum to a half
        ([[[0, 2]]], [[[1.0, 1.0]]]),  # no such expert
        ([[[0, 1]]], [[[np.nan, 1.0]]]),
    ],
)
def test_a_placement_that_cannot_serve_is_refused(slots: list[object], shares: list[object]) -> None:
    with pytest.raises(PlacementError) as caught:
        Placement(2, np.array(slots), np.array(shares))
    assert caught.value.fault is Fault.BAD_PLACEMENT


def test_slots_per_rank_must_hold_the_experts() -> None:
    assert redundancy_of(2, 144, 256) == 32
    with pytest.raises(PlacementError) as caught:
        redundancy_of(1, 144, 256)
    assert caught.value.fault is Fault.TOO_FEW_SLOTS
