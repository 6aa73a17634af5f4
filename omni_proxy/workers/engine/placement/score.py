"""How good a placement is: the largest rank load over the mean, beside the lower bound and the weights that moved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from omni_proxy.workers.engine.placement.bounds import lower_bound
from omni_proxy.workers.engine.placement.draft import Floats, Ints, scaled
from omni_proxy.workers.engine.placement.loads import Loads
from omni_proxy.workers.engine.placement.match import copied_experts
from omni_proxy.workers.engine.placement.plan import Placement


@dataclass(frozen=True, slots=True)
class Score:
    """Per layer: `imbalance` (max/mean rank load, 1 is perfect), its lower `bound`, and `copied` experts."""

    imbalance: Floats
    bound: Floats
    copied: Ints
    peak_share: float
    """Sum over layers of the largest rank load over the sum of the means: how much longer a step takes than ideal."""

    def mean(self) -> float:
        """The mean imbalance over layers."""
        return float(self.imbalance.mean())

    def copied_bytes(self, expert_bytes: int) -> int:
        """Weights that had to be copied between ranks, all layers."""
        return int(self.copied.sum()) * expert_bytes


def imbalance(placement: Placement, loads: Loads) -> Floats:
    """Max/mean rank load per layer when `loads` is served."""
    tokens = placement.rank_loads(loads)
    return np.asarray(tokens.max(axis=1) / tokens.mean(axis=1), dtype=np.float64)


def scored(placement: Placement, loads: Loads, before: Placement | None = None) -> Score:
    """The score of `placement` under the window `loads`; `before` is what ran before, for the weights that moved."""
    tokens = placement.rank_loads(loads)
    copied = np.zeros(placement.layers, np.int64) if before is None else copied_experts(before, placement)
    return Score(
        imbalance(placement, loads),
        bound_of(placement, loads),
        copied,
        float(tokens.max(axis=1).sum() / tokens.mean(axis=1).sum()),
    )


def bound_of(placement: Placement, loads: Loads) -> Floats:
    """The least max/mean per layer that any placement with as many replicas in each layer could have under `loads`."""
    used = (placement.slots >= 0).sum(axis=2)
    extras = used.sum(axis=1) - placement.experts
    slots = int(used.max())
    pooled = bool((used.min(axis=1) != used.max(axis=1)).any())
    return lower_bound(scaled(loads, placement.ranks), placement.ranks, extras, None if pooled else slots)
