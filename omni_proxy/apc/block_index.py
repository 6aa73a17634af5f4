"""Who holds which prefix: key -> set of holders, as bits of one integer. Pure.

A holder is one cache: a worker, or one data-parallel rank of it. `match` walks a prompt's keys once and stops where
nobody is left. Blocks that lie outside the device (CPU memory, disk) are found too, but count for less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Final

from omni_proxy.apc.index import TIER_WORTH, Tier
from omni_proxy.apc.keys import UNIT_TOKENS

SWEEP_KEYS: Final = 4096
"""Keys that are tidied in one go: about a millisecond."""
_FIRST_LOOK: Final = 8
_LOOK: Final = 64
_MOST_SHARED_SETS: Final = 65_536
_TIERS: Final = tuple(Tier)


class _Holder:
    __slots__ = ("bit", "rank", "stride", "worker")

    def __init__(self, worker: str, rank: int, stride: int, bit: int) -> None:
        self.worker = worker
        self.rank = rank
        self.stride = stride
        self.bit = bit


class BlockIndex:
    """The map itself. Forgetting a holder takes no time: its bit is retired, and `sweep` tidies up little by little."""

    def __init__(self) -> None:
        self._holders: dict[tuple[str, int], _Holder] = {}
        self._by_bit: dict[int, _Holder] = {}
        self._tiers: tuple[dict[int, int], ...] = tuple({} for _ in Tier)
        self._masks: dict[int, int] = {}
        """By stride (units in a block): the holders with blocks of that size."""
        self._sets: dict[int, int] = {}
        """Each set of holders once, so that keys with equal holders share one object."""
        self._retired = 0
        self._sweeping = 0
        self._unswept: list[tuple[dict[int, int], list[int]]] = []

    def __len__(self) -> int:
        """Different keys, counted once in each tier."""
        return sum(map(len, self._tiers))

    # ---------------------------------------------------------------------- holders

    def knows(self, worker: str, rank: int, block_tokens: int) -> bool:
        """Is this holder known, with blocks of this size?"""
        holder = self._holders.get((worker, rank))
        return holder is not None and holder.stride * UNIT_TOKENS == block_tokens

    def add_holder(self, worker: str, rank: int, block_tokens: int) -> None:
        """Begin with a holder that has nothing yet; its blocks are a multiple of the unit."""
        self.forget_holder(worker, rank)
        bit, taken = 1, self._retired | self._sweeping
        while bit in self._by_bit or bit & taken:
            bit <<= 1
        stride = block_tokens // UNIT_TOKENS
        assert stride * UNIT_TOKENS == block_tokens > 0, f"blocks of {block_tokens} tokens have no keys"
        holder = self._holders[worker, rank] = self._by_bit[bit] = _Holder(worker, rank, stride, bit)
        self._masks[stride] = self._masks.get(stride, 0) | holder.bit

    def forget_holder(self, worker: str, rank: int) -> None:
        """Forget a holder and all that it has. Ignored when it is not known."""
        holder = self._holders.pop((worker, rank), None)
        if holder is None:
            return
        del self._by_bit[holder.bit]
        self._retired |= holder.bit
        self._masks[holder.stride] &= ~holder.bit
        if not self._masks[holder.stride]:
            del self._masks[holder.stride]

    def sweep(self) -> bool:
        """Tidy up `SWEEP_KEYS` keys at most after holders that were forgotten; True while there is more to do."""
        if not self._sweeping:
            if not self._retired:
                return False
            self._sweeping, self._retired = self._retired, 0
            self._unswept = [(table, list(table)) for table in self._tiers if table]
        if self._unswept:
            table, keys = self._unswept[-1]
            _take_out(table, keys[-SWEEP_KEYS:], self._sweeping, self._sets)
            del keys[-SWEEP_KEYS:]
            if not keys:
                self._unswept.pop()
        if not self._unswept:
            self._sweeping = 0
        return bool(self._sweeping or self._retired)

    # ---------------------------------------------------------------------- changes

    def insert(self, worker: str, rank: int, keys: Iterable[int], tier: Tier = Tier.DEVICE) -> None:
        """A known holder has these keys from now on."""
        bit, table = self._holders[worker, rank].bit, self._tiers[tier]
        if len(self._sets) > _MOST_SHARED_SETS:
            self._sets.clear()
        share = self._sets.setdefault
        for key in keys:
            bits = table.get(key, 0) | bit
            table[key] = share(bits, bits)

    def remove(self, worker: str, rank: int, keys: Iterable[int], tier: Tier = Tier.DEVICE) -> None:
        """A holder has lost these keys; keys or holders that are not known are ignored."""
        holder = self._holders.get((worker, rank))
        if holder is not None:
            _take_out(self._tiers[tier], keys, holder.bit, self._sets)

    # -------------------------------------------------------------------- questions

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """Cached prefix for each worker that holds any of it, in tokens as they are worth on the device."""
        found: dict[str, int] = {}
        for stride, mask in self._masks.items():
            walked = keys if stride == 1 else keys[stride - 1 :: stride]
            worth = self._worth(walked, mask) if self._far else self._walk(walked, mask, self._tiers[Tier.DEVICE])
            for bit, blocks in worth.items():
                holder = self._by_bit[bit]
                tokens = int(blocks * stride * UNIT_TOKENS)
                if tokens > found.get(holder.worker, 0):
                    found[holder.worker] = tokens
        return found

    def present(self, worker: str, keys: Sequence[int]) -> int:
        """Prefix that a worker holds on any tier, in tokens: what it will report as cached."""
        longest = 0
        for (name, _), holder in self._holders.items():
            if name == worker:
                walked = keys[holder.stride - 1 :: holder.stride]
                table = self._joined(walked, _TIERS) if self._far else self._tiers[Tier.DEVICE]
                blocks = self._walk(walked, holder.bit, table).get(holder.bit, 0)
                longest = max(longest, blocks * holder.stride * UNIT_TOKENS)
        return longest

    def tells(self, worker: str, key: int) -> bool:
        """Does one of a worker's own caches (ranks from 0) hold this key on the device?"""
        held = self._tiers[Tier.DEVICE].get(key, 0)
        return any(held & holder.bit for (name, rank), holder in self._holders.items() if name == worker and rank >= 0)

    @property
    def _far(self) -> bool:
        """Does anybody hold anything outside the device?"""
        return bool(self._tiers[Tier.CPU] or self._tiers[Tier.DISK])

    def _walk(self, keys: Sequence[int], mask: int, table: Mapping[int, int]) -> dict[int, int]:
        """Blocks found from the beginning, by the bit of each holder in `mask` that has any."""
        found: dict[int, int] = {}
        alive, depth, many = mask, 0, _FIRST_LOOK
        while depth < len(keys):
            # Several at once: the misses of the processor's cache overlap, and mostly all have the same holders.
            held = list(map(table.get, keys[depth : depth + many], repeat(0)))
            if alive & held[0] == alive and held.count(held[0]) == len(held):
                depth += len(held)
            else:
                for here in held:
                    left = alive & here
                    if left != alive:
                        if depth:
                            _spread(found, alive & ~left, depth)
                        if not left:
                            return found
                        alive = left
                    depth += 1
            many = _LOOK
        if depth:
            _spread(found, alive, depth)
        return found

    def _worth(self, keys: Sequence[int], mask: int) -> dict[int, float]:
        """Blocks by their worth: as far as the device reaches in full, then as far as each tier behind it reaches."""
        worth: dict[int, float] = {}
        before: Mapping[int, int] = {}
        for tier in Tier:
            reached = self._walk(keys, mask, self._joined(keys, _TIERS[: tier + 1]))
            for bit, blocks in reached.items():
                worth[bit] = worth.get(bit, 0.0) + TIER_WORTH[tier] * (blocks - before.get(bit, 0))
            before = reached
        return worth

    def _joined(self, keys: Sequence[int], tiers: Sequence[Tier]) -> Mapping[int, int]:
        """The part of some tiers together that a walk over `keys` can need."""
        tables = [self._tiers[tier] for tier in tiers]
        joined: dict[int, int] = {}
        for key in keys:
            bits = 0
            for table in tables:
                bits |= table.get(key, 0)
            if not bits:
                break
            joined[key] = bits
        return joined


def _take_out(table: dict[int, int], keys: Iterable[int], bits: int, sets: dict[int, int]) -> None:
    keep, share = ~bits, sets.setdefault
    for key in keys:
        left = table.get(key, 0) & keep
        if left:
            table[key] = share(left, left)
        else:
            table.pop(key, None)


def _spread(found: dict[int, int], bits: int, depth: int) -> None:
    while bits:
        low = bits & -bits
        found[low] = depth
        bits ^= low
