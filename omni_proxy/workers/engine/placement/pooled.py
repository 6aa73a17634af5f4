"""Memory pooled over layers: a rank may hold one expert of one layer and three of the next, if the sums are equal.

Ranks of a layer are interchangeable, so the bins of each layer are named such that every rank ends with the same number
of experts. A hot replica then sits alone where, with equal slots everywhere, it would have to share.
"""

from __future__ import annotations

import numpy as np

from omni_proxy.workers.engine.placement.draft import Draft, Ints
from omni_proxy.workers.engine.placement.errors import Fault, PlacementError
from omni_proxy.workers.engine.placement.packing import exchange


def name_bins(counts: Ints) -> Ints:
    """For experts per layer and bin [layers, ranks]: which bin each rank gets [layers, ranks].

    Layer by layer the fullest bin goes to the rank with least so far; then single exchanges within a layer even out
    what is left.
    """
    held = np.zeros(counts.shape[1], np.int64)
    names = np.empty_like(counts)
    for layer, row in enumerate(counts):
        names[layer, np.argsort(held, kind="stable")] = np.argsort(-row, kind="stable")
        held += row[names[layer]]
    while held.max() - held.min() > 1 and _even_out(counts, names, held):
        pass
    return names


def _even_out(counts: Ints, names: Ints, held: Ints) -> bool:
    """Exchange the bins of the fullest and the emptiest rank in one layer, if that brings them nearer."""
    rich, poor = int(held.argmax()), int(held.argmin())
    rows = np.arange(len(counts))
    surplus = counts[rows, names[:, rich]] - counts[rows, names[:, poor]]
    useful = np.flatnonzero((surplus > 0) & (surplus < held[rich] - held[poor]))
    if not len(useful):
        return False
    layer = useful[0]
    names[layer, [rich, poor]] = names[layer, [poor, rich]]
    held[rich] -= surplus[layer]
    held[poor] += surplus[layer]
    return True


def fit(draft: Draft, most: int) -> None:
    """Move slots, those that hurt least, from ranks with more than `most` experts in all rows to ranks with fewer."""
    held = (draft.slots < draft.empty).sum(axis=(0, 2))
    while held.max() > most:
        rich = int(held.argmax())
        found = _cheapest_move(draft, rich, np.flatnonzero(held < most))
        if found is None:
            raise PlacementError(Fault.TOO_FEW_SLOTS, f"rank {rich} cannot be brought down to {most} experts")
        row, slot, rank, there = found
        exchange(draft, np.array([row]), np.array([rich]), np.array([slot]), np.array([rank]), np.array([there]))
        held[rich] -= 1
        held[rank] += 1


def _cheapest_move(draft: Draft, rich: int, poor: Ints) -> tuple[int, int, int, int] | None:
    """(row, slot of `rich`, rank, its empty slot) that leaves the receiver lightest; None without such a slot."""
    experts = draft.slots[:, rich]
    room = (draft.slots[:, poor] == draft.empty).any(axis=2)
    doubled = draft.held[np.arange(len(experts))[:, None, None], poor[None, :, None], experts[:, None]]
    allowed = (experts < draft.empty)[:, None] & room[:, :, None] & ~doubled
    if not allowed.any():
        return None
    cost = np.where(allowed, draft.load[:, poor][:, :, None] + draft.amount[:, rich][:, None], np.inf)
    row, nth, slot = np.unravel_index(int(cost.argmin()), cost.shape)
    rank = int(poor[nth])
    return int(row), int(slot), rank, int((draft.slots[row, rank] == draft.empty).argmax())


def rename(draft: Draft, names: Ints) -> None:
    """Reorder the ranks of every row."""
    row = np.arange(len(names))[:, None]
    for array in (draft.slots, draft.amount, draft.load, draft.held):
        array[:] = array[row, names]
