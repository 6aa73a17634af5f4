"""Row-wise kernels: RMS norm with residual, gate, rotation. Pure Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x, residual, weight, out, total, num_rows, eps, N: tl.constexpr, WEIGHT_ROWS: tl.constexpr, BN: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """out = norm(x + residual) * weight; total = x + residual. One row at a time; the weight's rows repeat."""
    columns = tl.arange(0, BN)
    inside = columns < N
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * N + columns
        value = tl.load(x + at, mask=inside, other=0.0)
        if ADD:
            value = value + tl.load(residual + at, mask=inside, other=0.0)
            tl.store(total + at, value, mask=inside)
        wide = value.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / N + eps)
        factor = tl.load(weight + (row % WEIGHT_ROWS) * N + columns, mask=inside, other=0.0)
        normed = (wide * scale).to(out.dtype.element_ty) * factor
        tl.store(out + at, normed, mask=inside)


@triton.jit
def silu_and_mul_kernel(x, out, num_rows, N: tl.constexpr, BN: tl.constexpr):
    """out = silu(first half) * second half of each row of 2N."""
    blocks: tl.constexpr = (N + BN - 1) // BN
    for work in range(tl.program_id(0), num_rows * blocks, tl.num_programs(0)):
        row = work // blocks
        columns = (work % blocks) * BN + tl.arange(0, BN)
        inside = columns < N
        at = x + tl.cast(row, tl.int64) * (2 * N) + columns
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + N, mask=inside, other=0.0).to(tl.float32)
        value = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out + tl.cast(row, tl.int64) * N + columns, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rope_kernel(x, cos, sin, out, num_rows, row_stride, HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Half-split rotation of [rows, HEADS, D]; the first half of the sines is negated in the table."""
    half: tl.constexpr = D // 2
    i = tl.arange(0, BD)
    inside = i < half
    for work in range(tl.program_id(0), num_rows * HEADS, tl.num_programs(0)):
        row = work // HEADS
        head = work % HEADS
        at = x + tl.cast(row, tl.int64) * row_stride + head * D + i
        a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(at + half, mask=inside, other=0.0).to(tl.float32)
        table = row * D + i
        cos_a = tl.load(cos + table, mask=inside, other=0.0).to(tl.float32)
        cos_b = tl.load(cos + table + half, mask=inside, other=0.0).to(tl.float32)
        sin_a = tl.load(sin + table, mask=inside, other=0.0).to(tl.float32)
        sin_b = tl.load(sin + table + half, mask=inside, other=0.0).to(tl.float32)
        place = out + tl.cast(work, tl.int64) * D + i
        tl.store(place, (a * cos_a + b * sin_a).to(out.dtype.element_ty), mask=inside)
        tl.store(place + half, (b * cos_b + a * sin_b).to(out.dtype.element_ty), mask=inside)
