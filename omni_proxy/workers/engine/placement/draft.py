"""A placement under work: many independent problems (rows) at once, as arrays that the algorithms change in place.

A row is one layer, or one node of one layer. Loads are scaled so that the mean rank of a row has load 1; then a rank's
load *is* its ratio to the mean. An empty slot holds the number of experts, one past the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Bin = list[tuple[int, float]]  # what one rank gets: experts, by their place in some order, and amounts; -1 is nothing


@dataclass(slots=True)
class Draft:
    """`amount` is what a slot carries of its expert's load; `held` says which rank holds which expert."""

    weights: Floats  # [rows, experts]
    slots: Ints  # [rows, ranks, slots]
    amount: Floats  # [rows, ranks, slots]
    load: Floats  # [rows, ranks]
    held: Bools  # [rows, ranks, experts + 1]; the last column stays False

    @property
    def empty(self) -> int:
        return int(self.weights.shape[1])

    def peaks(self) -> Floats:
        """The largest rank load of each row; 1 is perfect."""
        peaks: Floats = self.load.max(axis=1)
        return peaks

    def take(self, rows: Ints) -> Draft:
        """A copy of some rows."""
        return Draft(self.weights[rows], self.slots[rows], self.amount[rows], self.load[rows], self.held[rows])

    def put(self, rows: Ints, other: Draft, which: Ints) -> None:
        """Overwrite `rows` with the rows `which` of another draft."""
        self.slots[rows], self.amount[rows] = other.slots[which], other.amount[which]
        self.load[rows], self.held[rows] = other.load[which], other.held[which]


def scaled(loads: Floats, ranks: int) -> Floats:
    """Loads with a mean rank load of 1; a row without load is all zero."""
    total = loads.sum(axis=1, keepdims=True)
    rows: Floats = np.divide(loads * ranks, total, out=np.zeros_like(loads), where=total > 0)
    return rows


def blank(weights: Floats, ranks: int, slots: int) -> Draft:
    """A draft with nothing placed."""
    rows, experts = weights.shape
    return Draft(
        weights,
        np.full((rows, ranks, slots), experts, np.int64),
        np.zeros((rows, ranks, slots)),
        np.zeros((rows, ranks)),
        np.zeros((rows, ranks, experts + 1), np.bool_),
    )


def drafted(weights: Floats, slots: Ints, shares: Floats) -> Draft:
    """A draft of a placement that exists; empty slots are -1 in `slots`."""
    rows, experts = weights.shape
    places = np.where(slots < 0, experts, slots)
    padded = np.concatenate([weights, np.zeros((rows, 1))], axis=1)
    amount = np.take_along_axis(padded, places.reshape(rows, -1), axis=1).reshape(places.shape) * shares
    held = np.zeros((rows, slots.shape[1], experts + 1), np.bool_)
    np.put_along_axis(held, places, True, axis=2)
    held[:, :, experts] = False
    return Draft(weights, places, amount, amount.sum(axis=2), held)


def binned(weights: Floats, order: Ints, bins: list[Bin], ranks: int, slots: int) -> Draft:
    """A draft of one row from the contents of its ranks; `order` turns places into expert numbers."""
    draft = blank(weights[None].copy(), ranks, slots)
    for rank, content in enumerate(bins):
        for slot, (nth, amount) in enumerate((n, a) for n, a in content if n >= 0):
            draft.slots[0, rank, slot], draft.amount[0, rank, slot] = order[nth], amount
            draft.held[0, rank, order[nth]] = True
    draft.load[:] = draft.amount.sum(axis=2)
    return draft
