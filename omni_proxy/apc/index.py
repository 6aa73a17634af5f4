"""The questions that the scheduler asks about prefixes, and the answers of a gateway that does not ask. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final, Protocol

from omni_proxy.messages import BlocksRemoved, BlocksStored, CacheCleared, Lease, WorkerSpec


class PrefixIndex(Protocol):
    """Knows which worker holds which blocks."""

    def match(self, keys: Sequence[int]) -> Mapping[str, int]:
        """Cached prefix length in tokens for each worker that holds any of it."""
        ...


class CacheLearner(Protocol):
    """Is told what could change a cache. Every grant ends as answered or dropped. Instants in seconds, monotonic."""

    def member(self, worker: WorkerSpec) -> None:
        """A worker is there, or is described anew."""
        ...

    def lost(self, name: str, removed: bool) -> None:
        """A worker does not answer any more, or is no member any more."""
        ...

    def heard(self, event: BlocksStored | BlocksRemoved | CacheCleared) -> None:
        """A worker told what is in its cache."""
        ...

    def granted(self, lease: Lease, keys: Sequence[int], now: float) -> int | None:
        """A prompt is on its way to a worker; returns the tokens that it should find cached, if known."""
        ...

    def answered(self, lease: Lease, predicted_tokens: int | None, reported_tokens: int | None, now: float) -> None:
        """The prompt was computed; what the worker found of it is compared with what was expected."""
        ...

    def dropped(self, lease: Lease) -> None:
        """The prompt was not computed, as far as anybody knows."""
        ...


class NoIndex:
    """`kv_cache_policy: independent`: workers cache as they like and nobody asks."""

    def match(self, keys: Sequence[int]) -> Mapping[str, int]:
        return {}


class Tier(IntEnum):
    """Where a worker keeps a block, nearest first."""

    DEVICE = 0
    CPU = 1
    DISK = 2


TIER_WORTH: Final[Mapping[Tier, float]] = {Tier.DEVICE: 1.0, Tier.CPU: 0.75, Tier.DISK: 0.4}
"""What a token found there is worth against one on the device: the rest is the time to load it."""
