"""What a front hands on of its counts. A module of its own: structs do not compile."""

from __future__ import annotations

from msgspec import Struct


class EdgeNews(Struct, frozen=True, tag=True):
    """Counts since the last news of the same front."""

    gaps: tuple[tuple[int, int], ...] = ()
    """(milliseconds, how many) of gaps between pieces of streams."""
    long_gaps: int = 0
    """Gaps too long for that."""
    long_gaps_s: float = 0.0
    """And their sum."""
    tokenized_s: tuple[float, ...] = ()
    """How long the tokenizer worked on each prompt."""
