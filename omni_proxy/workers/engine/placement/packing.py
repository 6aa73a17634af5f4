"""Balanced packing: heaviest copy first, each onto the least loaded rank that has a free slot and lacks the expert."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from omni_proxy.workers.engine.placement.draft import Draft, Floats, Ints, blank


def pack(weights: Floats, copies: Ints, ranks: int, slots: int) -> Draft:
    """Place `copies` of each expert, with equal amounts, on `ranks` ranks of `slots` slots each."""
    draft = blank(weights, ranks, slots)
    per_copy = weights / copies
    rows = np.arange(len(weights))
    used = np.zeros((len(weights), ranks), np.int64)
    for experts in _heaviest_first(per_copy, copies).T:
        live = rows[experts < draft.empty]
        _place_one(draft, live, experts[live], per_copy, used)
    _part_twins(draft, used)
    return draft


def _heaviest_first(per_copy: Floats, copies: Ints) -> Ints:
    """Expert numbers [rows, copies], all copies of one expert in a row, padded with the empty mark."""
    order = np.argsort(-per_copy, axis=1, kind="stable")
    repeats = np.take_along_axis(copies, order, axis=1)
    totals = repeats.sum(axis=1)
    sequence = np.full((len(per_copy), int(totals.max())), per_copy.shape[1], np.int64)
    sequence[np.arange(sequence.shape[1])[None] < totals[:, None]] = np.repeat(order.ravel(), repeats.ravel())
    return sequence


def _place_one(draft: Draft, rows: Ints, experts: Ints, per_copy: Floats, used: Ints) -> None:
    full = used[rows] >= draft.slots.shape[2]
    choice = np.where(full | draft.held[rows, :, experts], np.inf, draft.load[rows])
    rank = choice.argmin(axis=1)
    stuck = np.isinf(choice[np.arange(len(rows)), rank])
    if stuck.any():  # every rank with a free slot holds the expert already; _part_twins repairs it
        rank = np.where(stuck, np.where(full, np.inf, draft.load[rows]).argmin(axis=1), rank)
    slot = used[rows, rank]
    draft.slots[rows, rank, slot] = experts
    draft.amount[rows, rank, slot] = per_copy[rows, experts]
    draft.load[rows, rank] += per_copy[rows, experts]
    draft.held[rows, rank, experts] = True
    used[rows, rank] += 1


def _part_twins(draft: Draft, used: Ints) -> None:
    """Exchange one of two equal experts on a rank with an expert of a rank that lacks it.

    Such a rank exists, as no expert has more copies than there are ranks; and since all ranks have as many slots, one
    of its slots is free or holds an expert that the first rank lacks.
    """
    filled = (draft.slots < draft.empty).sum(axis=(1, 2))
    distinct = draft.held.sum(axis=(1, 2))
    for row in np.flatnonzero(filled != distinct):
        for rank, slot in _twins(draft.slots[row], draft.empty):
            _part(draft, int(row), rank, slot)


def _twins(slots: Ints, empty: int) -> list[tuple[int, int]]:
    seen: set[tuple[int, int]] = set()
    twins = []
    for (rank, slot), expert in np.ndenumerate(slots):
        if expert < empty and (rank, int(expert)) in seen:
            twins.append((rank, slot))
        seen.add((rank, int(expert)))
    return twins


def _part(draft: Draft, row: int, rank: int, slot: int) -> None:
    expert = int(draft.slots[row, rank, slot])
    for other in np.argsort(draft.load[row], kind="stable"):
        if draft.held[row, other, expert]:
            continue
        for there, partner in enumerate(draft.slots[row, other]):
            if not draft.held[row, rank, partner]:
                exchange(
                    draft, np.array([row]), np.array([rank]), np.array([slot]), np.array([other]), np.array([there])
                )
                draft.held[row, rank, expert] = True  # its twin is still there
                return


def exchange(draft: Draft, rows: Ints, rank: Ints, slot: Ints, other: Ints, there: Ints) -> None:
    """Swap the contents of slot (rank, slot) with (other, there), one pair in each of `rows`."""
    here, across = draft.slots[rows, rank, slot], draft.slots[rows, other, there]
    amount, back = draft.amount[rows, rank, slot], draft.amount[rows, other, there]
    draft.slots[rows, rank, slot], draft.slots[rows, other, there] = across, here
    draft.amount[rows, rank, slot], draft.amount[rows, other, there] = back, amount
    draft.load[rows, rank] += back - amount
    draft.load[rows, other] += amount - back
    _move_mark(draft.held, rows, here, rank, other)
    _move_mark(draft.held, rows, across, other, rank)
    draft.held[rows, :, draft.empty] = False


def _move_mark(held: NDArray[np.bool_], rows: Ints, experts: Ints, src: Ints, dst: Ints) -> None:
    held[rows, src, experts] = False
    held[rows, dst, experts] = True
