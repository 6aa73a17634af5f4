"""From one placement to another: name the new one's ranks so that most experts stay, and list the weights to copy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from omni_proxy.workers.engine.placement.draft import Ints
from omni_proxy.workers.engine.placement.errors import Fault, PlacementError
from omni_proxy.workers.engine.placement.plan import EMPTY, Placement

Number = TypeVar("Number", np.int64, np.float64)


class Kind(StrEnum):
    ADD = "add"  # an expert comes into a slot; what was there had other replicas, or the slot was empty
    SWAP = "swap"  # one half of an exchange between two ranks
    REMOVE = "remove"  # a slot is given up; nothing is copied


@dataclass(frozen=True, slots=True)
class Move:
    """In `layer`, slot (rank, slot) now holds `expert` (was `evicted`); its weights come from rank `source`."""

    layer: int
    kind: Kind
    rank: int
    slot: int
    expert: int
    evicted: int
    source: int


def renamed_alike(old: Placement, new: Placement) -> Placement:
    """`new` with its ranks (within their node) and slots in the order in which most experts stay where they are."""
    _check_alike(old, new)
    slots, shares = np.empty_like(new.slots), np.empty_like(new.shares)
    for layer in range(new.layers):
        names = _names(old.slots[layer], new.slots[layer], new.experts, new.ranks // new.nodes)
        slots[layer], shares[layer] = new.slots[layer][names], new.shares[layer][names]
    width = old.slots.shape[2]
    slots, shares = _wide(slots, width, EMPTY), _wide(shares, width, 0.0)
    _align_slots(old.slots, slots, shares)
    return Placement(new.experts, slots, shares, new.nodes)


def copied_experts(old: Placement, new: Placement) -> Ints:
    """Experts whose weights must be copied to a rank that lacks them, per layer."""
    _check_alike(old, new)
    return np.asarray((_held(new) & ~_held(old)).sum(axis=(1, 2)), dtype=np.int64)


def moves_between(old: Placement, new: Placement) -> list[Move]:
    """The moves that turn `old` into `new`, layer by layer; a move's source holds the weights before the change."""
    _check_alike(old, new)
    width = max(old.slots.shape[2], new.slots.shape[2])
    before, after = _wide(old.slots, width, EMPTY), _wide(new.slots, width, EMPTY)
    held, kept = _held(old), _held(new)
    moves = []
    for layer, rank, slot in np.argwhere(before != after).tolist():
        expert, evicted = int(after[layer, rank, slot]), int(before[layer, rank, slot])
        if expert != EMPTY and held[layer, rank, expert]:
            continue  # only its slot changes
        if expert == EMPTY:
            if not kept[layer, rank, evicted]:
                moves.append(Move(layer, Kind.REMOVE, rank, slot, expert, evicted, rank))
            continue
        source = _source(np.flatnonzero(held[layer, :, expert]), rank, old.ranks // old.nodes)
        exchanged = evicted != EMPTY and not held[layer, source, evicted] and kept[layer, source, evicted]
        moves.append(Move(layer, Kind.SWAP if exchanged else Kind.ADD, rank, slot, expert, evicted, source))
    return moves


def _source(holders: Ints, rank: int, per_node: int) -> int:
    """The nearest holder: same node first, then the smallest number."""
    return int(min(holders.tolist(), key=lambda holder: (holder // per_node != rank // per_node, holder)))


def _held(placement: Placement) -> NDArray[np.bool_]:
    held = np.zeros((placement.layers, placement.ranks, placement.experts + 1), np.bool_)
    np.put_along_axis(held, placement.slots % (placement.experts + 1), True, axis=2)
    return held[:, :, : placement.experts]


def _names(old: Ints, new: Ints, experts: int, per_node: int) -> Ints:
    """Which rank of `new` each rank becomes: pairs with the most experts in common first."""
    marks = [np.zeros((len(old), experts + 1), np.float32) for _ in range(2)]
    for mark, slots in zip(marks, (old, new), strict=True):
        np.put_along_axis(mark, slots % (experts + 1), 1.0, axis=1)
    common = marks[0][:, :experts] @ marks[1][:, :experts].T
    ranks = np.arange(len(old))
    common[ranks[:, None] // per_node != ranks[None] // per_node] = -1.0
    order = np.argsort(-common, axis=None, kind="stable")[: np.count_nonzero(common > 0)]
    names = np.full(len(old), -1)
    free = np.ones(len(old), np.bool_)
    for a, b in zip(*(axis.tolist() for axis in np.unravel_index(order, common.shape)), strict=True):
        if names[a] < 0 and free[b]:
            names[a], free[b] = b, False
    for node in range(len(old) // per_node):
        span = slice(node * per_node, (node + 1) * per_node)
        names[span][names[span] < 0] = np.flatnonzero(free[span]) + node * per_node
    return names


def _align_slots(old: Ints, slots: Ints, shares: NDArray[np.float64]) -> None:
    """Put each expert that stays on its rank into the slot that it had."""
    for slot in range(old.shape[2]):
        wanted = old[:, :, slot]
        at = (slots == wanted[:, :, None]) & (wanted[:, :, None] != EMPTY)
        layer, rank = np.nonzero(at.any(axis=2))
        there = at[layer, rank].argmax(axis=1)
        for array in (slots, shares):
            here = array[layer, rank, slot].copy()
            array[layer, rank, slot] = array[layer, rank, there]
            array[layer, rank, there] = here


def _wide(array: NDArray[Number], width: int, fill: float) -> NDArray[Number]:
    """The array with at least `width` slots per rank."""
    missing = max(0, width - array.shape[2])
    return np.pad(array, ((0, 0), (0, 0), (0, missing)), constant_values=fill)


def _check_alike(old: Placement, new: Placement) -> None:
    if (old.layers, old.ranks, old.experts) != (new.layers, new.ranks, new.experts):
        raise PlacementError(Fault.BAD_PLACEMENT, "the two placements differ in layers, ranks or experts")
