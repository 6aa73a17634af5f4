"""A worker's KV memory: pinned blocks, cached blocks in LRU order, and tokens that are in no shared block. Pure.

    capacity = pinned blocks · block + private tokens + cached blocks · block + free

A block is pinned while a sequence uses it and cached afterwards; cached blocks make room, the least recently used
first. Private tokens belong to one sequence: partly filled blocks, prompt still to be computed, the answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

Removed = Callable[[list[int]], None]


class BlockCache:
    """KV memory of one worker in tokens. `on_removed` hears which blocks were evicted."""

    def __init__(self, capacity_tokens: int, block_tokens: int, on_removed: Removed) -> None:
        self.capacity_tokens = capacity_tokens
        self.block_tokens = block_tokens
        self.private_tokens = 0
        self._pins: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._on_removed = on_removed

    @property
    def used_tokens(self) -> int:
        """Tokens that cannot make room."""
        return len(self._pins) * self.block_tokens + self.private_tokens

    @property
    def cached_blocks(self) -> int:
        return len(self._cached)

    @property
    def room_tokens(self) -> int:
        """Tokens that could be taken, by eviction where needed."""
        return self.capacity_tokens - self.used_tokens

    def match(self, keys: Sequence[int]) -> int:
        """How many blocks from the beginning are here."""
        pins, cached = self._pins, self._cached
        for index, key in enumerate(keys):
            if key not in pins and key not in cached:
                return index
        return len(keys)

    def admit(self, keys: Sequence[int], private_tokens: int) -> bool:
        """Pin blocks that are here and take private tokens; False, and no change, without room for both."""
        needed = private_tokens + self.block_tokens * sum(1 for key in keys if key not in self._pins)
        if needed > self.room_tokens:
            return False
        for key in keys:
            self._pin(key)
        self.take(private_tokens)
        return True

    def take(self, tokens: int) -> None:
        """Count private tokens; the caller has asked for room."""
        self.private_tokens += tokens
        self._make_room()

    def give(self, tokens: int) -> None:
        """Return private tokens."""
        self.private_tokens -= tokens
        assert self.private_tokens >= 0, "more private tokens returned than taken"

    def store(self, keys: Sequence[int]) -> list[int]:
        """Turn private tokens of one sequence into shared blocks; returns those that are new here."""
        self.give(len(keys) * self.block_tokens)
        new: list[int] = []
        for key in keys:
            if key not in self._pins and key not in self._cached:
                new.append(key)
            self._pin(key)
        return new

    def release(self, keys: Sequence[int]) -> None:
        """Unpin; a prefix stays longer than what stands behind it."""
        for key in reversed(keys):
            count = self._pins[key] - 1
            if count:
                self._pins[key] = count
            else:
                del self._pins[key]
                self._cached[key] = None

    def clear(self) -> None:
        """Forget cached blocks."""
        gone = list(self._cached)
        self._cached.clear()
        if gone:
            self._on_removed(gone)

    def lose(self) -> None:
        """Everything is gone, what is in use as well; nobody is told."""
        self._pins.clear()
        self._cached.clear()
        self.private_tokens = 0

    def _pin(self, key: int) -> None:
        count = self._pins.get(key)
        if count is None:
            self._cached.pop(key, None)
            self._pins[key] = 1
        else:
            self._pins[key] = count + 1

    def _make_room(self) -> None:
        excess = self.used_tokens + len(self._cached) * self.block_tokens - self.capacity_tokens
        if excess <= 0:
            return
        gone: list[int] = []
        while excess > 0 and self._cached:
            key, _ = self._cached.popitem(last=False)
            gone.append(key)
            excess -= self.block_tokens
        assert excess <= 0, "KV memory over its capacity"
        self._on_removed(gone)
