"""From loads to a placement: copies, packing, refinement, shares; globally, or groups to nodes first."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from omni_proxy.workers.engine.placement import budget
from omni_proxy.workers.engine.placement.bounds import lower_bound
from omni_proxy.workers.engine.placement.copies import Replication, replicate
from omni_proxy.workers.engine.placement.cutting import cut_and_packed
from omni_proxy.workers.engine.placement.draft import Draft, Floats, Ints, scaled
from omni_proxy.workers.engine.placement.errors import Fault, PlacementError
from omni_proxy.workers.engine.placement.loads import Loads, checked
from omni_proxy.workers.engine.placement.packing import pack
from omni_proxy.workers.engine.placement.pairing import PAIR, paired
from omni_proxy.workers.engine.placement.plan import EMPTY, Placement
from omni_proxy.workers.engine.placement.pooled import fit, name_bins, rename
from omni_proxy.workers.engine.placement.shares import Split, level, shares_of
from omni_proxy.workers.engine.placement.swaps import refine
from omni_proxy.workers.engine.placement.topology import Topology

NEAR: Final = 1.001  # of the lower bound: closer than this is lost in the next window's noise
FAR: Final = 1.003  # of the lower bound: rows above it are searched anew for copies and packing together
ROUNDS: Final = 300
LEVEL_ROUNDS: Final = 3
WORST: Final = 2.5  # deviations by which the unluckiest of some hundred ranks exceeds its expected load
LEVEL_SWEEPS: Final = 4


class Memory(StrEnum):
    """FIXED: every rank has the same slots in every layer. POOLED: the same slots in sum over the layers."""

    FIXED = "fixed"
    POOLED = "pooled"


@dataclass(frozen=True, slots=True)
class Options:
    """`redundancy` is extra replicas per layer, all ranks together (the mean over layers when memory is pooled).

    `noise` is the relative deviation of an expert's load from one window to the next (see `forecast.deviation`). With
    it a placement is chosen that keeps its balance: many small replicas on a rank vary less than a few large ones.
    """

    redundancy: int
    split: Split = Split.EVEN
    memory: Memory = Memory.FIXED
    noise: float = 0.0

    def __post_init__(self) -> None:
        if self.redundancy < 0:
            raise PlacementError(Fault.TOO_FEW_SLOTS, f"redundancy {self.redundancy} leaves fewer slots than experts")
        if not 0 <= self.noise < 10:
            raise PlacementError(Fault.BAD_OPTION, f"noise must be from 0 to below 10, got {self.noise}")


def redundancy_of(slots_per_rank: int, ranks: int, experts: int) -> int:
    """Extra replicas per layer when every rank has `slots_per_rank` slots; a named error when experts do not fit."""
    if slots_per_rank * ranks < experts:
        raise PlacementError(
            Fault.TOO_FEW_SLOTS, f"{ranks} ranks of {slots_per_rank} slots hold fewer than {experts} experts"
        )
    return slots_per_rank * ranks - experts


def place(loads: Loads, topology: Topology, options: Options) -> Placement:
    """The placement for a window of `loads` [layers, experts]. Deterministic."""
    loads = checked(loads)
    topology.check_experts(loads.shape[1])
    if options.redundancy % topology.nodes:
        raise PlacementError(
            Fault.REDUNDANCY_NOT_DIVISIBLE,
            f"{options.redundancy} extra replicas do not divide over {topology.nodes} nodes",
        )
    members = members_of_nodes(loads, topology)
    rows = np.take_along_axis(loads, members.reshape(len(loads), -1), axis=1).reshape(-1, members.shape[2])
    drafts = solve(scaled(rows, topology.ranks_per_node), topology, options)
    return assemble(drafts, members, topology.nodes)


def members_of_nodes(loads: Loads, topology: Topology, refined: bool = True) -> Ints:
    """Experts of each node [layers, nodes, experts per node]; groups stay whole and nodes carry like loads."""
    layers, experts = loads.shape
    if topology.nodes == 1:
        return np.broadcast_to(np.arange(experts), (layers, 1, experts)).copy()
    size, per_node = experts // topology.groups, topology.groups // topology.nodes
    groups = scaled(loads.reshape(layers, topology.groups, size).sum(axis=2), topology.nodes)
    packed = pack(groups, np.ones(groups.shape, np.int64), topology.nodes, per_node)
    if refined:
        refine(packed, np.full(layers, NEAR), ROUNDS)
    chosen = np.sort(packed.slots, axis=2)
    return np.asarray((chosen[..., None] * size + np.arange(size)).reshape(layers, topology.nodes, -1), dtype=np.int64)


def solve(weights: Floats, topology: Topology, options: Options) -> Draft:
    """Place every row (layer by layer, node by node) on the ranks of one node."""
    ranks, extras = topology.ranks_per_node, options.redundancy // topology.nodes
    slots = -(-(weights.shape[1] + extras) // ranks)
    if options.memory is Memory.FIXED:
        replication = replicate(weights, extras, ranks)
        every = np.full(len(weights), extras, np.int64)
        return _pack_well(weights, replication, every, ranks, slots, options)
    most = min(slots + 1, weights.shape[1])
    replication = replicate(weights, min(most * ranks, ranks * weights.shape[1]) - weights.shape[1], ranks)
    shared = _shared_out(replication, extras, topology.nodes)
    draft = _pack_well(weights, replication, shared, ranks, most, options, pooled=True)
    alike = _pack_well(weights, replication, np.full(len(weights), extras), ranks, slots, options, search=False)
    if _risk(alike, options.noise).sum() < _risk(draft, options.noise).sum():
        draft = alike
    for node in range(topology.nodes):
        rows = np.arange(node, len(weights), topology.nodes)
        part = draft.take(rows)
        rename(part, name_bins((part.slots < part.empty).sum(axis=2)))
        fit(part, -(-len(rows) * (weights.shape[1] + extras) // ranks))
        draft.put(rows, part, np.arange(len(rows)))
    return draft


def _shared_out(replication: Replication, extras: int, nodes: int) -> Ints:
    """Extra copies per row; each node spends its own memory over the layers."""
    curves = budget.gains_curve(replication.peak)
    shared = np.zeros(len(curves), np.int64)
    for node in range(nodes):
        mine = curves[node::nodes]
        shared[node::nodes] = budget.divide(mine, extras * len(mine))
    return shared


def _pack_well(
    weights: Floats,
    replication: Replication,
    extras: Ints,
    ranks: int,
    slots: int,
    options: Options,
    pooled: bool = False,
    search: bool = True,
) -> Draft:
    bound = lower_bound(weights, ranks, extras, None if pooled else slots)
    draft = pack(weights, replication.copies(extras), ranks, slots)
    refine(draft, bound * NEAR, ROUNDS)
    if options.split is Split.EVEN:
        return draft
    if search and (pooled or slots == PAIR):
        _search_anew(draft, extras, bound, pooled, options.noise)
    for _ in range(LEVEL_ROUNDS):
        level(draft, LEVEL_SWEEPS)
        refine(draft, bound * NEAR, ROUNDS // 10)
    level(draft, LEVEL_SWEEPS)
    return draft


def _search_anew(draft: Draft, extras: Ints, bound: Floats, pooled: bool, noise: float) -> None:
    """Search copies and packing together for the rows that are far from their bound; keep what is better."""
    peaks = draft.peaks()
    _, ranks, slots = draft.slots.shape
    for row in np.flatnonzero(peaks > bound * FAR):
        weights, extra, peak = draft.weights[row], int(extras[row]), float(peaks[row])
        if pooled:
            better = cut_and_packed(weights, ranks, extra, slots, float(bound[row]), peak)
        else:
            better = paired(weights, ranks, extra, peak)
        mine = np.array([row])
        if better is not None and _risk(better, noise)[0] < _risk(draft.take(mine), noise)[0]:
            draft.put(mine, better, np.array([0]))


def _risk(draft: Draft, noise: float) -> Floats:
    """What the largest rank load of each row may come to when experts' loads vary independently by `noise`."""
    spread = np.sqrt((draft.amount**2).sum(axis=2))
    return np.asarray((draft.load + WORST * noise * spread).max(axis=1), dtype=np.float64)


def assemble(draft: Draft, members: Ints, nodes: int) -> Placement:
    """Join the rows of a draft into one placement, with the experts' own numbers."""
    layers, _, per_node = members.shape
    shares = shares_of(draft)
    names = np.concatenate([members.reshape(-1, per_node), np.full((len(shares), 1), EMPTY)], axis=1)
    slots = np.take_along_axis(names, draft.slots.reshape(len(shares), -1), axis=1)
    shape = (layers, nodes * draft.slots.shape[1], draft.slots.shape[2])
    return Placement(int(members[0].size), slots.reshape(shape), shares.reshape(shape), nodes)
