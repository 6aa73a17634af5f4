"""The live controller: a forecast from windows of expert loads, new shares every window, a few moves every few windows.

Pure: windows in, placements out. Counting tokens, copying weights and switching between steps are the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from omni_proxy.workers.engine.placement.errors import Fault, PlacementError
from omni_proxy.workers.engine.placement.loads import Loads, checked
from omni_proxy.workers.engine.placement.match import Move, moves_between
from omni_proxy.workers.engine.placement.moves import MoveOptions, improved, reshared
from omni_proxy.workers.engine.placement.plan import Placement

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


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """Moves are considered every `interval` windows; shares follow every window."""

    moves: MoveOptions = field(default_factory=MoveOptions)
    interval: int = 2
    memories: tuple[float, ...] = MEMORIES

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise PlacementError(Fault.BAD_OPTION, f"the interval must be at least 1 window, got {self.interval}")


@dataclass(frozen=True, slots=True)
class Step:
    """What to do before the next window: copy the weights of `moves`, then serve by `placement`."""

    placement: Placement
    moves: tuple[Move, ...]


class Controller:
    """Holds the placement that is being served and decides the next one."""

    def __init__(self, placement: Placement, options: ControllerOptions) -> None:
        self._options = options
        self._forecast = Forecast(options.memories)
        self._windows = 0
        self.placement = placement

    def observe(self, window: Loads) -> Step:
        """Take in the window that has just been served. Windows without any token change nothing."""
        window = np.asarray(window, dtype=np.float64)
        if window.shape != (self.placement.layers, self.placement.experts):
            raise PlacementError(Fault.LOADS_SHAPE, f"a window of shape {window.shape} does not fit the placement")
        if not window.any():
            return Step(self.placement, ())
        expected = checked(self._forecast.observe(window))
        self._windows += 1
        before, split = self.placement, self._options.moves.split
        if self._windows % self._options.interval:
            self.placement = reshared(before, expected, split)
        else:
            self.placement = improved(before, expected, self._options.moves)
        return Step(self.placement, tuple(moves_between(before, self.placement)))
