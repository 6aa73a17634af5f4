"""Which worker holds which block, exactly and at once: what a gateway could know at best. Pure.

Implements the scheduler's `PrefixIndex` over what simulated engines store and evict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from omni_proxy.apc.keys import UNIT_TOKENS


class ExactIndex:
    """Block key -> set of workers, as bits."""

    def __init__(self, workers: Sequence[str], block_tokens: int) -> None:
        self._names = tuple(workers)
        self._bits = {name: 1 << place for place, name in enumerate(workers)}
        self._holders: dict[int, int] = {}
        self._block_tokens = block_tokens

    def store(self, worker: str, keys: Iterable[int]) -> None:
        """A worker has stored blocks."""
        bit, holders = self._bits[worker], self._holders
        for key in keys:
            holders[key] = holders.get(key, 0) | bit

    def remove(self, worker: str, keys: Iterable[int]) -> None:
        """A worker has evicted blocks."""
        keep, holders = ~self._bits[worker], self._holders
        for key in keys:
            left = holders.get(key, 0) & keep
            if left:
                holders[key] = left
            else:
                holders.pop(key, None)

    def clear(self, worker: str) -> None:
        """A worker has lost all its blocks."""
        self.remove(worker, [key for key, holders in self._holders.items() if holders & self._bits[worker]])

    def match(self, keys: Sequence[int]) -> Mapping[str, int]:
        """Cached prefix length in tokens for each worker that holds any of it; `keys` are those of units."""
        found: dict[str, int] = {}
        alive, stride = -1, self._block_tokens // UNIT_TOKENS
        blocks = keys[stride - 1 :: stride]
        for depth, key in enumerate(blocks):
            here = self._holders.get(key, 0) & alive
            if here != alive:
                self._note(found, alive & ~here if alive != -1 else 0, depth)
                alive = here
            if not here:
                return found
        if alive != -1:
            self._note(found, alive, len(blocks))
        return found

    def _note(self, found: dict[str, int], workers: int, depth: int) -> None:
        while workers:
            low = workers & -workers
            found[self._names[low.bit_length() - 1]] = depth * self._block_tokens
            workers ^= low
