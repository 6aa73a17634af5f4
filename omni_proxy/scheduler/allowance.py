"""What may be spent on work that nobody has asked for: buckets that fill as time passes. Pure."""

from __future__ import annotations

from typing import Final

_SAVED_S: Final = 10.0
"""What is not spent is saved up for so long."""


class Allowance:
    """So much a second; it begins full, and one thing may cost more than is there as long as anything is."""

    __slots__ = ("_at", "_left", "_rate")

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._left = rate * _SAVED_S
        self._at = now

    def has(self, now: float) -> bool:
        """Is anything left?"""
        self._left = min(self._rate * _SAVED_S, self._left + self._rate * (now - self._at))
        self._at = now
        return self._left > 0

    def spend(self, amount: float) -> None:
        """Take it off, also below nothing: then it has to fill up first."""
        self._left -= amount

    def back_at(self) -> float:
        """The instant from which something is there again."""
        return self._at - min(0.0, self._left) / self._rate + 1e-6
