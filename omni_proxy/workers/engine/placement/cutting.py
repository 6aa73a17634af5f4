"""Best-fit packing that may cut: copies and packing together, for ranks whose slots are pooled over the layers.

Experts, heaviest first, go where they fit most snugly under a wanted maximum t. One that fits nowhere whole fills the
largest gap, which costs a copy, and its rest goes on. The smallest t that needs no more copies than allowed is found by
bisection. Since gaps on ranks with hot experts are filled by cold ones or by cuts, t comes near the lower bound.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from typing import Final

import numpy as np

from omni_proxy.workers.engine.placement.draft import Bin, Draft, Floats, binned

HALVINGS: Final = 10
NOTHING: Final = 1e-9  # of the mean rank load: gaps and rests below it do not exist


def cut_and_packed(weights: Floats, ranks: int, extras: int, slots: int, least: float, peak: float) -> Draft | None:
    """A draft of one row with a maximum between the bound `least` and `peak`, or None when there is none."""
    items = weights.tolist()
    best = attempt(items, ranks, extras, slots, peak)
    if best is None:
        return None
    low, high = least, peak
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        bins = attempt(items, ranks, extras, slots, middle)
        if bins is None:
            low = middle
        else:
            high, best = middle, bins
    return binned(weights, np.arange(len(items)), best, ranks, slots)


def attempt(weights: list[float], ranks: int, cuts: int, slots: int, most: float) -> list[Bin] | None:
    """Bins of at most `most` load and `slots` entries each, or None when that takes more than `cuts` cuts."""
    bins: list[Bin] = [[] for _ in range(ranks)]
    gaps, owners = [most] * ranks, list(range(ranks))  # gaps in rising order, and whose they are
    waiting = [(-load, expert) for expert, load in enumerate(weights)]
    heapq.heapify(waiting)
    while waiting:
        load, expert = heapq.heappop(waiting)
        rest = -load
        at = bisect_left(gaps, rest - NOTHING)
        if at == len(gaps):
            if not gaps or not cuts:
                return None
            cuts, at = cuts - 1, at - 1
        gap, owner = gaps.pop(at), owners.pop(at)
        amount = min(rest, gap)
        bins[owner].append((expert, amount))
        if gap - amount > NOTHING and len(bins[owner]) < slots:
            back = bisect_left(gaps, gap - amount)
            gaps.insert(back, gap - amount)
            owners.insert(back, owner)
        if rest - amount > NOTHING:
            heapq.heappush(waiting, (amount - rest, expert))
    return bins
