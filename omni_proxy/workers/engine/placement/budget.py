"""Redundancy over layers: a replica goes where it lowers the sum over layers of the largest rank load the most.

A layer's curve (largest load against extra copies) falls in steps, so single copies often gain nothing; the lower
convex hull of the curve joins the steps, and the budget buys hull pieces, steepest first.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from omni_proxy.workers.engine.placement.draft import Floats, Ints

BELOW_MEAN = 0.02  # worth of lowering the largest copy below the mean rank load: it leaves room for drift


def gains_curve(peak: Floats) -> Floats:
    """The expected largest rank load for 0, 1, 2 … extra copies [rows, extras + 1], from the largest load per copy."""
    return np.asarray(np.maximum(peak, 1.0) + BELOW_MEAN * peak, dtype=np.float64)


def divide(curves: Floats, budget: int) -> Ints:
    """Extra copies per row that add up to `budget`, or to the end of all curves when that comes first."""
    extras = np.zeros(len(curves), np.int64)
    left = min(budget, len(curves) * (curves.shape[1] - 1))
    pieces = sorted(
        (-slope, row, start, stop) for row, curve in enumerate(curves) for start, stop, slope in hull(curve)
    )
    for _, row, start, stop in pieces:
        step = min(stop - start, left)
        extras[row] = start + step
        left -= step
        if not left:
            break
    return extras


def hull(curve: Floats) -> list[tuple[int, int, float]]:
    """Pieces (start, stop, gain per copy) of the lower convex hull of a falling curve, left to right."""
    corners = [0]
    values = curve.tolist()
    for x in range(1, len(values)):
        while len(corners) > 1 and _bends_up(values, corners[-2], corners[-1], x):
            corners.pop()
        corners.append(x)
    return [(a, b, (values[a] - values[b]) / (b - a)) for a, b in pairwise(corners)]


def _bends_up(values: list[float], a: int, b: int, c: int) -> bool:
    """Corner b lies on or above the line from a to c."""
    return (values[b] - values[a]) * (c - a) >= (values[c] - values[a]) * (b - a)
