"""What a worker will hold soon, because we have just sent it there. Pure.

A worker that publishes events tells of new blocks only after it has computed them; until then a burst of equal prompts
would be spread over all workers. So each grant counts as stored until its events have come, or until it turns out that
nothing was computed. Events may come late: whoever subscribes to a worker that has long been at work reads its history
first, and all that was sent there meanwhile would be unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Final

from omni_proxy.apc.block_index import BlockIndex
from omni_proxy.messages import Lease

RANK: Final = -1
"""Speculative blocks are a holder of their own beside the worker's real caches."""
UNANSWERED_S: Final = 30.0
"""Longest life of a grant that is not answered."""
ANSWERED_S: Final = 2.0
"""So long after an answer, and again, it is asked whether its events have come."""
UNTOLD_S: Final = 120.0
"""After an answer its events have this long to come at most."""
MAX_KEYS: Final = 1 << 20


class _Guess:
    __slots__ = ("deadline", "keys", "untold_until")

    def __init__(self, keys: Sequence[int], deadline: float) -> None:
        self.keys = keys
        self.deadline = deadline
        self.untold_until: float | None = None
        """Once it was answered: how long it may wait for its events."""


class Speculation:
    """Granted prompts as entries of the index, each key counted once for every grant that has it."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self._guesses: dict[Lease, _Guess] = {}
        self._counts: dict[str, dict[int, int]] = {}
        self._ends: list[tuple[float, int, Lease]] = []
        self._serial = 0
        self._keys = 0

    def __len__(self) -> int:
        return len(self._guesses)

    def add(self, lease: Lease, keys: Sequence[int], block_tokens: int, now: float) -> None:
        """Take a grant's blocks as stored; beyond `MAX_KEYS` nothing more is taken."""
        if not keys or self._keys + len(keys) > MAX_KEYS:
            return
        worker = lease.worker
        if not self._index.knows(worker, RANK, block_tokens):
            self.forget(worker)
            self._index.add_holder(worker, RANK, block_tokens)
        counts = self._counts.setdefault(worker, {})
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
        self._index.insert(worker, RANK, keys)
        self._keys += len(keys)
        self._guesses[lease] = _Guess(keys, now + UNANSWERED_S)
        self._end_at(now + UNANSWERED_S, lease)

    def answered(self, lease: Lease, now: float) -> None:
        """The blocks are there; the events that say so are on their way."""
        guess = self._guesses.get(lease)
        if guess is not None:
            guess.untold_until = now + UNTOLD_S
            guess.deadline = now + ANSWERED_S
            self._end_at(guess.deadline, lease)

    def evicted(self, worker: str, keys: Iterable[int]) -> None:
        """A worker has told that it lost these keys."""
        if worker in self._counts:
            self._index.remove(worker, RANK, keys)

    def doubt(self, worker: str) -> None:
        """A worker has less than was expected: forget what was answered there and not told."""
        for lease, guess in list(self._guesses.items()):
            if guess.untold_until is not None and lease.worker == worker:
                self.drop(lease)

    def drop(self, lease: Lease) -> None:
        """Nothing was computed. Ignored when the grant is not known any more."""
        guess = self._guesses.pop(lease, None)
        if guess is None:
            return
        self._keys -= len(guess.keys)
        counts = self._counts.get(lease.worker, {})
        gone: list[int] = []
        for key in guess.keys:
            left = counts.get(key, 0) - 1
            if left > 0:
                counts[key] = left
            elif counts.pop(key, None) is not None:
                gone.append(key)
        self._index.remove(lease.worker, RANK, gone)

    def expire(self, now: float) -> None:
        """Drop what has outlived its deadline."""
        ends = self._ends
        while ends and ends[0][0] <= now:
            _, _, lease = heappop(ends)
            guess = self._guesses.get(lease)
            if guess is None or guess.deadline > now:
                continue
            if guess.untold_until is None or now >= guess.untold_until or self._is_told(lease.worker, guess):
                self.drop(lease)
            else:
                guess.deadline = now + ANSWERED_S
                self._end_at(guess.deadline, lease)

    def _is_told(self, worker: str, guess: _Guess) -> bool:
        return self._index.tells(worker, guess.keys[-1])

    def _end_at(self, instant: float, lease: Lease) -> None:
        self._serial += 1
        heappush(self._ends, (instant, self._serial, lease))

    def forget(self, worker: str) -> None:
        """A worker has lost its cache, or is gone."""
        for lease in [lease for lease in self._guesses if lease.worker == worker]:
            self.drop(lease)
        self._counts.pop(worker, None)
        self._index.forget_holder(worker, RANK)
