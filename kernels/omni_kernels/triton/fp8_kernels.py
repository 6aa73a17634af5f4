"""The fused experts over float8 weights with a scale for each block of 128 x 128, as DeepSeek-V3's checkpoints have.

Rows are quantised too, one scale for 128 values of k, so that both operands feed the float8 units of sm_89 and later.
Every product of 128 values of k is scaled and added in float32. Pure Triton, nothing of torch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def quantise_kernel(x, values, scales, num_groups, GROUP: tl.constexpr):
    """Groups of x -> float8 values and one scale each: the largest becomes 448."""
    i = tl.arange(0, GROUP)
    for group in range(tl.program_id(0), num_groups, tl.num_programs(0)):
        at = tl.cast(group, tl.int64) * GROUP + i
        wide = tl.load(x + at).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(wide), axis=0), 1e-10) / 448.0
        tl.store(values + at, (wide / scale).to(values.dtype.element_ty))
        tl.store(scales + group, scale)


@triton.jit
def gate_up_fp8_kernel(
    x,  # [T, H] float8
    x_scale,  # [T, H / GROUP] float32
    w13,  # [E, 2I, H] float8
    w13_scale,  # [E, 2I / GROUP, H / GROUP] float32
    hidden,  # [sorted rows, I], written
    source,  # [sorted rows] int32, row of x
    tile_expert,
    tile_row,
    expert_end,
    num_tiles,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """hidden = silu(x . gate^T) * (x . up^T), one [BM, BN] tile of both halves at a time; BN divides GROUP."""
    blocks: tl.constexpr = I // BN
    groups: tl.constexpr = H // GROUP
    for work in range(tl.program_id(0), num_tiles * blocks, tl.num_programs(0)):
        tile = work // blocks
        column = (work % blocks) * BN
        expert = tl.load(tile_expert + tile)
        rows = tl.load(tile_row + tile) + tl.arange(0, BM)
        inside = rows < tl.load(expert_end + expert)
        at = tl.load(source + rows, mask=inside, other=0)
        k = tl.arange(0, GROUP)
        columns = column + tl.arange(0, BN)
        a = x + tl.cast(at, tl.int64)[:, None] * H + k[None, :]
        a_scale = x_scale + tl.cast(at, tl.int64) * groups
        gate = w13 + tl.cast(expert, tl.int64) * (2 * I * H) + columns[None, :] * H + k[:, None]
        up = gate + I * H
        gate_scale = w13_scale + tl.cast(expert, tl.int64) * (2 * I // GROUP * groups) + column // GROUP * groups
        up_scale = gate_scale + I // GROUP * groups
        gate_sum = tl.zeros((BM, BN), dtype=tl.float32)
        up_sum = tl.zeros((BM, BN), dtype=tl.float32)
        for _ in range(0, groups):
            xs = tl.load(a, mask=inside[:, None], other=0.0)
            gs = tl.load(gate)
            us = tl.load(up)
            row_scale = tl.load(a_scale, mask=inside, other=0.0)
            if WIDE_DOT:
                xs, gs, us = xs.to(tl.float32), gs.to(tl.float32), us.to(tl.float32)
            gate_sum += tl.dot(xs, gs) * (row_scale * tl.load(gate_scale))[:, None]
            up_sum += tl.dot(xs, us) * (row_scale * tl.load(up_scale))[:, None]
            a += GROUP
            gate += GROUP
            up += GROUP
            a_scale += 1
            gate_scale += 1
            up_scale += 1
        value = gate_sum / (1.0 + tl.exp(-gate_sum)) * up_sum
        out = hidden + tl.cast(rows, tl.int64)[:, None] * I + columns[None, :]
        tl.store(out, value.to(hidden.dtype.element_ty), mask=inside[:, None])


@triton.jit
def down_fp8_kernel(
    hidden,  # [sorted rows, I] float8
    hidden_scale,  # [sorted rows, I / GROUP] float32
    w2,  # [E, H, I] float8
    w2_scale,  # [E, H / GROUP, I / GROUP] float32
    y,  # [T * K, H], written at the row's slot
    slot,
    share,
    tile_expert,
    tile_row,
    expert_end,
    num_tiles,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    BM: tl.constexpr,
    BN: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """y[slot] = share * (hidden . w2^T), one [BM, BN] tile at a time; BN divides GROUP."""
    blocks: tl.constexpr = H // BN
    groups: tl.constexpr = I // GROUP
    for work in range(tl.program_id(0), num_tiles * blocks, tl.num_programs(0)):
        tile = work // blocks
        column = (work % blocks) * BN
        expert = tl.load(tile_expert + tile)
        rows = tl.load(tile_row + tile) + tl.arange(0, BM)
        inside = rows < tl.load(expert_end + expert)
        k = tl.arange(0, GROUP)
        columns = column + tl.arange(0, BN)
        a = hidden + tl.cast(rows, tl.int64)[:, None] * I + k[None, :]
        a_scale = hidden_scale + tl.cast(rows, tl.int64) * groups
        b = w2 + tl.cast(expert, tl.int64) * (H * I) + columns[None, :] * I + k[:, None]
        b_scale = w2_scale + tl.cast(expert, tl.int64) * (H // GROUP * groups) + column // GROUP * groups
        total = tl.zeros((BM, BN), dtype=tl.float32)
        for _ in range(0, groups):
            hs = tl.load(a, mask=inside[:, None], other=0.0)
            ws = tl.load(b)
            if WIDE_DOT:
                hs, ws = hs.to(tl.float32), ws.to(tl.float32)
            row_scale = tl.load(a_scale, mask=inside, other=0.0)
            total += tl.dot(hs, ws) * (row_scale * tl.load(b_scale))[:, None]
            a += GROUP
            b += GROUP
            a_scale += 1
            b_scale += 1
        total = total * tl.load(share + rows, mask=inside, other=0.0)[:, None]
        at = tl.load(slot + rows, mask=inside, other=0)
        out = y + tl.cast(at, tl.int64)[:, None] * H + columns[None, :]
        tl.store(out, total.to(y.dtype.element_ty), mask=inside[:, None])
