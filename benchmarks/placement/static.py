"""One window, many cluster shapes: the published algorithm, ours in four forms, and the lower bound."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.placement.loads import LAYERS, zipf_loads
from omni_proxy.workers.engine.placement.loads import Loads
from omni_proxy.workers.engine.placement.place import Memory, Options, place
from omni_proxy.workers.engine.placement.plan import Placement, contiguous
from omni_proxy.workers.engine.placement.public import public_placement
from omni_proxy.workers.engine.placement.score import bound_of, imbalance
from omni_proxy.workers.engine.placement.shares import Split
from omni_proxy.workers.engine.placement.topology import Topology

SHAPES = ((32, 32), (64, 64), (144, 32), (144, 176), (288, 32), (288, 320))
EXPONENTS = (0.3, 0.5, 0.8)
FORMS = tuple((split, memory) for memory in Memory for split in Split)


@dataclass(frozen=True, slots=True)
class Row:
    """Means over layers of max/mean; `ours` and `cpu_s` by form name, bounds for fixed and pooled memory."""

    ranks: int
    redundancy: int
    nodes: int
    exponent: float
    unplaced: float
    public: float
    bound: float
    pooled_bound: float
    ours: dict[str, float]
    cpu_s: dict[str, float]
    most_held: dict[str, int]


def rows(layers: int = LAYERS) -> Iterator[Row]:
    """The global policy in all shapes."""
    for ranks, redundancy in SHAPES:
        for exponent in EXPONENTS:
            yield measure(Topology(ranks), redundancy, exponent, layers)


def hierarchical_rows(layers: int = LAYERS) -> Iterator[Row]:
    """Eight groups on four or eight nodes."""
    for ranks, redundancy, nodes in ((32, 32, 4), (64, 64, 8), (144, 32, 8)):
        for exponent in EXPONENTS:
            yield measure(Topology(ranks, nodes, 8), redundancy, exponent, layers)


def measure(topology: Topology, redundancy: int, exponent: float, layers: int) -> Row:
    loads = zipf_loads(exponent, layers)
    quality = {}
    cpu_s = {}
    held = {}
    bounds: dict[Memory, float] = {}
    for split, memory in FORMS:
        name = f"{memory.value} {split.value}"
        began = time.process_time()
        placement = place(loads, topology, Options(redundancy, split, memory))
        cpu_s[name] = time.process_time() - began
        quality[name] = float(imbalance(placement, loads).mean())
        held[name] = int(placement.slots_used().max())
        bounds[memory] = float(bound_of(placement, loads).mean()) if split is Split.EVEN else bounds[memory]
    public = public_placement(loads, topology, redundancy)
    return Row(
        topology.ranks,
        redundancy,
        topology.nodes,
        exponent,
        _mean(contiguous(len(loads), loads.shape[1], topology.ranks), loads),
        _mean(public, loads),
        bounds[Memory.FIXED],
        bounds[Memory.POOLED],
        quality,
        cpu_s,
        held,
    )


def _mean(placement: Placement, loads: Loads) -> float:
    return float(imbalance(placement, loads).mean())
