"""Non-uniform redundancy: what part of the gain of one extra slot per rank in every layer a smaller budget keeps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.placement.loads import LAYERS, mixed_zipf_loads
from omni_proxy.workers.engine.placement.place import Memory, Options, place
from omni_proxy.workers.engine.placement.score import scored
from omni_proxy.workers.engine.placement.shares import Split
from omni_proxy.workers.engine.placement.topology import Topology

RANKS = 64
FRACTIONS = (0.0, 0.125, 0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class Budget:
    """`peak_share` is the sum over layers of the largest rank load over the sum of the means."""

    fraction: float
    slots_per_rank: int
    peak_share: float
    gain_kept: float


def budgets(split: Split, layers: int = LAYERS) -> list[Budget]:
    """Layers with exponents from 0.1 to 1; the last entry is the uniform slot everywhere (fraction 1)."""
    loads = mixed_zipf_loads(np.linspace(0.1, 1.0, layers))
    everywhere = _peak_share(loads, RANKS, split, Memory.FIXED)[1]
    nothing = _peak_share(loads, 0, split, Memory.FIXED)[1]
    rows = []
    for fraction in FRACTIONS:
        held, peak = _peak_share(loads, round(fraction * RANKS), split, Memory.POOLED if fraction else Memory.FIXED)
        rows.append(Budget(fraction, held, peak, (nothing - peak) / (nothing - everywhere)))
    held = _peak_share(loads, RANKS, split, Memory.FIXED)[0]
    return [*rows, Budget(1.0, held, everywhere, 1.0)]


def _peak_share(loads: np.ndarray, redundancy: int, split: Split, memory: Memory) -> tuple[int, float]:
    placement = place(loads, Topology(RANKS), Options(redundancy, split, memory))
    return int(placement.slots_used().max()), scored(placement, loads).peak_share
