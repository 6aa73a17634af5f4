"""Many cluster shapes: the published algorithm, ours in four forms, the lower bound; fitted and in the next window."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.placement.loads import LAYERS, SLOW, windows, zipf_loads
from omni_proxy.workers.engine.placement.forecast import Forecast, deviation
from omni_proxy.workers.engine.placement.loads import Loads
from omni_proxy.workers.engine.placement.place import Memory, Options, place
from omni_proxy.workers.engine.placement.plan import Placement, contiguous
from omni_proxy.workers.engine.placement.public import public_placement
from omni_proxy.workers.engine.placement.score import bound_of, imbalance
from omni_proxy.workers.engine.placement.shares import Split
from omni_proxy.workers.engine.placement.topology import Topology

SHAPES = ((32, 32), (64, 64), (144, 32), (144, 176), (288, 32), (288, 320))
EXPONENTS = (0.3, 0.5, 0.8)
WINDOWS = 8  # from which the next one is forecast
FORMS = tuple((split, memory) for memory in Memory for split in Split)


@dataclass(frozen=True, slots=True)
class Row:
    """Means over layers of max/mean; by form name where there are several; bounds for fixed and pooled memory.

    `next_` figures: placed for the forecast from windows that drift slowly, scored on the window that follows.
    """

    ranks: int
    redundancy: int
    nodes: int
    exponent: float
    unplaced: float
    public: float
    bound: float
    pooled_bound: float
    ours: dict[str, float]
    next_public: float
    next_ours: dict[str, float]
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
    next_public, next_ours = _next_window(topology, redundancy, exponent, layers)
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
        next_public,
        next_ours,
        cpu_s,
        held,
    )


def _next_window(topology: Topology, redundancy: int, exponent: float, layers: int) -> tuple[float, dict[str, float]]:
    past = np.stack(list(windows(SLOW, exponent, WINDOWS + 1, layers)))
    coming, past = past[-1], past[:-1]
    forecast = Forecast()
    for window in past:
        expected = forecast.observe(window)
    ours = {}
    for split, memory in FORMS:
        placement = place(expected, topology, Options(redundancy, split, memory, deviation(past)))
        ours[f"{memory.value} {split.value}"] = _mean(placement, coming)
    return _mean(public_placement(expected, topology, redundancy), coming), ours


def _mean(placement: Placement, loads: Loads) -> float:
    return float(imbalance(placement, loads).mean())
