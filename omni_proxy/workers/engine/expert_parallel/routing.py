"""Which replica of an expert takes which row: by the shares of the placement, evenly spread over time. Numpy only.

What is chosen never changes a result, only who computes it: replicas hold the same weights, and `experts.py` computes a
row in the same way wherever it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_proxy.workers.engine.placement.plan import Placement

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
GOLDEN: Final = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class Route:
    """Pairs (row, choice) in the order in which they are sent, and how many go to each slot of each rank."""

    order: Ints
    """[pairs]: the n-th pair sent is pair order[n] of the flattened ids."""
    counts: Ints
    """[ranks, slots]"""


class LayerRouter:
    """The replicas of one layer's experts, and how many rows each expert has had."""

    def __init__(self, placement: Placement, layer: int) -> None:
        self.experts = placement.experts
        self._seen = np.zeros(placement.experts, np.int64)
        self.update(placement.slots[layer], placement.shares[layer])

    def update(self, slots: Ints, shares: Floats) -> None:
        """Take over what the ranks hold now [ranks, slots] and the shares of it."""
        self.slots, self.shares = slots.copy(), shares.copy()
        width = slots.shape[1]
        copies = np.bincount(slots[slots >= 0], minlength=self.experts)
        self._places = np.zeros((self.experts, int(copies.max())), np.int64)
        self._limits = np.full(self._places.shape, np.inf)
        for expert in range(self.experts):
            places = np.flatnonzero(slots.ravel() == expert)
            self._places[expert, : len(places)] = places
            limits = np.cumsum(shares.ravel()[places])
            self._limits[expert, : len(places) - 1] = limits[:-1]
        self._shape = len(slots), width

    def place_of(self, expert: int, rank: int) -> int:
        """The slot in which `rank` holds `expert`."""
        return int(np.flatnonzero(self.slots[rank] == expert)[0])

    def route(self, ids: Ints) -> Route:
        """Give each of the flattened expert ids to a replica.

        The n-th row of an expert goes where n · golden ratio (mod 1) falls among the cumulated shares: that follows
        the shares as closely over few rows as over many, and needs no chance.
        """
        nth = self._seen[ids] + _occurrence(ids)
        self._seen += np.bincount(ids, minlength=self.experts)
        turn = (nth + 0.5) * GOLDEN % 1.0
        replica = (turn[:, None] >= self._limits[ids]).sum(axis=1)
        places = self._places[ids, replica]
        counts = np.bincount(places, minlength=self._shape[0] * self._shape[1])
        return Route(np.argsort(places, kind="stable"), counts.reshape(self._shape).astype(np.int64))


def _occurrence(ids: Ints) -> Ints:
    """For each entry, how many equal ones come before it."""
    order = np.argsort(ids, kind="stable")
    ranked = ids[order]
    fresh = np.flatnonzero(np.concatenate([[True], ranked[1:] != ranked[:-1]])) if len(ids) else np.zeros(0, np.int64)
    starts = np.repeat(fresh, np.diff(np.append(fresh, len(ids))))
    result = np.empty_like(ids)
    result[order] = np.arange(len(ids)) - starts
    return result
