"""How workers' experts are loaded, by window: from their own counters to max/mean and experts that idle. Pure.

A worker counts, since its engine started, the rows that its router sent to each expert of each layer. Two readings
make a window; it closes when it holds enough rows to say something:

    engine started ──── reading ──── reading ──── reading ────►
                   └── window: [layer][expert] rows ──┘└─ next (open) ─

Knows neither sockets nor who reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import sub
from typing import Final

from msgspec import Struct

Layers = tuple[tuple[int, ...], ...]
"""Rows by [layer][expert]; a layer without experts is empty or has zeros only."""

ROWS_PER_EXPERT: Final = 100
"""A window closes when its fullest layer has that many for each expert: chance alone then makes a max/mean of 1.28 of
256 equal experts, and leaves none idle."""


class ExpertReading(Struct, frozen=True):
    """What a worker says at one instant."""

    tokens: Layers
    """Rows since its engine started."""
    ranks: tuple[float, ...] = ()
    """Largest over mean rows per rank by layer, as the worker itself measures; empty where it has one rank."""


class ExpertLoad(Struct, frozen=True):
    """One worker's experts: the last window that closed, or all that is known before the first one has."""

    worker: str
    at: float
    """When the window ended, seconds of the core's clock."""
    window_s: float | None
    """Its length; None: since the engine started."""
    closed: bool
    """False: too few rows so far to judge by."""
    tokens: Layers
    """Rows of the window by [layer][expert]."""
    total: Layers
    """Rows since the engine started."""
    ranks: tuple[float, ...]

    @property
    def imbalances(self) -> list[float | None]:
        """Largest over mean rows per expert, by layer; None where no rows came."""
        return [_imbalance(layer) for layer in self.tokens]

    @property
    def imbalance(self) -> float | None:
        """Mean of that over the layers that had rows; None where no layer had any."""
        return _mean([ratio for ratio in self.imbalances if ratio is not None])

    @property
    def rank_imbalance(self) -> float | None:
        """Mean over the layers of largest over mean rows per rank; None where there is one rank."""
        return _mean(self.ranks)

    @property
    def idle(self) -> int:
        """Pairs of layer and expert that got no row, in layers that had some."""
        return sum(layer.count(0) for layer in self.tokens if any(layer))


class ExpertLoads:
    """The loads of all workers that tell. Readings come in order of time."""

    def __init__(self) -> None:
        self._workers: dict[str, _Windows] = {}

    def read(self, worker: str, reading: ExpertReading, now: float) -> None:
        """Take in what a worker says; empty counters say nothing."""
        if any(reading.tokens):
            self._workers.setdefault(worker, _Windows(worker)).read(reading, now)

    def keep(self, workers: Collection[str]) -> None:
        """Forget everyone else."""
        for name in [name for name in self._workers if name not in workers]:
            del self._workers[name]

    def all(self) -> list[ExpertLoad]:
        """Every known worker's load, by name."""
        return [load for name in sorted(self._workers) if (load := self._workers[name].load) is not None]


class _Windows:
    """One worker's windows."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._base: Layers = ()
        """The counters where the open window began; empty: all were zero then."""
        self._base_at: float | None = None
        self.load: ExpertLoad | None = None

    def read(self, reading: ExpertReading, now: float) -> None:
        rows = _grown(reading.tokens, self._base)
        if rows is None:  # the engine began anew
            rows, self._base, self._base_at = reading.tokens, (), None
        closes = any(layer and sum(layer) >= ROWS_PER_EXPERT * len(layer) for layer in rows)
        old = self.load
        if closes or old is None or not old.closed:
            window_s = None if self._base_at is None else now - self._base_at
            self.load = ExpertLoad(self._worker, now, window_s, closes, rows, reading.tokens, reading.ranks)
        else:
            self.load = ExpertLoad(
                old.worker, old.at, old.window_s, True, old.tokens, reading.tokens, reading.ranks or old.ranks
            )
        if closes:
            self._base, self._base_at = reading.tokens, now


def _grown(after: Layers, before: Layers) -> Layers | None:
    """How the counters have grown; None where they cannot have grown from one to the other."""
    if not before:
        return after
    if list(map(len, after)) != list(map(len, before)):
        return None
    rows = tuple(tuple(map(sub, new, old)) for new, old in zip(after, before, strict=True))
    return None if any(min(row, default=0) < 0 for row in rows) else rows


def _imbalance(rows: Sequence[int]) -> float | None:
    total = sum(rows)
    return max(rows) * len(rows) / total if total else None


def _mean(values: Iterable[float]) -> float | None:
    listed = list(values)
    return sum(listed) / len(listed) if listed else None
