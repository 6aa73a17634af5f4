"""The ops of `reference` on the Triton kernels: launches, work lists and grids. Nothing here is synchronous but `pack`.

On NVIDIA rows are gathered inside the first kernel; on Ascend beforehand, since a gather in its K loop is copied row
by row. The interpreter (TRITON_INTERPRET=1) runs the same code on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import torch
import triton
from torch import Tensor

from omni_kernels import reference
from omni_kernels.packing import PackedExperts, PackedMatrix
from omni_kernels.triton.moe_kernels import combine_kernel, down_kernel, gate_up_kernel
from omni_kernels.triton.row_kernels import rms_norm_kernel, rope_kernel, silu_and_mul_kernel
from omni_kernels.triton.tuning import Tiles, largest_power, tiles

DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


def interpreted() -> bool:
    """Whether Triton interprets its kernels here."""
    return bool(triton.knobs.runtime.interpret)


@cache
def chip(device: str) -> tuple[str, int]:
    """(key of the tuning file, number of programs that fill the chip)."""
    if device == "cuda" and not interpreted():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return ("sm_90" if properties.major >= 9 else "sm_80"), properties.multi_processor_count
    if device == "npu":
        npu: Any = triton.runtime.driver.active.utils.get_device_properties(0)
        return "ascend", int(npu["num_aicore"])
    return "sm_80", 3


@dataclass(frozen=True, slots=True)
class Work:
    """Rows sorted by expert and cut into tiles, all on the device."""

    source: Tensor
    slot: Tensor
    share: Tensor
    tile_expert: Tensor
    tile_row: Tensor
    expert_end: Tensor
    num_tiles: int


def plan(ids: Tensor, weights: Tensor, experts: int, bm: int) -> Work:
    """Sort the choices by expert (-1 last) and list the tiles.

    The list is as long as it can get at most, without asking the device for counts: tiles past the end name rows
    past their expert's end and store nothing.
    """
    rows, top_k = ids.shape
    flat = ids.flatten().long()
    key = torch.where(flat < 0, experts, flat)
    order = key.argsort(stable=True)
    counts = torch.bincount(key, minlength=experts + 1)[:experts]
    end = counts.cumsum(0)
    tiles_each = (counts + bm - 1) // bm
    tile_end = tiles_each.cumsum(0)
    most = min(rows * top_k, experts + rows * top_k // bm)
    number = torch.arange(most, device=ids.device)
    expert = torch.searchsorted(tile_end, number, right=True).clamp_(max=experts - 1)
    first = end[expert] - counts[expert] + (number - (tile_end - tiles_each)[expert]) * bm
    first = torch.where(number < tile_end[-1], first, rows * top_k)
    return Work(
        (order // top_k).int(),
        order.int(),
        weights.flatten().float()[order],
        expert.int(),
        first.int(),
        end.int(),
        most,
    )


def fused_moe(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, counts: Tensor | None = None) -> Tensor:
    """See `reference.fused_moe`. Shapes that 16 does not divide go to the definition."""
    rows, hidden = x.shape
    experts, wide = w2.shape[0], w2.shape[2]
    if x.dtype not in DTYPES or hidden % 16 or wide % 16:
        if counts is None:
            counts = torch.bincount(ids[ids >= 0].flatten(), minlength=experts)
        return reference.fused_moe(x, w13, w2, ids, weights, counts)
    out = torch.empty_like(x)
    if not rows:
        return out
    key, programs = chip(x.device.type)
    per_expert = rows * ids.shape[1] / experts
    up, down = tiles(key, "gate_up", per_expert, wide, hidden), tiles(key, "down", per_expert, hidden, wide)
    assert up.bm == down.bm, "one work list serves both products"
    work = plan(ids, weights, experts, up.bm)
    middle = torch.empty((ids.numel(), wide), dtype=x.dtype, device=x.device)
    y = torch.empty((ids.numel(), hidden), dtype=x.dtype, device=x.device)
    gathered = key == "ascend"
    entry = x.contiguous()[work.source.long()] if gathered else x.contiguous()
    shared = {"H": hidden, "I": wide, "WIDE_DOT": interpreted() and x.dtype == torch.bfloat16}
    where = (work.tile_expert, work.tile_row, work.expert_end, work.num_tiles)
    gate_up_kernel[(programs,)](
        entry, w13.contiguous(), middle, work.source, *where, **shared, GATHERED=gathered, **_launch(up)
    )
    down_kernel[(programs,)](middle, w2.contiguous(), y, work.slot, work.share, *where, **shared, **_launch(down))
    width = largest_power(hidden, 1024)
    combine_kernel[(programs,)](y, ids.int().contiguous(), out, rows, H=hidden, K=ids.shape[1], BH=width)
    return out


def pack(w: Tensor, dtype: torch.dtype | None = None, gated: bool = False) -> PackedMatrix:
    """Rows as they are; int8 is the definition's alone as yet, so that packs it."""
    plain = reference.pack(w, dtype, gated)
    return plain if plain.scale is not None else replace(plain, backend="triton")


def linear(x: Tensor, w: PackedMatrix) -> Tensor:
    """See `reference.linear`: the vendor's GEMM serves dense matrices best."""
    return reference.linear(x, w)


def packed_moe(x: Tensor, experts: PackedExperts, ids: Tensor, weights: Tensor) -> Tensor:
    """See `reference.packed_moe`."""
    dtype = experts.w13.data.dtype
    out = fused_moe(x.to(dtype), experts.w13.data, experts.w2.data, ids, weights).to(x.dtype)
    if experts.shared13 is not None and experts.shared2 is not None:
        out += linear(silu_and_mul(linear(x, experts.shared13)), experts.shared2)
    return out


def _launch(tile: Tiles) -> dict[str, int]:
    return {"BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "num_warps": tile.warps, "num_stages": tile.stages}


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `reference.rms_norm`."""
    width = x.shape[-1]
    if x.dtype not in DTYPES or x.shape[x.dim() - weight.dim() :] != weight.shape or not x.numel():
        return reference.rms_norm(x, weight, eps, residual)
    x = x.contiguous()
    out = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    other = x if residual is None else residual.contiguous()
    rows = x.numel() // width
    rms_norm_kernel[(_programs(x, rows),)](
        x, other, weight.contiguous(), out, total, rows, eps, N=width, WEIGHT_ROWS=weight.numel() // width,
        BN=triton.next_power_of_2(width), ADD=residual is not None,
    )  # fmt: skip
    return out, total


def silu_and_mul(x: Tensor) -> Tensor:
    """See `reference.silu_and_mul`."""
    width = x.shape[-1] // 2
    if x.dtype not in DTYPES or not x.numel():
        return reference.silu_and_mul(x)
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    rows = x.numel() // (2 * width)
    block = min(triton.next_power_of_2(width), 1024)
    silu_and_mul_kernel[(_programs(x, rows),)](x.contiguous(), out, rows, N=width, BN=block)
    return out


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `reference.rope`."""
    rows, heads, dim = x.shape
    if x.dtype not in DTYPES or not x.numel():
        return reference.rope(x, cos, sin)
    if x.stride(2) != 1 or x.stride(1) != dim:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rope_kernel[(_programs(x, rows * heads),)](
        x, cos.contiguous(), sin.contiguous(), out, rows, x.stride(0), HEADS=heads, D=dim,
        BD=triton.next_power_of_2(dim // 2),
    )  # fmt: skip
    return out


def _programs(x: Tensor, work: int) -> int:
    return min(work, 8 * chip(x.device.type)[1])


def table() -> Mapping[str, Callable[..., Any]]:
    """The ops by name."""
    from omni_kernels.triton.fp8 import fused_moe_fp8  # which builds on this module

    functions = (fused_moe, fused_moe_fp8, pack, linear, packed_moe, rms_norm, silu_and_mul, rope)
    return {function.__name__: function for function in functions}
