"""The op `fused_moe_fp8` on its Triton kernels. Chips without float8 units (before sm_89) use the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from omni_kernels import reference
from omni_kernels.packing import FP8_GROUP, quantise_rows_fp8
from omni_kernels.triton.fp8_kernels import down_fp8_kernel, gate_up_fp8_kernel, quantise_kernel
from omni_kernels.triton.moe_kernels import combine_kernel
from omni_kernels.triton.ops import DTYPES, chip, interpreted, plan
from omni_kernels.triton.tuning import Tiles, fp8_tiles, largest_power


def fused_moe_fp8(
    x: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """See `reference.fused_moe_fp8`."""
    rows, hidden = x.shape
    experts, wide = w2.shape[0], w2.shape[2]
    if x.dtype not in DTYPES or not _has_units(x):
        return reference.fused_moe_fp8(x, w13, w13_scale, w2, w2_scale, ids, weights)
    out = torch.empty_like(x)
    if not rows:
        return out
    _, programs = chip(x.device.type)
    tile = fp8_tiles(rows * ids.shape[1] / experts)
    work = plan(ids, weights, experts, tile.bm)
    middle = torch.zeros((ids.numel(), wide), dtype=x.dtype, device=x.device)
    y = torch.empty((ids.numel(), hidden), dtype=x.dtype, device=x.device)
    shared = {"H": hidden, "I": wide, "GROUP": FP8_GROUP, "WIDE_DOT": interpreted(), **_launch(tile)}
    where = (work.tile_expert, work.tile_row, work.expert_end, work.num_tiles)
    # Triton 3.9's interpreter drops the carry when rounding up to a power of two in float8: torch quantises for it.
    quantised = quantise_rows_fp8 if interpreted() else quantise
    gate_up_fp8_kernel[(programs,)](
        *quantised(x), w13.contiguous(), w13_scale.contiguous(), middle, work.source, *where, **shared
    )
    down_fp8_kernel[(programs,)](
        *quantised(middle), w2.contiguous(), w2_scale.contiguous(), y, work.slot, work.share, *where, **shared
    )
    width = largest_power(hidden, 1024)
    combine_kernel[(programs,)](y, ids.int().contiguous(), out, rows, H=hidden, K=ids.shape[1], BH=width)
    return out


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `packing.quantise_rows_fp8`."""
    x = x.contiguous()
    groups = x.numel() // FP8_GROUP
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((*x.shape[:-1], x.shape[-1] // FP8_GROUP), device=x.device)
    if groups:
        programs = min(groups, 16 * chip(x.device.type)[1])
        quantise_kernel[(programs,)](x, values, scales, groups, GROUP=FP8_GROUP)
    return values, scales


def _has_units(x: Tensor) -> bool:
    return interpreted() or (x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= (8, 9))


def _launch(tile: Tiles) -> dict[str, int]:
    return {"BM": tile.bm, "BN": tile.bn, "num_warps": tile.warps, "num_stages": tile.stages}
