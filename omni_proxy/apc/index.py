"""The question that the scheduler asks about prefixes, and the answer of a gateway that does not ask. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class PrefixIndex(Protocol):
    """Knows which worker holds which blocks."""

    def match(self, keys: Sequence[int]) -> Mapping[str, int]:
        """Cached prefix length in tokens for each worker that holds any of it."""
        ...


class NoIndex:
    """`kv_cache_policy: independent`: workers cache as they like and nobody asks."""

    def match(self, keys: Sequence[int]) -> Mapping[str, int]:
        return {}
