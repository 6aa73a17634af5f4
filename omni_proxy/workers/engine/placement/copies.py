"""How many copies each expert gets: one more, again and again, to the expert with the most load per copy.

For any number of copies this greedy order has the smallest possible largest load per copy, and its prefixes are the
answers for every smaller number; so one pass gives the whole curve of a layer. Rows are independent problems.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omni_proxy.workers.engine.placement.errors import Fault, PlacementError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Replication:
    """The greedy order of each row: who gets the n-th extra copy, and the largest load per copy before it."""

    experts: int
    order: Ints  # [rows, extras]
    peak: Floats  # [rows, extras + 1]

    def copies(self, extras: Ints) -> Ints:
        """Copies per expert [rows, experts] when row b is given `extras[b]` more than one each."""
        rows, most = self.order.shape
        taken = np.arange(most)[None] < extras[:, None]
        flat = (self.order + self.experts * np.arange(rows)[:, None])[taken]
        counts = np.bincount(flat, minlength=rows * self.experts).reshape(rows, self.experts)
        return counts.astype(np.int64) + 1


def replicate(weights: Floats, extras: int, most_copies: int) -> Replication:
    """Greedy copies up to `extras` more than one each, at most `most_copies` (the number of ranks) of one expert."""
    rows, experts = weights.shape
    if extras > experts * (most_copies - 1):
        raise PlacementError(
            Fault.TOO_MANY_SLOTS,
            f"{experts + extras} slots, but {experts} experts on {most_copies} ranks fill only {experts * most_copies}",
        )
    at = np.arange(rows)
    copies = np.ones((rows, experts), np.int64)
    per_copy = weights.copy()
    order = np.zeros((rows, extras), np.int64)
    peak = np.zeros((rows, extras + 1))
    for step in range(extras):
        hottest = (per_copy if most_copies > extras else np.where(copies < most_copies, per_copy, -1.0)).argmax(axis=1)
        peak[:, step] = per_copy.max(axis=1)
        copies[at, hottest] += 1
        per_copy[at, hottest] = weights[at, hottest] / copies[at, hottest]
        order[:, step] = hottest
    peak[:, extras] = per_copy.max(axis=1)
    return Replication(experts, order, peak)
