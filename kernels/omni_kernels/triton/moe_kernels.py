"""The three kernels of the fused experts: gate_up with SwiGLU, down, combine. Pure Triton, nothing of torch.

Work is a list of tiles (expert, first sorted row); each program takes tiles of a one-dimensional grid in turn, so the
grid is as large as the chip has cores whatever the number of tiles. Kept to what Ascend lowers too: no atomics, int64
for offsets into the weights, contiguous rows where `GATHERED`, whole tiles of k and n.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_up_kernel(
    x,  # [T, H], or [sorted rows, H] if GATHERED
    w13,  # [E, 2I, H]
    hidden,  # [sorted rows, I], written
    source,  # [sorted rows] int32, row of x
    tile_expert,  # [tiles] int32
    tile_row,  # [tiles] int32, first sorted row
    expert_end,  # [E] int32, one past the expert's last sorted row
    num_tiles,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GATHERED: tl.constexpr,
    WIDE_DOT: tl.constexpr,  # the interpreter multiplies bfloat16 wrongly: widen first
):
    """hidden = silu(x . gate^T) * (x . up^T), one [BM, BN] tile of both halves at a time."""
    blocks: tl.constexpr = I // BN
    for work in range(tl.program_id(0), num_tiles * blocks, tl.num_programs(0)):
        tile = work // blocks
        column = (work % blocks) * BN
        expert = tl.load(tile_expert + tile)
        rows = tl.load(tile_row + tile) + tl.arange(0, BM)
        inside = rows < tl.load(expert_end + expert)
        if GATHERED:  # noqa: SIM108  (Triton decides a constexpr `if`, not an expression)
            at = rows
        else:
            at = tl.load(source + rows, mask=inside, other=0)
        k = tl.arange(0, BK)
        columns = column + tl.arange(0, BN)
        a = x + tl.cast(at, tl.int64)[:, None] * H + k[None, :]
        base = w13 + tl.cast(expert, tl.int64) * (2 * I * H)
        gate = base + columns[None, :] * H + k[:, None]
        up = gate + I * H
        gate_sum = tl.zeros((BM, BN), dtype=tl.float32)
        up_sum = tl.zeros((BM, BN), dtype=tl.float32)
        for _ in range(0, H, BK):
            xs = tl.load(a, mask=inside[:, None], other=0.0)
            gs = tl.load(gate)
            us = tl.load(up)
            if WIDE_DOT:
                xs, gs, us = xs.to(tl.float32), gs.to(tl.float32), us.to(tl.float32)
            gate_sum = tl.dot(xs, gs, gate_sum)
            up_sum = tl.dot(xs, us, up_sum)
            a += BK
            gate += BK
            up += BK
        value = gate_sum / (1.0 + tl.exp(-gate_sum)) * up_sum
        out = hidden + tl.cast(rows, tl.int64)[:, None] * I + columns[None, :]
        tl.store(out, value.to(hidden.dtype.element_ty), mask=inside[:, None])


@triton.jit
def down_kernel(
    hidden,  # [sorted rows, I]
    w2,  # [E, H, I]
    y,  # [T * K, H], written at the row's slot
    slot,  # [sorted rows] int32, token * K + choice
    share,  # [sorted rows] float32, the choice's weight
    tile_expert,
    tile_row,
    expert_end,
    num_tiles,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """y[slot] = share * (hidden . w2^T), one [BM, BN] tile at a time."""
    blocks: tl.constexpr = H // BN
    for work in range(tl.program_id(0), num_tiles * blocks, tl.num_programs(0)):
        tile = work // blocks
        column = (work % blocks) * BN
        expert = tl.load(tile_expert + tile)
        rows = tl.load(tile_row + tile) + tl.arange(0, BM)
        inside = rows < tl.load(expert_end + expert)
        k = tl.arange(0, BK)
        columns = column + tl.arange(0, BN)
        a = hidden + tl.cast(rows, tl.int64)[:, None] * I + k[None, :]
        b = w2 + tl.cast(expert, tl.int64) * (H * I) + columns[None, :] * I + k[:, None]
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for _ in range(0, I, BK):
            hs = tl.load(a, mask=inside[:, None], other=0.0)
            ws = tl.load(b)
            if WIDE_DOT:
                hs, ws = hs.to(tl.float32), ws.to(tl.float32)
            total = tl.dot(hs, ws, total)
            a += BK
            b += BK
        total = total * tl.load(share + rows, mask=inside, other=0.0)[:, None]
        at = tl.load(slot + rows, mask=inside, other=0)
        out = y + tl.cast(at, tl.int64)[:, None] * H + columns[None, :]
        tl.store(out, total.to(y.dtype.element_ty), mask=inside[:, None])


@triton.jit
def combine_kernel(
    y,  # [T * K, H]
    ids,  # [T, K] int32; -1 takes no part
    out,  # [T, H], written
    num_rows,
    H: tl.constexpr,
    K: tl.constexpr,
    BH: tl.constexpr,
):
    """out[t] = sum of y[t, k] over the choices k in order, in float32."""
    blocks: tl.constexpr = H // BH
    for work in range(tl.program_id(0), num_rows * blocks, tl.num_programs(0)):
        row = work // blocks
        columns = (work % blocks) * BH + tl.arange(0, BH)
        total = tl.zeros((BH,), dtype=tl.float32)
        for choice in range(K):
            place = row * K + choice
            chosen = tl.load(ids + place) >= 0
            part = tl.load(y + tl.cast(place, tl.int64) * H + columns).to(tl.float32)
            total += tl.where(chosen, part, 0.0)
        tl.store(out + tl.cast(row, tl.int64) * H + columns, total.to(out.dtype.element_ty))
