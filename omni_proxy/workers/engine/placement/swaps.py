"""Refinement: exchange two slots between the most loaded rank and another, as long as that lowers the row's maximum.

An exchange with an empty slot is a move. Amounts travel with their slots; shares are for `shares.py`.
"""

from __future__ import annotations

import numpy as np

from omni_proxy.workers.engine.placement.draft import Bools, Draft, Floats, Ints
from omni_proxy.workers.engine.placement.packing import exchange

LEAST_GAIN = 1e-6  # of the present maximum; less is rounding


def refine(draft: Draft, goal: Floats, rounds: int) -> None:
    """Best exchange per row and round, until a row is at its `goal`, stuck, or the rounds are over."""
    rows = np.arange(len(draft.load))
    for _ in range(rounds):
        rows = rows[draft.load[rows].max(axis=1) > goal[rows]]
        if not len(rows):
            return
        rows = _improve(draft, rows)


def _improve(draft: Draft, rows: Ints) -> Ints:
    """One exchange in each row that has an improving one; return those rows."""
    ranks, slots = draft.slots.shape[1:]
    at = np.arange(len(rows))
    top = draft.load[rows].argmax(axis=1)
    delta, allowed = exchange_deltas(draft, rows, top)
    here, there = draft.load[rows, top][:, None, None, None], draft.load[rows][:, None, :, None]
    outcome = np.where(allowed, np.maximum(here - delta, there + delta), np.inf).reshape(len(rows), -1)
    best = outcome.argmin(axis=1)
    better = outcome[at, best] < draft.load[rows, top] * (1 - LEAST_GAIN)
    slot, other, across = np.unravel_index(best[better], (slots, ranks, slots))
    exchange(draft, rows[better], top[better], slot, other, across)
    improved: Ints = rows[better]
    return improved


def exchange_deltas(draft: Draft, rows: Ints, top: Ints) -> tuple[Floats, Bools]:
    """What rank `top` sheds to rank r when its slot i is exchanged with slot j of r, and whether that may be.

    Both are [rows, i, r, j]. It may not be when a rank would hold an expert twice.
    """
    delta: Floats = draft.amount[rows, top][:, :, None, None] - draft.amount[rows][:, None]
    taken = draft.held[rows[:, None], :, draft.slots[rows, top]]
    given = draft.held[rows[:, None, None], top[:, None, None], draft.slots[rows]]
    return delta, ~(taken[:, :, :, None] | given[:, None])
