"""Copies and packing together, for ranks of two slots, where heaviest-first packing is stuck far above the bound.

With unequal shares a replicated expert is a filler: each of its copies takes just what its neighbour leaves free. For
a wanted maximum t and `split` experts that are replicated:

    pairs    ranks with two single experts whose loads sum to at most t, filled as well as possible
    halves   ranks with one single expert p; their gap t - p is for fillers
    doubles  ranks with two fillers: one ends there, the next begins

Fillers are poured, heaviest first, into gaps: whole gaps while they last, then the gap that fits the rest best, else a
double. The smallest t for which everything fits is found by bisection, for a few `split` and `doubles` around the best.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from omni_proxy.workers.engine.placement.draft import Bin, Draft, Floats, binned

PAIR: Final = 2
NOTHING: Final = 1e-9  # of the mean rank load: an expert or a rest below it cannot be poured
SNUG: Final = 0.002  # of the mean rank load: a gap with at most this much left over is as good as a double
HALVINGS: Final = 7
TRIES: Final = 8  # numbers of split experts tried in the first pass
DOUBLES: Final = (0, 2, 5, 10, 20)  # ranks with two fillers, above the least number possible
NUDGES: Final = (-3, -2, -1, 1, 2, 3)
PROGRESS: Final = 0.998  # a new t must be this much better to be worth a bisection


@dataclass(frozen=True, slots=True)
class Problem:
    """One row: loads by rank in the row's order of weight (heaviest first), scaled to a mean rank load of 1."""

    weights: list[float]
    ranks: int
    extras: int

    @property
    def spare(self) -> int:
        """Slots that no copy needs; they count as single experts without load."""
        return PAIR * self.ranks - len(self.weights) - self.extras


@dataclass(slots=True)
class _Gaps:
    """Ranks with one single expert, by the gap it leaves, smallest first."""

    sizes: list[float]
    singles: list[tuple[int, float]]
    bins: list[Bin] = field(default_factory=list)

    def fill(self, at: int, expert: int, amount: float) -> None:
        del self.sizes[at]
        self.bins.append([self.singles.pop(at), (expert, amount)])


def paired(weights: Floats, ranks: int, extras: int, peak: float) -> Draft | None:
    """A draft of one row whose maximum is below `peak`, or None when this method finds none."""
    order = np.argsort(-weights, kind="stable")
    bins = search(Problem(weights[order].tolist(), ranks, extras), peak)
    return None if bins is None else binned(weights, order, bins, ranks, PAIR)


def search(problem: Problem, peak: float) -> list[Bin] | None:
    """The fullest bins found below `peak`; None when there are none."""
    best: list[Bin] | None = None
    least = max(1.0, problem.weights[0] / problem.ranks)
    settings = None
    for split, doubles in _grid(problem, peak):
        found = _bisect(problem, split, doubles, least, peak)
        if found:
            peak, best = found
            settings = split, doubles
    for nudge in NUDGES if settings else ():
        found = _bisect(problem, settings[0] + nudge, settings[1] + max(0, nudge), least, peak) if settings else None
        if found:
            peak, best = found
    return best


def _grid(problem: Problem, peak: float) -> Iterator[tuple[int, int]]:
    """Numbers of split experts and doubles: all heavier than `peak` must split; each rank takes two copies at most."""
    experts = len(problem.weights)
    fewest = max(1, sum(load > peak for load in problem.weights))
    most = min(experts, PAIR * problem.ranks - problem.extras)
    seen = sorted({round(fewest * (max(fewest, most) / fewest) ** (n / (TRIES - 1))) for n in range(TRIES)})
    dense = sorted({*seen, *range(fewest, min(most, fewest + TRIES * 3), 3)})
    for split in dense:
        fillers = split + problem.extras
        for more in DOUBLES:
            doubles = max(0, fillers - problem.ranks) + more
            if PAIR * doubles <= fillers:
                yield split, doubles


def _bisect(problem: Problem, split: int, doubles: int, least: float, peak: float) -> tuple[float, list[Bin]] | None:
    """The smallest t below `peak` for these settings, with its bins."""
    high = peak * PROGRESS
    best = attempt(problem, split, doubles, high)
    if best is None:
        return None
    low = least
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        bins = attempt(problem, split, doubles, middle)
        if bins is None:
            low = middle
        else:
            high, best = middle, bins
    return high, best


def attempt(problem: Problem, split: int, doubles: int, most: float) -> list[Bin] | None:
    """Bins of at most `most` load each, or None when something does not fit."""
    fillers = split + problem.extras
    halves, pairs = fillers - PAIR * doubles, problem.ranks - fillers + doubles
    if halves < 0 or pairs < 0 or doubles < 0 or not 0 < split <= len(problem.weights):
        return None
    if problem.weights[split - 1] <= NOTHING or (split < len(problem.weights) and problem.weights[split] > most):
        return None
    split_apart = _pair_up(problem, split, pairs, most)
    if split_apart is None or len(split_apart[1].sizes) != halves:
        return None
    bins, gaps = split_apart
    poured = _pour(problem.weights[:split], gaps, doubles, most)
    return None if poured is None else bins + poured


def _pair_up(problem: Problem, split: int, pairs: int, most: float) -> tuple[list[Bin], _Gaps] | None:
    """The heaviest single with the heaviest that still fits beside it, until there are enough pairs; the rest alone."""
    names = [-1] * problem.spare + list(range(len(problem.weights) - 1, split - 1, -1))
    loads = [0.0] * problem.spare + problem.weights[split:][::-1]
    alone: list[tuple[int, float]] = []
    bins: list[Bin] = []
    while len(bins) < pairs:
        if len(loads) < PAIR:
            return None
        single = names.pop(), loads.pop()
        if loads[0] > most - single[1]:
            alone.append(single)
            continue
        at = bisect_right(loads, most - single[1]) - 1
        bins.append([single, (names.pop(at), loads.pop(at))])
    alone += zip(names, loads, strict=True)
    alone.sort(key=lambda single: (-single[1], single[0]))
    return bins, _Gaps([most - load for _, load in alone], alone)


def _pour(weights: list[float], gaps: _Gaps, doubles: int, most: float) -> list[Bin] | None:
    open_double: Bin = []
    for expert, load in enumerate(weights):
        rest = load
        if open_double:
            amount = min(rest, most - open_double[0][1])
            gaps.bins.append([*open_double, (expert, amount)])
            open_double, rest = [], rest - amount
        while rest > NOTHING:
            at = bisect_left(gaps.sizes, rest)
            fits = at < len(gaps.sizes)
            if not fits and gaps.sizes:
                rest -= gaps.sizes[-1]
                gaps.fill(len(gaps.sizes) - 1, expert, gaps.sizes[-1])
            elif fits and (not doubles or gaps.sizes[at] - rest < SNUG):
                gaps.fill(at, expert, rest)
                rest = 0.0
            elif doubles:
                doubles -= 1
                amount = min(rest, most)
                rest -= amount
                if amount < most:
                    open_double = [(expert, amount)]
                else:
                    gaps.bins.append([(expert, amount)])
            else:
                return None
    last: list[Bin] = [open_double] if open_double else []
    return gaps.bins + last + [[single] for single in gaps.singles] + [[]] * doubles
