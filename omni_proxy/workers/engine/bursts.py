"""How many steps one call takes before anybody looks again. Pure.

A step of a small model is shorter than what happens around it: planning, handing over, drawing, telling. While a batch
only decodes and nothing waits, several steps go in one call, each of which takes the tokens that the one before has
drawn. The tokens are the same; they come a few at a time, and an arrival waits for the end of the call.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import Final

from omni_proxy.workers.engine.sequence import Sequence

LONGEST_S: Final = 0.008
"""So long may one call take, as nobody is heard meanwhile."""
_LATEST: Final = 5


class Bursts:
    """Decides for one engine, and learns what its steps take."""

    def __init__(self, most: int, max_model_len: int) -> None:
        self._most = most
        self._max_model_len = max_model_len
        self._seconds: dict[int, deque[float]] = {}
        """Of the latest steps of so many sequences."""

    def steps(self, sequences: list[Sequence]) -> int:
        """For a batch that only decodes."""
        known = self._seconds.get(len(sequences))
        if known is None or not all(seq.draws_plainly for seq in sequences):
            return 1
        left = min(
            min(seq.request.sampling.max_tokens - seq.num_generated, self._max_model_len - len(seq.tokens))
            for seq in sequences
        )
        return max(1, min(self._most, left, int(LONGEST_S / max(1e-9, median(known)))))

    def took(self, sequences: int, seconds: float) -> None:
        """A step of so many sequences that only decodes, without drafts, has taken so long."""
        self._seconds.setdefault(sequences, deque(maxlen=_LATEST)).append(seconds)
