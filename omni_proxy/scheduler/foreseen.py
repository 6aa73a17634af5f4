"""Blocks that workers will have cached soon: of prompts that were granted a moment ago, or are planned for them. Pure.

The index tells what is cached. This tells what is about to be, so that a prompt whose prefix is under way somewhere can
wait for it there instead of having it computed once more elsewhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

from omni_proxy.apc.keys import UNIT_TOKENS

KEPT_S: Final = 1.0
"""Longest time for which a waiting request goes on with what the index said; until then what was granted stays here."""


class _Prompt:
    __slots__ = ("keys", "until", "worker")

    def __init__(self, worker: str, keys: Sequence[int], until: float) -> None:
        self.worker = worker
        self.keys = keys
        self.until = until


class Foreseen:
    """Prompts by their first block. A key stands for the whole prefix that ends with it."""

    def __init__(self) -> None:
        self._by_first: dict[int, list[_Prompt]] = {}
        self._granted: deque[_Prompt] = deque()
        self._planned: list[_Prompt] = []

    def granted(self, worker: str, keys: Sequence[int], until: float) -> None:
        """A prompt is on its way to a worker, which should have it by the instant `until`."""
        if keys:
            self._granted.append(self._add(worker, keys, until + KEPT_S))

    def plan(self, worker: str, keys: Sequence[int]) -> None:
        """Within one walk: a prompt is to go to a worker."""
        if keys:
            self._planned.append(self._add(worker, keys, 0.0))

    def begin_walk(self, now: float) -> None:
        """Forget what was planned, and what must be cached by now."""
        for prompt in self._planned:
            self._remove(prompt)
        self._planned.clear()
        while self._granted and self._granted[0].until <= now:
            self._remove(self._granted.popleft())

    def _add(self, worker: str, keys: Sequence[int], until: float) -> _Prompt:
        prompt = _Prompt(worker, keys, until)
        self._by_first.setdefault(keys[0], []).append(prompt)
        return prompt

    def _remove(self, prompt: _Prompt) -> None:
        row = self._by_first[prompt.keys[0]]
        row.remove(prompt)
        if not row:
            del self._by_first[prompt.keys[0]]

    def add_to(self, cached: Mapping[str, int], keys: Sequence[int]) -> Mapping[str, int]:
        """What each worker will have of a prompt, in tokens, given what it has by now."""
        row = self._by_first.get(keys[0]) if keys else None
        if row is None:
            return cached
        found: dict[str, int] | None = None
        for prompt in row:
            have = (cached if found is None else found).get(prompt.worker, 0) // UNIT_TOKENS
            other = prompt.keys
            most = min(len(keys), len(other))
            if have >= most or keys[have] != other[have]:
                continue
            if found is None:
                found = dict(cached)
            found[prompt.worker] = common_blocks(keys, other, have + 1, most) * UNIT_TOKENS
        return cached if found is None else found


def common_blocks(keys: Sequence[int], other: Sequence[int], low: int, high: int) -> int:
    """How many blocks two prompts share, at least `low` and at most `high`; equal keys mean equal prefixes."""
    while low < high:
        middle = (low + high + 1) // 2
        if keys[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
