"""What every member's cache holds, as far as can be known: the index with its sources. Pure.

A worker that publishes KV events is known exactly, and our own grants fill the gap until its events come. A worker that
publishes nothing is taken to keep what it was sent last, as much as fits its cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from omni_proxy.apc.block_index import BlockIndex
from omni_proxy.apc.index import Tier
from omni_proxy.apc.keys import UNIT_TOKENS
from omni_proxy.apc.recency import RecencyModel
from omni_proxy.apc.speculation import Speculation
from omni_proxy.messages import BlocksRemoved, BlocksStored, CacheCleared, Lease, WorkerSpec

DEFAULT_CAPACITY_TOKENS: Final = 500_000
"""Taken for a worker that does not say how much KV it can hold."""
MAX_RANKS: Final = 1024


class _Member:
    """One worker: where our knowledge of it comes from."""

    __slots__ = ("block_tokens", "capacity_tokens", "grants", "ranks", "recency")

    def __init__(self, block_tokens: int, capacity_tokens: int) -> None:
        self.block_tokens = block_tokens
        """Of its cache as the index counts them; 0 when its blocks have no keys."""
        self.capacity_tokens = capacity_tokens
        self.ranks: set[int] = set()
        """Caches whose events are heard; none: the recency model stands for the one cache."""
        self.recency: RecencyModel | None = None
        self.grants: dict[Lease, tuple[Sequence[int], Sequence[int]]] = {}
        """Without events: the blocks of each grant under way, and those of them that were new."""


class Caches:
    """Answers `match` for the scheduler and learns from events, grants and answers."""

    def __init__(self) -> None:
        self.index = BlockIndex()
        self.unknown_worker_events = 0
        """Events that name no member: late ones of a worker that was removed."""
        self._speculation = Speculation(self.index)
        self._members: dict[str, _Member] = {}

    # -------------------------------------------------------------------- questions

    def match(self, keys: Sequence[int]) -> Mapping[str, int]:
        """Cached prefix length in tokens for each worker that holds any of it."""
        return self.index.match(keys) if keys else {}

    def tells(self, name: str) -> bool:
        """Does this worker publish events?"""
        member = self._members.get(name)
        return member is not None and bool(member.ranks)

    # --------------------------------------------------------------------- members

    def member(self, worker: WorkerSpec) -> None:
        """A worker is there, or is described anew."""
        block_tokens = _countable(worker.block_tokens or UNIT_TOKENS)
        capacity = worker.kv_capacity_tokens or DEFAULT_CAPACITY_TOKENS
        member = self._members.get(worker.name)
        if member is None:
            self._members[worker.name] = _Member(block_tokens, capacity)
        elif not member.ranks and (member.block_tokens, member.capacity_tokens) != (block_tokens, capacity):
            self._forget(worker.name, member)
            member.block_tokens, member.capacity_tokens = block_tokens, capacity

    def lost(self, name: str, removed: bool) -> None:
        """A worker does not answer any more; one that publishes events tells by them whether its cache is lost."""
        member = self._members.get(name)
        if member is None:
            return
        if removed:
            self._forget(name, member)
            del self._members[name]
        elif not member.ranks:
            self._forget(name, member)

    def _forget(self, name: str, member: _Member) -> None:
        for rank in member.ranks or {0}:
            self.index.forget_holder(name, rank)
        self._speculation.forget(name)
        member.ranks.clear()
        member.recency = None
        member.grants.clear()

    # ---------------------------------------------------------------------- events

    def heard(self, event: BlocksStored | BlocksRemoved | CacheCleared) -> None:
        """A worker told what is in its cache."""
        self.index.sweep()
        member = self._members.get(event.worker)
        if member is None:
            self.unknown_worker_events += 1
            return
        match event:
            case BlocksStored():
                self._stored(member, event)
            case BlocksRemoved(worker, rank, keys, tier):
                if rank in member.ranks:
                    self.index.remove(worker, rank, keys, Tier(tier))
                    if tier == Tier.DEVICE:
                        self._speculation.evicted(worker, keys)
            case CacheCleared(worker, rank):
                if rank in member.ranks:
                    self.index.forget_holder(worker, rank)
                    self._speculation.forget(worker)

    def _stored(self, member: _Member, event: BlocksStored) -> None:
        if not member.ranks:  # from now on it speaks for itself
            self._forget(event.worker, member)
        if event.rank not in member.ranks and len(member.ranks) >= MAX_RANKS:
            return
        member.ranks.add(event.rank)
        member.block_tokens = event.block_tokens
        if not self.index.knows(event.worker, event.rank, event.block_tokens):
            self.index.add_holder(event.worker, event.rank, event.block_tokens)
        self.index.insert(event.worker, event.rank, event.keys, Tier(event.tier))

    # ---------------------------------------------------------------------- grants

    def granted(self, lease: Lease, keys: Sequence[int], now: float) -> int | None:
        """A prompt is on its way to a worker; returns what the worker should find of it, in tokens."""
        self._speculation.expire(now)
        self.index.sweep()
        member = self._members.get(lease.worker)
        if member is None or not keys or member.block_tokens == 0:
            return None
        expected = self.index.present(lease.worker, keys)
        stride = member.block_tokens // UNIT_TOKENS
        blocks = keys if stride == 1 else keys[stride - 1 :: stride]
        if member.ranks:
            self._speculation.add(lease, blocks, member.block_tokens, now)
        else:
            member.grants[lease] = (blocks, self._use(lease.worker, member, blocks))
        return expected

    def answered(self, lease: Lease, predicted_tokens: int | None, reported_tokens: int | None, now: float) -> None:
        """The prompt was computed; a report other than predicted corrects what is believed without being told."""
        member = self._members.get(lease.worker)
        if member is not None and member.ranks and predicted_tokens is not None and reported_tokens is not None:
            missing = predicted_tokens - reported_tokens
            if missing > member.block_tokens:
                self._speculation.doubt(lease.worker)
        self._speculation.answered(lease, now)
        blocks, _ = member.grants.pop(lease, ((), ())) if member is not None else ((), ())
        if member is None or member.recency is None or not blocks:
            return
        self._use(lease.worker, member, blocks)
        if predicted_tokens is not None and reported_tokens is not None:
            gone = member.recency.correct(predicted_tokens, reported_tokens, member.block_tokens)
            self.index.remove(lease.worker, 0, gone)

    def dropped(self, lease: Lease) -> None:
        """The prompt was not computed, as far as anybody knows."""
        self._speculation.drop(lease)
        member = self._members.get(lease.worker)
        _, new = member.grants.pop(lease, ((), ())) if member is not None else ((), ())
        if member is not None and member.recency is not None:
            self.index.remove(lease.worker, 0, member.recency.drop(new))

    def _use(self, name: str, member: _Member, blocks: Sequence[int]) -> Sequence[int]:
        """Blocks are used by a worker that tells nothing; returns those that are new there."""
        if member.recency is None:
            member.recency = RecencyModel(member.capacity_tokens // member.block_tokens)
            self.index.add_holder(name, 0, member.block_tokens)
        new, gone = member.recency.use(blocks)
        self.index.insert(name, 0, new)
        self.index.remove(name, 0, gone)
        return new


def _countable(block_tokens: int) -> int:
    """Block size as the index counts: small blocks count as units; 0 when it has no common measure with them."""
    if block_tokens % UNIT_TOKENS == 0:
        return block_tokens
    return UNIT_TOKENS if UNIT_TOKENS % block_tokens == 0 else 0
