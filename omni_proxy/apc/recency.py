"""What a worker that tells nothing probably holds: the blocks it used last, as many as fit its cache. Pure.

Engines free a prompt's blocks from its end, so the beginning of a prefix is forgotten last; the same here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

_SHRINK: Final = 0.97
_LEAST_SHARE: Final = 0.25


class RecencyModel:
    """The keys of one worker's cache, least recently used first. `capacity_blocks` bounds them."""

    def __init__(self, capacity_blocks: int) -> None:
        self._given = max(1, capacity_blocks)
        self._capacity = float(self._given)
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def capacity_blocks(self) -> int:
        """How many blocks the worker is taken to keep: what it names, corrected by what it reported."""
        return int(self._capacity)

    def use(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """A prompt was computed there: (keys that are new, keys that had to go)."""
        known = self._keys
        new = [key for key in keys if key not in known]
        for key in reversed(keys):
            known[key] = None
            known.move_to_end(key)
        return new, self._trim()

    def drop(self, keys: Sequence[int]) -> list[int]:
        """Blocks turned out not to be there; returns those that were taken to be."""
        gone = [key for key in keys if key in self._keys]
        for key in gone:
            del self._keys[key]
        return gone

    def clear(self) -> list[int]:
        """The cache is empty; returns what it was taken to hold."""
        gone = list(self._keys)
        self._keys.clear()
        return gone

    def correct(self, predicted_tokens: int, reported_tokens: int, tolerance_tokens: int) -> list[int]:
        """Learn from a report how much the worker really keeps; returns keys that had to go."""
        if reported_tokens + tolerance_tokens < predicted_tokens:
            self._capacity = max(self._given * _LEAST_SHARE, self._capacity * _SHRINK)
        elif reported_tokens > predicted_tokens + tolerance_tokens:
            self._capacity = min(float(self._given), self._capacity / _SHRINK)
        return self._trim()

    def _trim(self) -> list[int]:
        gone: list[int] = []
        while len(self._keys) > self._capacity:
            gone.append(self._keys.popitem(last=False)[0])
        return gone
