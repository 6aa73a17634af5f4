"""How far a prompt is what (nearly) everybody sends: the beginning that tells no conversation from another. Pure.

Recent prompts are counted by their keys, each only as deep as its beginning is popular, so that the memory stays small
whatever comes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

WINDOW: Final = 1024
"""When so many prompts were counted, all counts are halved."""
COMMON_SHARE: Final = 0.5
"""A beginning that more than this share of the traffic has is no sign of a conversation."""
_COUNTED_SHARE: Final = 0.1
_MOST_KEYS: Final = 16_384


class Popularity:
    """Counts of recent beginnings."""

    def __init__(self) -> None:
        self._total = 0.0
        self._counts: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def count(self, keys: Sequence[int]) -> None:
        """Take a prompt into account."""
        self._total += 1
        least = _COUNTED_SHARE * self._total
        for key in keys:
            seen = self._counts.get(key, 0.0) + 1
            self._counts[key] = seen
            if seen < least:
                break
        if self._total >= WINDOW or len(self._counts) > _MOST_KEYS:
            self._age()

    def own_part(self, keys: Sequence[int]) -> int | None:
        """The first key that is not common to the traffic; the last if all are; None for no keys."""
        if not keys:
            return None
        common = max(COMMON_SHARE * self._total, 2.0)
        for key in keys:
            if self._counts.get(key, 0.0) <= common:
                return key
        return keys[-1]

    def _age(self) -> None:
        self._total /= 2
        self._counts = {key: seen / 2 for key, seen in self._counts.items() if seen >= 2}
