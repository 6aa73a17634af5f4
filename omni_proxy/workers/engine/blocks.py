"""Who holds which KV block: reference counts, the prefix cache, pinned blocks. Pure.

A block is in exactly one of three places: *held* (reference count > 0), *idle* (count 0, but its content is known
and may be found again) or *blank* (count 0, content unknown). Knows nothing of requests, bytes or time.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

Key = bytes
"""Identity of a full block's content: 16 bytes that chain all tokens up to the block's end, and the salt."""


class BlockError(RuntimeError):
    """A block was freed, pinned or published against the rules: a fault of the caller."""


def chain_key(parent: Key, tokens: Sequence[int]) -> Key:
    """Key of the block that holds `tokens` after the prefix of `parent`."""
    return blake2b(array("q", tokens).tobytes(), key=parent, digest_size=16).digest()


def root_key(salt: str = "") -> Key:
    """Parent of a first block. Prompts of different salts never share a key."""
    return blake2b(salt.encode(), digest_size=16, person=b"omni-kv-root").digest()


class CacheListener(Protocol):
    """Hears what the prefix cache stores and forgets, in order."""

    def stored(self, parent: Key | None, keys: Sequence[Key], tokens: Sequence[int], salt: str) -> None: ...
    def removed(self, key: Key) -> None: ...
    def cleared(self) -> None: ...


class BlockPool:
    """All blocks of one KV cache."""

    def __init__(
        self, num_blocks: int, block_size: int, caching: bool = True, listener: CacheListener | None = None
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"no KV cache of {num_blocks} blocks of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._caching = caching
        self.listener = listener
        self._refs = [0] * num_blocks
        self._keys: list[Key | None] = [None] * num_blocks
        self._by_key: dict[Key, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Oldest first: the order in which content is forgotten."""
        self._pins: dict[str, tuple[int, ...]] = {}

    # -- readings

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, idle ones included."""
        return len(self._blank) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be found again, held ones included."""
        return len(self._by_key)

    @property
    def pins(self) -> Mapping[str, tuple[int, ...]]:
        return self._pins

    @property
    def num_pinned(self) -> int:
        return len({block for blocks in list(self._pins.values()) for block in blocks})

    def refs(self, block: int) -> int:
        return self._refs[block]

    def is_published(self, block: int) -> bool:
        return self._keys[block] is not None

    # -- taking and giving back

    def acquire_prefix(self, keys: Iterable[Key]) -> list[int]:
        """Hold the cached blocks of the longest known prefix of `keys`, in order."""
        found: list[int] = []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            found.append(block)
        self._hold(found)
        return found

    def try_allocate(self, count: int) -> list[int] | None:
        """Hold `count` blocks of unknown content, or none at all. Forgets the oldest idle content if it must."""
        if count > self.num_free:
            return None
        taken = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in taken:
            self._refs[block] = 1
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """Give back one reference to each block. The last of a prefix is forgotten first."""
        for block in reversed(blocks):
            if self._refs[block] < 1:
                raise BlockError(f"block {block} is freed but nobody holds it")
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if self._keys[block] is None:
                self._blank.append(block)
            else:
                self._idle[block] = None

    def publish(self, block: int, key: Key) -> bool:
        """Make a held, full block findable. When another block has the key already, that one stays: False."""
        if self._refs[block] < 1:
            raise BlockError(f"block {block} is published but nobody holds it")
        if not self._caching or self._keys[block] is not None or key in self._by_key:
            return False
        self._keys[block] = key
        self._by_key[key] = block
        return True

    # -- pins: references kept by name, after the request that made them has ended

    def pin(self, owner: str, blocks: Sequence[int]) -> None:
        """Hand the caller's references to `blocks` over to `owner`."""
        if owner in self._pins:
            raise BlockError(f"{owner} has blocks pinned already")
        if any(self._refs[block] < 1 for block in blocks):
            raise BlockError(f"{owner} pins a block that nobody holds")
        self._pins[owner] = tuple(blocks)

    def unpin(self, owner: str) -> bool:
        """Free what `owner` has pinned; False if that is nothing."""
        blocks = self._pins.pop(owner, None)
        if blocks is None:
            return False
        self.free(blocks)
        return True

    # -- the rest

    def reset_cache(self) -> bool:
        """Forget all content. False, and nothing happens, while any block is held."""
        if self.num_used:
            return False
        self._blank.extend(self._idle)
        self._idle.clear()
        self._by_key.clear()
        self._keys = [None] * self.num_blocks
        if self.listener is not None:
            self.listener.cleared()
        return True

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that blocks are conserved: `holders` and the pins hold exactly what the counts say."""
        expected = [0] * self.num_blocks
        for blocks in (*holders, *self._pins.values()):
            assert len(set(blocks)) == len(blocks), f"a block twice in one holder: {blocks}"
            for block in blocks:
                expected[block] += 1
        assert expected == self._refs, "reference counts differ from what is held"
        free = [*self._blank, *self._idle]
        assert len(free) == len(set(free)), "a block is free twice"
        assert set(free) == {b for b, n in enumerate(self._refs) if n == 0}, "a block is lost"
        keys = {key: block for block, key in enumerate(self._keys) if key is not None}
        assert keys == self._by_key, "the index and the blocks' keys differ"
        assert all(self._keys[block] is not None for block in self._idle)
        assert all(self._keys[block] is None for block in self._blank)

    def _hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._refs[block] == 0:
                del self._idle[block]
            self._refs[block] += 1

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        key = self._keys[block]
        assert key is not None
        del self._by_key[key]
        self._keys[block] = None
        if self.listener is not None:
            self.listener.removed(key)
        return block
