"""How a pushed prompt's KV is cut into pieces; both sides number them alike. Pure.

A piece is the keys and values of a few blocks in one layer, so that a layer can leave while the next is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

PUSH_PIECE_BYTES = 512 << 10
"""Size of one piece, in whole blocks of one layer: small enough that the last one takes little time alone."""


@dataclass(frozen=True, slots=True)
class PieceGrid:
    """Blocks `first .. blocks` of a prompt in `layers` layers, `per_piece` blocks a piece.

    ```
    blocks   first            blocks        piece = layer * spans + span
             | span 0 | span 1 | .. |
    ```
    """

    layers: int
    first: int
    blocks: int
    per_piece: int

    @property
    def spans(self) -> int:
        """Pieces of one layer."""
        return -(-(self.blocks - self.first) // self.per_piece)

    @property
    def count(self) -> int:
        return self.layers * self.spans

    def place(self, seq: int) -> tuple[int, int, int]:
        """(layer, first block, number of blocks) of a piece."""
        layer, span = divmod(seq, self.spans)
        start = self.first + span * self.per_piece
        return layer, start, min(self.per_piece, self.blocks - start)

    def problem(self, blocks: int, layers: int) -> str | None:
        """Why a prompt of `blocks` blocks in `layers` layers cannot be cut like this; None if it can."""
        if self.layers != layers or self.blocks != blocks:
            return f"the prompt has {blocks} blocks in {layers} layers, not {self.blocks} in {self.layers}"
        if not 0 <= self.first < blocks or self.per_piece < 1:
            return f"no pieces of {self.per_piece} blocks from block {self.first} on"
        return None


def blocks_per_push(layer_block_bytes: int) -> int:
    """How many blocks of one layer make a piece. `layer_block_bytes`: of one block in one layer."""
    return max(1, PUSH_PIECE_BYTES // layer_block_bytes)
