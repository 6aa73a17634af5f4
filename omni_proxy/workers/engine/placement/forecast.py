"""What the next window of loads will be, and by how much it will be something else."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_proxy.workers.engine.placement.errors import Fault, PlacementError
from omni_proxy.workers.engine.placement.loads import Loads

MEMORIES: Final = (0.0, 0.3, 0.6)
ERROR_MEMORY: Final = 0.9  # weight of past errors when the forecasts are compared


class Forecast:
    """Exponential averages of windows, each as shares of its layer; the one that has predicted best so far is used.

    `memories` are weights of the past, 0 (the last window alone) to below 1: a long one suits noisy loads, a short one
    loads that wander. A layer that had no tokens in a window keeps its forecasts.
    """

    def __init__(self, memories: tuple[float, ...] = MEMORIES) -> None:
        if not memories or not all(0 <= memory < 1 for memory in memories):
            raise PlacementError(Fault.BAD_OPTION, f"forecast memories must be from 0 to below 1, got {memories}")
        self._memories = memories
        self._errors = [0.0] * len(memories)
        self._expected: list[Loads] = []

    def observe(self, window: Loads) -> Loads:
        """Take in a window of token counts [layers, experts]; return the expected shares of the next one."""
        window = np.asarray(window, dtype=np.float64)
        totals = window.sum(axis=1, keepdims=True)
        shares = np.divide(window, totals, out=np.full_like(window, 1.0 / window.shape[1]), where=totals > 0)
        if not self._expected:
            self._expected = [shares] * len(self._memories)
        else:
            self._learn(shares, totals > 0)
        return self._expected[self._errors.index(min(self._errors))]

    def _learn(self, shares: Loads, seen: NDArray[np.bool_]) -> None:
        for nth, (memory, expected) in enumerate(zip(self._memories, self._expected, strict=True)):
            error = float((np.abs(shares - expected) * seen).sum())
            self._errors[nth] = ERROR_MEMORY * self._errors[nth] + error
            self._expected[nth] = np.where(seen, memory * expected + (1 - memory) * shares, expected)


def deviation(windows: NDArray[np.float64]) -> float:
    """The relative deviation of expert loads between the forecast and the window that came; 0 for a single window.

    A robust estimate from the last two: the median deviation of the logarithms, scaled as for a normal distribution.
    """
    if len(windows) < 2:
        return 0.0
    forecast = Forecast()
    for window in windows[:-1]:
        expected = forecast.observe(window)
    came = windows[-1] / windows[-1].sum(axis=1, keepdims=True)
    both = (expected > 0) & (came > 0)
    return float(np.median(np.abs(np.log(came[both] / expected[both]))) / 0.6745) if both.any() else 0.0
