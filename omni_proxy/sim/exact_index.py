"""Which worker holds which block, exactly and at once: what a gateway could know at best. Pure.

Implements the scheduler's `PrefixIndex` over what simulated engines store and evict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence


class ExactIndex:
    """Block key -> set of workers, as bits."""

    def __init__(self, workers: Sequence[str], block_tokens: int) -> None:
        self._names = tuple(workers)
        self._bits = {name: 1 << place for place, name in enumerate(workers)}
        self._holders: dict[int, int] = {}
        self._block_tokens = block_tokens

    def stored(self, worker: str) -> Callable[[object, Iterable[int]], None]:
        """What to call with a job and its blocks that a worker has stored."""
        bit, holders = self._bits[worker], self._holders

        def store(job: object, keys: Iterable[int]) -> None:
            for key in keys:
                holders[key] = holders.get(key, 0) | bit

        return store

    def removed(self, worker: str) -> Callable[[Iterable[int]], None]:
        """What to call with the blocks that a worker has evicted."""
        keep, holders = ~self._bits[worker], self._holders

        def remove(keys: Iterable[int]) -> None:
            for key in keys:
                left = holders.get(key, 0) & keep
                if left:
                    holders[key] = left
                else:
                    holders.pop(key, None)

        return remove

    def match(self, keys: Sequence[int]) -> Mapping[str, int]:
        """Cached prefix length in tokens for each worker that holds any of it."""
        found: dict[str, int] = {}
        alive = -1
        for depth, key in enumerate(keys):
            here = self._holders.get(key, 0) & alive
            if here != alive:
                self._note(found, alive & ~here if alive != -1 else 0, depth)
                alive = here
            if not here:
                return found
        if alive != -1:
            self._note(found, alive, len(keys))
        return found

    def _note(self, found: dict[str, int], workers: int, depth: int) -> None:
        while workers:
            low = workers & -workers
            found[self._names[low.bit_length() - 1]] = depth * self._block_tokens
            workers ^= low
