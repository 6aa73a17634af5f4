"""From an engine's names of blocks to ours. Pure.

Events carry tokens and parents, so our keys are computed here and the engine's hashes serve to find a parent and to
remove. Blocks smaller than a unit are put together: the unit's key belongs to the block that completes it, which an
engine forgets first. Knows nothing of sequence numbers.
"""

from __future__ import annotations

from typing import Final

from omni_proxy.apc.index import Tier
from omni_proxy.apc.keys import TOKEN_BYTES, UNIT_TOKENS, chain, extra_key, first_key
from omni_proxy.apc.wire import Removed, Stored

MAX_BLOCKS: Final = 1 << 22
"""Blocks of one cache that are followed at most; a larger cache is forgotten and learned anew."""
_UNIT_BYTES: Final = UNIT_TOKENS * TOKEN_BYTES


class TooManyBlocks(Exception):
    """The cache holds more blocks than are followed."""


class Translator:
    """The blocks of one cache: the engine's hash -> our key, or what a block that completes no unit leaves over."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max = max_blocks
        self._tiers: tuple[dict[int, int | tuple[int, bytes]], ...] = tuple({} for _ in Tier)
        self.block_tokens: int | None = None
        """Of the cache's blocks; None until one was stored."""
        self.unknown_parents = 0
        self.unusable = 0
        """Blocks whose size has no common measure with the unit, or differs from the first block's."""

    def __len__(self) -> int:
        return sum(map(len, self._tiers))

    @property
    def holder_block_tokens(self) -> int:
        """What the index must know: small blocks count as units."""
        return max(self.block_tokens or UNIT_TOKENS, UNIT_TOKENS)

    def stored(self, event: Stored) -> tuple[int, ...]:
        """Keys that the cache holds from now on. Raises TooManyBlocks."""
        if self.block_tokens is None and _has_keys(event.block_tokens):
            self.block_tokens = event.block_tokens
        if event.block_tokens != self.block_tokens:
            self.unusable += len(event.hashes)
            return ()
        place = self._place(event)
        if place is None:
            self.unknown_parents += 1
            return ()
        if len(self) + len(event.hashes) > self._max:
            raise TooManyBlocks
        return self._add(event, *place)

    def removed(self, event: Removed) -> tuple[int, ...]:
        """Keys that the cache has lost; hashes that are not known are ignored."""
        table = self._tiers[event.tier]
        found = (table.pop(name, None) for name in event.hashes)
        return tuple(known for known in found if isinstance(known, int))

    def clear(self) -> None:
        """The cache is empty, or nobody knows what is in it."""
        for table in self._tiers:
            table.clear()
        self.block_tokens = None

    def _place(self, event: Stored) -> tuple[int, bytes] | None:
        """The key before the event's first block and the tokens since; None when the parent is not known."""
        if event.parent is None:
            first = event.extras[0] if event.extras else ()
            return first_key(event.adapter, first), b""
        for table in self._tiers:
            known = table.get(event.parent)
            if known is not None:
                return (known, b"") if isinstance(known, int) else known
        return None

    def _add(self, event: Stored, key: int, pending: bytes) -> tuple[int, ...]:
        table = self._tiers[event.tier]
        added: list[int] = []
        size = event.block_tokens * TOKEN_BYTES
        begins = event.parent is None
        for at, name in enumerate(event.hashes):
            if event.extras and not (begins and at == 0):
                key ^= extra_key(event.extras[at])
            pending += event.tokens[at * size : (at + 1) * size]
            keys = chain(key, pending)
            if keys:
                key = keys[-1]
                pending = pending[len(keys) * _UNIT_BYTES :]
            if pending:
                table[name] = (key, pending)
            else:
                table[name] = key
                added.append(key)
        return tuple(added)


def _has_keys(block_tokens: int) -> bool:
    return block_tokens % UNIT_TOKENS == 0 or UNIT_TOKENS % block_tokens == 0
