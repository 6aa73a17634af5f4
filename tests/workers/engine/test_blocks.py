"""Blocks are never lost, never shared wrongly, and found again exactly by their content."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from omni_proxy.workers.engine.blocks import BlockError, BlockPool, Key, chain_key, root_key


def keys(*blocks: tuple[int, ...], salt: str = "") -> list[Key]:
    chained: list[Key] = []
    for tokens in blocks:
        chained.append(chain_key(chained[-1] if chained else root_key(salt), tokens))
    return chained


def filled(pool: BlockPool, chain: list[Key]) -> list[int]:
    blocks = pool.try_allocate(len(chain))
    assert blocks is not None
    for block, key in zip(blocks, chain, strict=True):
        pool.publish(block, key)
    return blocks


def test_a_key_depends_on_all_tokens_before_it_and_on_the_salt() -> None:
    assert keys((1, 2), (3, 4))[1] == keys((1, 2), (3, 4))[1]
    assert keys((1, 2), (3, 4))[1] != keys((1, 9), (3, 4))[1]
    assert keys((1, 2))[0] != keys((1, 2), salt="tenant")[0]
    assert keys((1, 2), (3,))[1] != keys((1,), (2, 3))[1]


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3, 4)
    assert pool.try_allocate(4) is None
    assert pool.num_free == 3
    taken = pool.try_allocate(3)
    assert taken is not None
    assert sorted(taken) == [0, 1, 2]
    assert pool.try_allocate(0) == []
    pool.check([taken])


def test_a_freed_prefix_is_found_again_until_its_blocks_are_needed() -> None:
    pool = BlockPool(4, 2)
    chain = keys((1, 2), (3, 4), (5, 6))
    blocks = filled(pool, chain)
    pool.free(blocks)
    assert pool.num_free == 4
    assert pool.acquire_prefix(chain) == blocks
    pool.free(blocks)
    assert pool.try_allocate(2) is not None  # one blank, and the end of the prefix
    assert pool.acquire_prefix(chain) == blocks[:2]


def test_the_content_used_longest_ago_is_forgotten_first() -> None:
    pool = BlockPool(3, 2)
    chains = [keys((n, n)) for n in range(3)]
    blocks = [filled(pool, chain) for chain in chains]
    for held in blocks:
        pool.free(held)
    pool.free(pool.acquire_prefix(chains[0]))
    assert pool.try_allocate(1) == blocks[1]


def test_content_published_twice_keeps_its_first_block() -> None:
    pool = BlockPool(4, 2)
    chain = keys((1, 2))
    first, second = filled(pool, chain), filled(pool, chain)
    assert pool.acquire_prefix(chain) == first
    pool.free(second)
    pool.check([first, first])


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(2, 2, caching=False)
    filled(pool, keys((1, 2)))
    assert pool.acquire_prefix(keys((1, 2))) == []


def test_pins_hold_blocks_until_they_are_taken_off() -> None:
    pool = BlockPool(3, 2)
    blocks = filled(pool, keys((1, 2), (3, 4)))
    pool.pin("a", blocks)
    assert (pool.num_free, pool.num_pinned) == (1, 2)
    assert pool.try_allocate(2) is None
    pool.check([])
    assert pool.unpin("a")
    assert not pool.unpin("a")
    assert (pool.num_free, pool.num_pinned) == (3, 0)


def test_a_block_pinned_by_two_counts_once() -> None:
    pool = BlockPool(3, 2)
    chain = keys((1, 2))
    pool.pin("a", filled(pool, chain))
    pool.pin("b", pool.acquire_prefix(chain))
    assert (pool.num_pinned, pool.num_used) == (1, 1)


def test_reset_needs_an_idle_pool() -> None:
    pool = BlockPool(2, 2)
    chain = keys((1, 2))
    blocks = filled(pool, chain)
    assert not pool.reset_cache()
    pool.free(blocks)
    assert pool.reset_cache()
    assert pool.acquire_prefix(chain) == []
    pool.check([])


def test_misuse_is_loud() -> None:
    pool = BlockPool(2, 2)
    with pytest.raises(BlockError, match="nobody holds"):
        pool.free([0])
    with pytest.raises(BlockError, match="nobody holds"):
        pool.publish(0, b"key")
    with pytest.raises(BlockError, match="nobody holds"):
        pool.pin("a", [0])
    blocks = pool.try_allocate(1)
    assert blocks is not None
    pool.pin("a", blocks)
    with pytest.raises(BlockError, match="already"):
        pool.pin("a", blocks)
    with pytest.raises(ValueError, match="no KV cache"):
        BlockPool(0, 2)


def test_check_sees_a_leak() -> None:
    pool = BlockPool(2, 2)
    assert pool.try_allocate(1) is not None
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])


class PoolMachine(RuleBasedStateMachine):
    """Random use of a pool beside a model: the content that each holder believes to have in each block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8, 1)
        self.holders: list[tuple[list[int], list[Key]]] = []
        self.pins = 0

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def take(self, tokens: list[int]) -> None:
        chain = keys(*((t,) for t in tokens))
        held = self.pool.acquire_prefix(chain)
        fresh = self.pool.try_allocate(len(chain) - len(held))
        if fresh is None:
            assert len(chain) - len(held) > self.pool.num_free
            self.pool.free(held)
            return
        assert all(self.pool.refs(block) == 1 for block in fresh), "a fresh block is shared"
        for block, key in zip(fresh, chain[len(held) :], strict=True):
            self.pool.publish(block, key)
        self.holders.append((held + fresh, chain))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def give_back(self, data: Any) -> None:
        blocks, _ = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.free(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def pin(self, data: Any) -> None:
        blocks, _ = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pins += 1
        self.pool.pin(str(self.pins), blocks)

    @precondition(lambda self: self.pool.pins)
    @rule(data=st.data())
    def unpin(self, data: Any) -> None:
        assert self.pool.unpin(data.draw(st.sampled_from(sorted(self.pool.pins))))

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_cache() == (not self.holders and not self.pool.pins)

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.pool.check(blocks for blocks, _ in self.holders)

    @invariant()
    def shared_blocks_hold_one_content(self) -> None:
        content: dict[int, Key] = {}
        for blocks, chain in self.holders:
            for block, key in zip(blocks, chain, strict=True):
                assert content.setdefault(block, key) == key


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
