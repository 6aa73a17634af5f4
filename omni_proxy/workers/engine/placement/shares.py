"""How an expert's tokens split over its replicas: evenly, or in the proportions that level the ranks.

The proportional split minimises the sum of squared rank loads; its optimum also has the smallest possible maximum of
all splits of that placement. It costs no weight traffic, only a small table, so it can follow every window.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from omni_proxy.workers.engine.placement.draft import Draft, Floats, Ints

SETTLED = 1e-6  # of the mean rank load: less than this in one sweep ends the sweeps


class Split(StrEnum):
    EVEN = "even"
    PROPORTIONAL = "proportional"


@dataclass(frozen=True, slots=True)
class Sites:
    """Where the replicas are: flat slot numbers [rows, experts, most copies], padded with -1, and copies per expert."""

    flat: Ints
    copies: Ints


def sites(draft: Draft) -> Sites:
    """The slots of each expert, in slot order."""
    rows, experts = draft.weights.shape
    flat = draft.slots.reshape(rows, -1)
    order = np.argsort(flat, axis=1, kind="stable")
    ranked = np.take_along_axis(flat, order, axis=1)
    offsets = (experts + 1) * np.arange(rows)[:, None]
    counts = np.bincount((flat + offsets).ravel(), minlength=rows * (experts + 1)).reshape(rows, experts + 1)
    starts = np.cumsum(counts, axis=1) - counts
    nth = np.arange(flat.shape[1])[None] - np.take_along_axis(starts, ranked, axis=1)
    table = np.full((rows, experts, max(1, int(counts[:, :experts].max()))), -1, np.int64)
    real = ranked < experts
    row = np.broadcast_to(np.arange(rows)[:, None], flat.shape)
    table[row[real], ranked[real], nth[real]] = order[real]
    return Sites(table, counts[:, :experts])


def split_evenly(draft: Draft) -> None:
    """Give every replica the same part of its expert's load."""
    rows = np.arange(len(draft.weights))[:, None, None]
    copies = np.concatenate([sites(draft).copies, np.ones((len(rows), 1), np.int64)], axis=1)
    weights = np.concatenate([draft.weights, np.zeros((len(rows), 1))], axis=1)
    draft.amount[:] = (weights / np.maximum(copies, 1))[rows, draft.slots]
    draft.load[:] = draft.amount.sum(axis=2)


def level(draft: Draft, sweeps: int, spread: float = 0.0) -> None:
    """Water-fill each replicated expert over its ranks in turn, the most copied first, for at most `sweeps` sweeps.

    `spread` adds that part of the squared amounts to the squared rank loads: it trades a little balance now for
    replicas of like size, which vary less in the next window.
    """
    where = sites(draft)
    _fill_singles(draft, where)
    order = np.argsort(-where.copies, axis=1, kind="stable")
    replicated = int((where.copies > 1).sum(axis=1).max())
    rows = np.arange(len(draft.weights))
    for _ in range(sweeps):
        before = draft.load.copy()
        for nth in range(replicated):
            experts = order[:, nth]
            width = int(where.copies[rows, experts].max())
            _level_one(draft, rows, where.flat[rows, experts, :width], draft.weights[rows, experts], spread)
        if np.abs(draft.load - before).max() < SETTLED:
            return


def _fill_singles(draft: Draft, where: Sites) -> None:
    """Give an expert's only replica its whole load; a replica that went may have left it with less."""
    row, expert = np.nonzero(where.copies == 1)
    amount = draft.amount.reshape(len(draft.weights), -1)
    amount[row, where.flat[row, expert, 0]] = draft.weights[row, expert]
    draft.load[:] = draft.amount.sum(axis=2)


def _level_one(draft: Draft, rows: Ints, places: Ints, total: Floats, spread: float) -> None:
    ranks, slots = draft.slots.shape[1:]
    amount = draft.amount.reshape(len(rows), ranks * slots)
    real = places >= 0
    rank = places // slots
    row = rows[:, None]
    old = np.where(real, amount[row, places], 0.0)
    new = water(np.where(real, draft.load[row, rank] - old, np.inf), total, spread)
    which = np.nonzero(real)
    amount[which[0], places[real]] = new[real]
    draft.load[which[0], rank[real]] += (new - old)[real]


def water(base: Floats, total: Floats, spread: float = 0.0) -> Floats:
    """Pour `total` [...] onto `base` [..., n] so that the wet places stand level; a place at infinity stays dry.

    With `spread` s they stand level when each depth counts 1 + s times.
    """
    total = total * (1 + spread)
    heights = np.sort(base, axis=-1)
    finite = np.isfinite(heights)
    below = np.cumsum(np.where(finite, heights, 0.0), axis=-1)
    levels = (total[..., None] + below) / np.arange(1, base.shape[-1] + 1)
    wet = np.maximum((finite & (heights < levels)).sum(axis=-1), 1)
    surface = np.take_along_axis(levels, wet[..., None] - 1, axis=-1)
    depth: Floats = np.maximum(surface - base, 0.0) / (1 + spread)
    return depth


def even(base: Floats, total: Floats) -> NDArray[np.float64]:
    """Spread `total` [...] evenly over the places of `base` [..., n] that are not at infinity."""
    real = np.isfinite(base)
    part: Floats = np.where(real, (total / np.maximum(real.sum(axis=-1), 1))[..., None], 0.0)
    return part


def shares_of(draft: Draft) -> Floats:
    """Fractions of its expert's tokens per slot [rows, ranks, slots]; they sum to 1 over an expert's replicas.

    An expert without load is split evenly.
    """
    rows, experts = draft.weights.shape
    row = np.arange(rows)[:, None, None]
    offsets = (experts + 1) * row + draft.slots
    totals = np.bincount(offsets.ravel(), draft.amount.ravel(), minlength=rows * (experts + 1))[offsets]
    copies = np.bincount(offsets.ravel(), minlength=rows * (experts + 1))[offsets]
    fractions = np.divide(draft.amount, totals, out=1.0 / copies, where=totals > 0)
    shares: Floats = np.where(draft.slots == experts, 0.0, fractions)
    return shares
