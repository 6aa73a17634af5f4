"""Lower bounds on the largest rank load (mean rank = 1) that no placement with so many copies and slots can beat.

Three, of which the largest counts:

    mean     some rank carries at least the mean: 1
    copy     a rank carries at least an expert's load divided by its copies; greedy copies make that smallest
    heaviest the k heaviest experts have at most k + extras copies, so they sit on at most that many ranks; when all
             ranks have the same slots, the experts that find no slot elsewhere must sit on those ranks as well
"""

from __future__ import annotations

import numpy as np

from omni_proxy.workers.engine.placement.copies import replicate
from omni_proxy.workers.engine.placement.draft import Floats, Ints


def lower_bound(weights: Floats, ranks: int, extras: Ints, slots: int | None) -> Floats:
    """The bound of each row; `slots` is the number per rank, None when ranks may have different numbers."""
    most = int(extras.max(initial=0))
    peak = replicate(weights, most, ranks).peak[np.arange(len(weights)), extras]
    return np.maximum(np.maximum(1.0, peak), heaviest_bound(weights, ranks, extras, slots))


def heaviest_bound(weights: Floats, ranks: int, extras: Ints, slots: int | None) -> Floats:
    """The bound from the k heaviest experts, for every k, and every number of ranks they may sit on."""
    descending = -np.sort(-weights, axis=1)
    heavy = np.cumsum(descending, axis=1)
    light = np.concatenate([np.zeros((len(weights), 1)), np.cumsum(descending[:, ::-1], axis=1)], axis=1)
    bound = np.ones(len(weights))
    for count in range(1, min(weights.shape[1], ranks) + 1):
        bound = np.maximum(bound, _one_bound(heavy[:, count - 1], light, count, ranks, extras, slots))
    return bound


def _one_bound(heavy: Floats, light: Floats, count: int, ranks: int, extras: Ints, slots: int | None) -> Floats:
    others = light.shape[1] - 1 - count
    most = np.minimum(count + extras, ranks)
    if slots is None:
        return np.asarray(heavy / most, dtype=np.float64)
    sat_on = np.arange(-(-count // slots), ranks + 1)
    forced = np.clip(others - (ranks - sat_on) * slots, 0, others)
    loads = (heavy[:, None] + light[:, forced]) / sat_on
    loads[sat_on[None] > most[:, None]] = np.inf
    return np.asarray(loads.min(axis=1), dtype=np.float64)
