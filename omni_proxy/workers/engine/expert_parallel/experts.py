"""The experts that one rank holds, and what they compute.

A row's result must not depend on which rows share its rank, or moving an expert would change bits. The compiled kernels
promise that. Plain torch does not: products of different shapes round differently; so there rows are computed in blocks
of one fixed size, padded with zeros.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import omni_kernels as ops

BLOCK_ROWS: Final = 8

Pair = tuple[Tensor, Tensor]
"""One expert as a checkpoint has it: [2I, H], gate rows first, and [H, I]. Or as it is packed: two flat tensors."""


class ExpertSlots:
    """Weights of one rank, packed for its kernels: for each MoE layer, `slots` experts kept as `stored`."""

    def __init__(
        self, layers: int, slots: int, wide: int, hidden: int, dtype: torch.dtype, stored: torch.dtype | None = None
    ) -> None:
        self.hidden, self.dtype, self._stored = hidden, dtype, stored or dtype
        nothing = torch.zeros(slots, 2 * wide, hidden, dtype=dtype), torch.zeros(slots, hidden, wide, dtype=dtype)
        self._layers = [self._packed(nothing) for _ in range(layers)]

    def put(self, layer: int, slot: int, pair: Pair) -> None:
        """Overwrite a slot with an expert of the checkpoint."""
        packed = self._packed((pair[0].unsqueeze(0), pair[1].unsqueeze(0)))
        self.put_packed(layer, slot, (packed.w13.data[0], packed.w2.data[0]))

    def put_packed(self, layer: int, slot: int, pair: Pair) -> None:
        """Overwrite a slot with what `packed` gave, here or on another rank."""
        self._layers[layer].w13.data[slot].copy_(pair[0])
        self._layers[layer].w2.data[slot].copy_(pair[1])

    def packed(self, layer: int, slot: int) -> Pair:
        """The packed weights in a slot; views, not copies."""
        return self._layers[layer].w13.data[slot], self._layers[layer].w2.data[slot]

    def compute(self, layer: int, rows: Tensor, counts: NDArray[np.int64]) -> Tensor:
        """Apply experts to `rows` [n, H], which lie by source rank and, in it, by slot: `counts` [sources, slots]."""
        slot_of_row = np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.ravel())
        experts = self._layers[layer]
        if not len(rows):
            return rows
        if experts.backend == "torch":
            return _in_blocks(experts, rows, slot_of_row)
        return ops.packed_moe(rows, experts, torch.from_numpy(slot_of_row).unsqueeze(1), torch.ones(len(rows), 1))

    def _packed(self, pair: Pair) -> ops.PackedExperts:
        return ops.PackedExperts(ops.pack(pair[0], self._stored, gated=True), ops.pack(pair[1], self._stored))


def _in_blocks(experts: ops.PackedExperts, rows: Tensor, slot_of_row: NDArray[np.int64]) -> Tensor:
    result = torch.empty_like(rows)
    for slot in np.unique(slot_of_row).tolist():
        which = torch.from_numpy(np.flatnonzero(slot_of_row == slot))
        w13, w2 = (matrix.data[slot].to(rows.dtype).t() for matrix in (experts.w13, experts.w2))
        mine = rows.index_select(0, which)
        missing = -len(mine) % BLOCK_ROWS
        padded = torch.cat([mine, mine.new_zeros(missing, mine.shape[1])])
        blocks = [torch.mm(ops.silu_and_mul(torch.mm(b, w13)), w2) for b in torch.split(padded, BLOCK_ROWS)]
        result.index_copy_(0, which, torch.cat(blocks)[: len(mine)])
    return result
