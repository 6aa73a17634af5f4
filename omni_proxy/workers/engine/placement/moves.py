"""Re-placement in small steps: a few moves per layer, each the one that relieves the most loaded rank best.

A move is an ADD (a further replica of an expert of the fullest rank, in the slot of a replica that others can stand in
for, or in an empty one; one expert's weights are copied) or a SWAP (two ranks exchange an expert each; two are copied).
Candidates are ranked by the fall of the sum of rank loads to the power STEEP, which looks at the maximum but also sees
progress where several ranks share it. After all moves of a layer, the number that is really made is the one with the
largest net gain: time saved until the next chance to move, less time spent on copying weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from omni_proxy.workers.engine.placement.draft import Bools, Draft, Floats, Ints, drafted, scaled
from omni_proxy.workers.engine.placement.errors import Fault, PlacementError
from omni_proxy.workers.engine.placement.loads import Loads, checked
from omni_proxy.workers.engine.placement.match import copied_experts
from omni_proxy.workers.engine.placement.packing import exchange
from omni_proxy.workers.engine.placement.plan import EMPTY, Placement
from omni_proxy.workers.engine.placement.shares import Sites, Split, even, level, shares_of, sites, split_evenly, water
from omni_proxy.workers.engine.placement.swaps import exchange_deltas

STEEP: Final = 8
TOP_RANKS: Final = 3  # most loaded ranks of a row whose moves are compared
CANDIDATES: Final = 64  # slots per layer that are looked at closely for an ADD
SWEEPS: Final = 8
LEAST_FALL: Final = 1e-9

Fill = Callable[[Floats, Floats], Floats]


@dataclass(frozen=True, slots=True)
class MoveOptions:
    """`copy_cost` is what copying one expert costs, in the time in which the mean rank serves its load of one window.

    It is expert_bytes / bandwidth / time per window; `horizon` is for how many windows a move will pay. `fill_empty`
    lets moves use empty slots: right when every rank has memory for all its slots in every layer, wrong when memory is
    pooled over layers. `spread` is that of `shares.level`.
    """

    most_per_layer: int = 4
    split: Split = Split.PROPORTIONAL
    copy_cost: float = 0.0
    horizon: float = 2.0
    fill_empty: bool = False
    spread: float = 0.05

    def __post_init__(self) -> None:
        if min(self.most_per_layer, self.copy_cost, self.horizon, self.spread) < 0:
            raise PlacementError(Fault.BAD_OPTION, "moves, copy cost, horizon and spread must not be negative")


def reshared(placement: Placement, loads: Loads, split: Split = Split.PROPORTIONAL, spread: float = 0.0) -> Placement:
    """The same replicas with the split that suits `loads`; no weights move."""
    draft = _draft(placement, loads)
    _settle(draft, split, spread)
    return Placement(placement.experts, placement.slots.copy(), shares_of(draft), placement.nodes)


def improved(placement: Placement, loads: Loads, options: MoveOptions) -> Placement:
    """The placement after at most `most_per_layer` worthwhile moves in each layer, with fitting shares."""
    if placement.nodes > 1:
        raise PlacementError(Fault.BAD_OPTION, "small moves keep no groups on their nodes: place anew, or use one node")
    draft = _draft(placement, loads)
    _settle(draft, options.split, options.spread)
    stages = [_snapshot(draft)]
    rows = np.arange(len(draft.load))
    for _ in range(options.most_per_layer):
        rows = _step(draft, rows, options)
        if not len(rows):
            break
        stages.append(_snapshot(draft))
    return _worthwhile(placement, stages, options)


def _draft(placement: Placement, loads: Loads) -> Draft:
    loads = checked(loads, placement.layers)
    if loads.shape[1] != placement.experts:
        raise PlacementError(Fault.LOADS_SHAPE, f"{placement.experts} experts expected, got {loads.shape[1]}")
    return drafted(scaled(loads, placement.ranks), placement.slots, placement.shares)


def _settle(draft: Draft, split: Split, spread: float) -> None:
    if split is Split.EVEN:
        split_evenly(draft)
    else:
        level(draft, SWEEPS, spread)


def _snapshot(draft: Draft) -> Draft:
    return draft.take(np.arange(len(draft.load)))


def _worthwhile(placement: Placement, stages: list[Draft], options: MoveOptions) -> Placement:
    """For each layer the stage with the largest net gain; the earliest of equals."""
    shapes = [_placed(placement, stage) for stage in stages]
    peaks = np.stack([stage.peaks() for stage in stages])
    copies = np.stack([copied_experts(placement, shape) for shape in shapes])
    net = options.horizon * (peaks[0] - peaks) - options.copy_cost * copies
    best = net.argmax(axis=0)
    rows = np.arange(placement.layers)
    slots = np.stack([shape.slots for shape in shapes])[best, rows]
    shares = np.stack([shape.shares for shape in shapes])[best, rows]
    return Placement(placement.experts, slots, shares, placement.nodes)


def _placed(placement: Placement, draft: Draft) -> Placement:
    slots = np.where(draft.slots == draft.empty, EMPTY, draft.slots)
    return Placement(placement.experts, slots, shares_of(draft), placement.nodes)


# ------------------------------------------------------------------------------------------- one move


def _step(draft: Draft, rows: Ints, options: MoveOptions) -> Ints:
    """The best move in each of `rows`; return the rows in which one was made and helped."""
    part = draft.take(rows)
    before = _steepness(part.load)
    best = _best_moves(part, options)
    at = np.arange(len(rows))
    possible = best.fall > LEAST_FALL
    _make_adds(part, at[best.adding & possible], best.top, best.move, best.chosen)
    _make_swaps(part, at[~best.adding & possible], best.top, best.move)
    _settle(part, options.split, options.spread)
    good = np.flatnonzero(possible & (_steepness(part.load) < before - LEAST_FALL))
    draft.put(rows[good], part, good)
    return rows[good]


@dataclass(slots=True)
class _Best:
    """For each row the best move so far: of which rank, add or swap, and its number among those."""

    fall: Floats
    top: Ints
    adding: Bools
    move: Ints
    chosen: Ints


def _best_moves(part: Draft, options: MoveOptions) -> _Best:
    """The best move of each row that relieves one of its most loaded ranks."""
    where = sites(part)
    fill = partial(water, spread=options.spread) if options.split is Split.PROPORTIONAL else even
    order = np.argsort(-part.load, axis=1, kind="stable")
    best: _Best | None = None
    for nth in range(min(TOP_RANKS, order.shape[1])):
        found = _moves_of(part, where, order[:, nth], fill, options.fill_empty)
        best = found if best is None else _better(best, found)
    assert best is not None
    return best


def _moves_of(part: Draft, where: Sites, top: Ints, fill: Fill, fill_empty: bool) -> _Best:
    adds, chosen = _add_falls(part, where, top, fill, fill_empty)
    swaps = _swap_falls(part, top, fill_empty)
    rows = np.arange(len(top))
    flat_adds, flat_swaps = adds.reshape(len(top), -1), swaps.reshape(len(top), -1)
    add, swap = flat_adds.argmax(axis=1), flat_swaps.argmax(axis=1)
    add_fall, swap_fall = flat_adds[rows, add], flat_swaps[rows, swap]
    adding = add_fall >= swap_fall
    return _Best(np.maximum(add_fall, swap_fall), top, adding, np.where(adding, add, swap), chosen)


def _better(one: _Best, other: _Best) -> _Best:
    """Row by row the one with the larger fall; the first of equals."""
    take = other.fall > one.fall
    return _Best(
        np.where(take, other.fall, one.fall),
        np.where(take, other.top, one.top),
        np.where(take, other.adding, one.adding),
        np.where(take, other.move, one.move),
        np.where(take[:, None], other.chosen, one.chosen),
    )


def _steepness(load: Floats) -> Floats:
    return np.asarray((load**STEEP).sum(axis=-1), dtype=np.float64)


def _add_falls(draft: Draft, where: Sites, top: Ints, fill: Fill, fill_empty: bool) -> tuple[Floats, Ints]:
    """How far steepness falls when candidate slot k takes expert i of rank `top` [rows, i, k]; and the candidates."""
    rows, ranks, slots = draft.slots.shape
    row = np.arange(rows)[:, None]
    flat, amount = draft.slots.reshape(rows, -1), draft.amount.reshape(rows, -1)
    copies = np.concatenate([where.copies, np.full((rows, 1), 2 if fill_empty else 0)], axis=1)
    remaining = np.repeat(draft.load, slots, axis=1) - amount
    remaining[np.take_along_axis(copies, flat, axis=1) < 2] = np.inf
    remaining.reshape(rows, ranks, slots)[np.arange(rows), top] = np.inf
    chosen = np.argsort(remaining, axis=1, kind="stable")[:, :CANDIDATES]
    floor = remaining[row, chosen]
    removal = _removal_rise(draft, where, chosen, fill)
    hot = draft.slots[np.arange(rows), top]
    falls = _spread_fall(draft, where, hot, floor, chosen // slots, fill) - removal[:, None]
    allowed = np.isfinite(floor)[:, None] & (hot < draft.empty)[:, :, None]
    allowed &= ~draft.held[row[:, :, None], (chosen // slots)[:, None], hot[:, :, None]]
    return np.where(allowed, falls, -np.inf), chosen


def _removal_rise(draft: Draft, where: Sites, chosen: Ints, fill: Fill) -> Floats:
    """How far steepness rises on the ranks that take over from the replicas in the `chosen` slots [rows, k]."""
    rows = len(draft.slots)
    row = np.arange(rows)[:, None]
    experts = draft.slots.reshape(rows, -1)[row, chosen]
    real = experts < draft.empty
    safe = np.where(real, experts, 0)
    places = where.flat[row, safe]
    other = (places >= 0) & (places != chosen[:, :, None])
    load, base = _bases(draft, places, other)
    total = np.where(real & other.any(axis=2), draft.weights[row, safe], 0.0)
    after = np.where(other, base, 0.0) + np.where(other, fill(base, total), 0.0)
    rise = np.where(other, after**STEEP - load**STEEP, 0.0).sum(axis=2)
    return np.asarray(np.where(real, rise, 0.0), dtype=np.float64)


def _spread_fall(draft: Draft, where: Sites, hot: Ints, floor: Floats, rank: Ints, fill: Fill) -> Floats:
    """How far steepness falls on the ranks of a hot expert and on a new one of load `floor` [rows, i, k]."""
    rows = len(hot)
    row = np.arange(rows)[:, None]
    safe = np.minimum(hot, draft.empty - 1)
    places = where.flat[row, safe]
    real = places >= 0
    load, base = _bases(draft, places, real)
    shape = (*hot.shape, floor.shape[1], places.shape[2] + 1)
    wide = np.empty(shape)
    wide[..., :-1] = base[:, :, None]
    wide[..., -1] = floor[:, None]
    total = np.broadcast_to(draft.weights[row, safe][:, :, None], shape[:-1])
    finite = np.isfinite(wide)
    after = (np.where(finite, wide + fill(wide, total), 0.0) ** STEEP).sum(axis=3)
    before = np.where(real, load**STEEP, 0.0).sum(axis=2)[:, :, None] + draft.load[row, rank][:, None] ** STEEP
    return np.asarray(before - after, dtype=np.float64)


def _bases(draft: Draft, places: Ints, real: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> tuple[Floats, Floats]:
    """Rank loads at `places` [rows, n, copies], and the same without the amount there (infinite where not `real`)."""
    rows, _, slots = draft.slots.shape
    row = np.arange(rows)[:, None, None]
    load = draft.load[row, places // slots]
    return load, np.where(real, load - draft.amount.reshape(rows, -1)[row, places], np.inf)


def _swap_falls(draft: Draft, top: Ints, fill_empty: bool) -> Floats:
    """How far steepness falls when slot i of rank `top` and slot j of rank r are exchanged: [rows, i, r, j]."""
    rows = np.arange(len(top))
    delta, allowed = exchange_deltas(draft, rows, top)
    if not fill_empty:
        real = draft.slots < draft.empty
        allowed &= real[rows, top][:, :, None, None] & real[:, None]
    here, there = draft.load[rows, top][:, None, None, None], draft.load[:, None, :, None]
    after = (here - delta) ** STEEP + (there + delta) ** STEEP
    return np.asarray(np.where(allowed, here**STEEP + there**STEEP - after, -np.inf), dtype=np.float64)


def _make_adds(draft: Draft, rows: Ints, top: Ints, add: Ints, chosen: Ints) -> None:
    ranks_slots = draft.slots.shape[1:]
    hot_slot, nth = np.divmod(add[rows], chosen.shape[1])
    rank, slot = np.divmod(chosen[rows, nth], ranks_slots[1])
    expert, gone = draft.slots[rows, top[rows], hot_slot], draft.slots[rows, rank, slot]
    freed = draft.amount[rows, rank, slot]
    draft.load[rows, rank] -= freed
    draft.amount[rows, rank, slot] = 0.0
    draft.slots[rows, rank, slot] = expert
    draft.held[rows, rank, gone] = False
    draft.held[rows, rank, expert] = True


def _make_swaps(draft: Draft, rows: Ints, top: Ints, swap: Ints) -> None:
    _, ranks, slots = draft.slots.shape
    slot, other, there = np.unravel_index(swap[rows], (slots, ranks, slots))
    exchange(draft, rows, top[rows], slot, other, there)
