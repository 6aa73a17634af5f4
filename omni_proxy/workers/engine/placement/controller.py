"""The live controller: a forecast from windows of expert loads, new shares every window, a few moves every few windows.

Pure: windows in, placements out. Counting tokens, copying weights and switching between steps are the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from omni_proxy.workers.engine.placement.errors import Fault, PlacementError
from omni_proxy.workers.engine.placement.forecast import MEMORIES, Forecast
from omni_proxy.workers.engine.placement.loads import Loads, checked
from omni_proxy.workers.engine.placement.match import Move, moves_between
from omni_proxy.workers.engine.placement.moves import MoveOptions, improved, reshared
from omni_proxy.workers.engine.placement.plan import Placement


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
        before, moves = self.placement, self._options.moves
        if self._windows % self._options.interval:
            self.placement = reshared(before, expected, moves.split, moves.spread)
        else:
            self.placement = improved(before, expected, moves)
        return Step(self.placement, tuple(moves_between(before, self.placement)))
