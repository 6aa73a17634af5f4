"""Which neighbouring blocks of a prompt were stored together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


def block_runs(keys: Sequence[int], stored: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, end) of each run of neighbours among a prompt's `keys` that were `stored`, in their order."""
    places = {key: place for place, key in enumerate(keys)}
    at = sorted(places[key] for key in stored)
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(at)) if b != a + 1), len(at)]
    return [(at[a], at[b - 1] + 1) for a, b in pairwise(cuts) if a < b]
