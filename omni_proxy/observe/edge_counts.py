"""What only those that hold clients can count: gaps within streams, time in the tokenizer. Compiled.

A front adds here and hands on what is new a few times a second, so that it reaches the one scheduler's metrics
whichever process it was counted in. A piece of a stream costs one addition to a list.
"""

from __future__ import annotations

from typing import Final

from omni_proxy.observe.edge_news import EdgeNews

GAP_SLOTS: Final = 2048
"""Gaps are counted by milliseconds: what the event loop's clock can tell. Longer ones are summed apart."""


class EdgeCounts:
    """One front's counts since they were last handed on."""

    __slots__ = ("_gaps", "_long", "_long_s", "_tokenized")

    def __init__(self) -> None:
        self._gaps = [0] * GAP_SLOTS
        self._long = 0
        self._long_s = 0.0
        self._tokenized: list[float] = []

    def gap(self, seconds: float) -> None:
        """A piece of a stream came so long after the one before it."""
        at = int(seconds * 1000.0 + 0.5)
        if 0 <= at < GAP_SLOTS:
            self._gaps[at] += 1
        else:
            self._long += 1
            self._long_s += seconds

    def gaps(self, counts: list[tuple[int, int]], longer: int, longer_s: float) -> None:
        """So many gaps of so many milliseconds, all below `GAP_SLOTS`, and longer ones of so many seconds together."""
        for ms, count in counts:
            self._gaps[ms] += count
        self._long += longer
        self._long_s += longer_s

    def tokenized(self, seconds: float) -> None:
        """The tokenizer worked so long on a prompt."""
        self._tokenized.append(seconds)

    def take(self) -> EdgeNews | None:
        """What is new; None where nothing is."""
        gaps = [(ms, count) for ms, count in enumerate(self._gaps) if count]
        if not gaps and not self._long and not self._tokenized:
            return None
        for ms, _ in gaps:
            self._gaps[ms] = 0
        news = EdgeNews(tuple(gaps), self._long, self._long_s, tuple(self._tokenized))
        self._long, self._long_s, self._tokenized = 0, 0.0, []
        return news
