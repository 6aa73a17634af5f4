"""Whatever the loads: every expert is placed, slots and moves stay within limits, bounds hold, and runs agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_proxy.workers.engine.placement.match import copied_experts, moves_between, renamed_alike
from omni_proxy.workers.engine.placement.moves import MoveOptions, improved, reshared
from omni_proxy.workers.engine.placement.place import Memory, Options, place
from omni_proxy.workers.engine.placement.plan import Placement
from omni_proxy.workers.engine.placement.public import public_placement
from omni_proxy.workers.engine.placement.score import bound_of, imbalance
from omni_proxy.workers.engine.placement.shares import Split
from omni_proxy.workers.engine.placement.topology import Topology

ROUNDING = 1e-9
pytestmark = pytest.mark.slow


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, Topology, Options]:
    nodes = draw(st.sampled_from([1, 1, 2, 3]))
    groups = nodes * draw(st.integers(1, 2))
    experts = groups * draw(st.integers(1, 5))
    ranks = nodes * draw(st.integers(1, 5))
    room = (experts // nodes) * (ranks // nodes - 1)
    redundancy = nodes * draw(st.integers(0, min(12, room)))
    seed, heat = draw(st.integers(0, 999)), draw(st.sampled_from([0.0, 0.5, 1.5]))
    chance = np.random.default_rng(seed)
    loads = np.exp(heat * chance.normal(size=(3, experts)))
    loads[chance.random(loads.shape) < draw(st.sampled_from([0.0, 0.3]))] = 0
    loads[:, 0] += 0.01
    options = Options(redundancy, draw(st.sampled_from(Split)), draw(st.sampled_from(Memory)))
    return loads, Topology(ranks, nodes, groups), options


@given(problems())
@settings(max_examples=80, deadline=None)
def test_a_placement_is_whole_within_its_memory_and_above_its_bound(
    problem: tuple[np.ndarray, Topology, Options],
) -> None:
    loads, topology, options = problem
    placement = place(loads, topology, options)
    experts = loads.shape[1]
    assert (placement.copies() >= 1).all()
    assert _twins(placement) == 0
    assert placement.copies().sum() <= len(loads) * (experts + options.redundancy)
    assert placement.slots_used().max() <= _memory(loads, topology, options)
    assert (imbalance(placement, loads) >= bound_of(placement, loads) * (1 - ROUNDING)).all()
    again = place(loads.copy(), topology, options)
    assert (again.slots == placement.slots).all()
    assert (again.shares == placement.shares).all()


@given(problems())
@settings(max_examples=40, deadline=None)
def test_groups_stay_on_one_node(problem: tuple[np.ndarray, Topology, Options]) -> None:
    loads, topology, options = problem
    if topology.nodes == 1:
        return
    placement = place(loads, topology, options)
    size = loads.shape[1] // topology.groups
    for layer in placement.slots:
        homes: dict[int, set[int]] = {}
        for rank, slots in enumerate(layer):
            for expert in slots[slots >= 0]:
                homes.setdefault(int(expert) // size, set()).add(rank // topology.ranks_per_node)
        assert all(len(nodes) == 1 for nodes in homes.values())


@given(problems(), st.integers(0, 4), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_small_moves_stay_small_and_never_make_it_worse(
    problem: tuple[np.ndarray, Topology, Options], most: int, seed: int
) -> None:
    loads, topology, options = problem
    topology = Topology(topology.ranks)
    placement = place(loads, topology, options)
    drifted = loads * np.exp(0.5 * np.random.default_rng(seed).normal(size=loads.shape))
    kept = reshared(placement, drifted, options.split, MoveOptions().spread)
    after = improved(placement, drifted, MoveOptions(most, options.split))
    assert (copied_experts(placement, after) <= 2 * most).all()
    assert (imbalance(after, drifted) <= imbalance(kept, drifted) * (1 + ROUNDING)).all()
    assert _twins(after) == 0
    assert ((after.slots >= 0).sum(axis=2) == (placement.slots >= 0).sum(axis=2)).all()
    assert _applied(placement, after) == _contents(after)


@given(problems(), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_renaming_changes_no_load_and_saves_copies(problem: tuple[np.ndarray, Topology, Options], seed: int) -> None:
    loads, topology, options = problem
    old = place(loads, topology, options)
    drifted = loads * np.exp(0.5 * np.random.default_rng(seed).normal(size=loads.shape))
    new = place(drifted, topology, options)
    renamed = renamed_alike(old, new)
    assert np.allclose(np.sort(renamed.rank_loads(drifted), axis=1), np.sort(new.rank_loads(drifted), axis=1))
    assert copied_experts(old, renamed_alike(old, old)).sum() == 0
    assert _applied(old, renamed) == _contents(renamed)


@given(problems())
@settings(max_examples=60, deadline=None)
def test_ours_is_never_worse_than_the_published_result(problem: tuple[np.ndarray, Topology, Options]) -> None:
    loads, topology, options = problem
    if (loads.shape[1] + options.redundancy) % topology.ranks or topology.nodes > 1:
        return
    ours = place(loads, topology, Options(options.redundancy, options.split))
    published = public_placement(loads, topology, options.redundancy)
    assert (imbalance(ours, loads) <= imbalance(published, loads) * (1 + ROUNDING)).all()


def _memory(loads: np.ndarray, topology: Topology, options: Options) -> int:
    """Experts that a rank may hold in all layers together."""
    layers, experts = loads.shape
    total = (experts + options.redundancy) // topology.nodes
    if options.memory is Memory.FIXED:
        return int(layers * -(-total // topology.ranks_per_node))
    return int(-(-layers * total // topology.ranks_per_node))


def _twins(placement: Placement) -> int:
    """Slots that hold an expert which their rank already holds."""
    twins = 0
    for ranks in placement.slots:
        for slots in ranks:
            held = slots[slots >= 0].tolist()
            twins += len(held) - len(set(held))
    return twins


def _contents(placement: Placement) -> list[list[set[int]]]:
    return [[set(slots[slots >= 0].tolist()) for slots in ranks] for ranks in placement.slots]


def _applied(before: Placement, after: Placement) -> list[list[set[int]]]:
    """What the ranks hold when all moves are made at once: evictions first, then copies from ranks that held them."""
    held = _contents(before)
    moves = moves_between(before, after)
    kept = _contents(after)
    for move in moves:
        assert move.expert < 0 or move.expert in held[move.layer][move.source]
    for layer, ranks in enumerate(held):
        for rank, experts in enumerate(ranks):
            experts &= kept[layer][rank]
    for move in moves:
        if move.expert >= 0:
            held[move.layer][move.rank].add(move.expert)
    return held
