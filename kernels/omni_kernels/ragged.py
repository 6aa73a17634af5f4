"""Which rows of a ragged batch belong to which sequence, and where its keys lie. Made once a step, used by all layers.

Each backend derives what it needs, once: index arrays for the compiled kernels, masks and padding for torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionBatch:
    """Sequences one after the other; the first `num_single` have one query row each (decode), the others a chunk.

    A query row at place j of a chunk of `query_lens[s]` rows sees the first
    `kv_lens[s] - query_lens[s] + j + 1` keys of its sequence.
    """

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_tables: tuple[Sequence[int], ...]
    """Block ids of each sequence, as many as its keys need or more."""
    block_size: int
    dtype: torch.dtype = torch.float32
    """Of the masks that `torch` adds."""

    @cached_property
    def num_single(self) -> int:
        """How many sequences at the front have one query row."""
        lens = self.query_lens
        return next((i for i, n in enumerate(lens) if n != 1), len(lens))

    @cached_property
    def rows(self) -> int:
        """Query rows of the whole batch."""
        return sum(self.query_lens)

    @cached_property
    def index(self) -> array[int]:
        """query_start [n + 1], kv_lens [n], tables, table_start [n + 1], int64: sequence s owns tables[start[s]:].

        Not a tensor: making one is dear beside a small step.
        """
        tables = self.block_tables
        starts, table_starts = accumulate(self.query_lens, initial=0), accumulate(map(len, tables), initial=0)
        return array("q", [*starts, *self.kv_lens, *chain.from_iterable(tables), *table_starts])

    @cached_property
    def single_kv_len(self) -> int:
        """Keys of the longest of the single-row sequences."""
        return max(self.kv_lens[: self.num_single], default=0)

    @cached_property
    def single_table(self) -> Tensor:
        """Block ids of the single-row sequences, padded to one width, flat."""
        width = -(-self.single_kv_len // self.block_size)
        tables = self.block_tables[: self.num_single]
        return torch.tensor([[*t[:width], *([0] * (width - len(t)))] for t in tables]).flatten()

    @cached_property
    def single_mask(self) -> Tensor | None:
        """Additive mask [n, 1, 1, keys] of the single-row sequences; None if all are equally long."""
        lens, longest = self.kv_lens[: self.num_single], self.single_kv_len
        if all(n == longest for n in lens):
            return None
        hidden = torch.arange(longest) >= torch.tensor(lens).unsqueeze(1)
        return self._additive(hidden)[:, None, None]

    @cached_property
    def chunk_tables(self) -> tuple[Tensor, ...]:
        """Block ids of each chunk, no more than its keys need."""
        pairs = zip(self.kv_lens[self.num_single :], self.block_tables[self.num_single :], strict=True)
        return tuple(torch.tensor(table[: -(-keys // self.block_size)]) for keys, table in pairs)

    @cached_property
    def chunk_masks(self) -> tuple[Tensor | None, ...]:
        """Additive mask [rows, keys] of each chunk; None where the plain causal one does, since it is the whole."""
        pairs = zip(self.query_lens[self.num_single :], self.kv_lens[self.num_single :], strict=True)
        return tuple(self._chunk_mask(queries, keys) for queries, keys in pairs)

    def _chunk_mask(self, queries: int, keys: int) -> Tensor | None:
        if queries == keys:
            return None
        last_seen = torch.arange(keys - queries, keys).unsqueeze(1)
        return self._additive(torch.arange(keys) > last_seen)

    def _additive(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, -torch.inf)


def attention_batch(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    dtype: torch.dtype = torch.float32,
) -> AttentionBatch:
    """Describe a batch whose sequences with one query row come first. ValueError if lengths and tables disagree."""
    count = len(query_lens)
    if len(kv_lens) != count or len(block_tables) != count:
        raise ValueError(f"attention_batch: kv_lens and block_tables must have {count} entries")
    for queries, keys, table in zip(query_lens, kv_lens, block_tables, strict=True):
        if not 0 < queries <= keys:
            raise ValueError(f"attention_batch: query_lens must be in 1..kv_lens, got {queries} for {keys}")
        if len(table) * block_size < keys:
            raise ValueError(f"attention_batch: block_tables must hold {keys} keys, got {len(table)} blocks")
    return AttentionBatch(tuple(query_lens), tuple(kv_lens), tuple(block_tables), block_size, dtype)
