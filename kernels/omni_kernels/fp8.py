"""Ops over float8 weights with scales for blocks, as DeepSeek-V3's checkpoints hold them; arguments as in `api.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from omni_kernels.checks import check_choice, check_ids, floats, op_of, require
from omni_kernels.packing import FP8_GROUP

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def dequantise_fp8(w: Tensor, scale: Tensor, block: tuple[int, int] = (FP8_GROUP, FP8_GROUP)) -> Tensor:
    """See `reference.dequantise_fp8`."""
    name = "dequantise_fp8"
    require(w.dim() >= 2, name, "w", "must be [..., n, k]", w.shape)
    require(w.dtype in FLOAT8, name, "w", f"must be one of {FLOAT8}", w.dtype)
    require(len(block) == 2 and min(block) > 0, name, "block", "must be two positive numbers", block)
    n, k = w.shape[-2:]
    want = (*w.shape[:-2], -(-n // block[0]), -(-k // block[1]))
    require(scale.shape == want, name, "scale", f"must be {want}", scale.shape)
    require(scale.is_floating_point(), name, "scale", "must be floating", scale.dtype)
    require(scale.device == w.device, name, "scale", f"must be on {w.device}", scale.device)
    result: Tensor = op_of(name, w)(w, scale, block)
    return result


def fused_moe_fp8(
    x: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """See `reference.fused_moe_fp8`."""
    name = "fused_moe_fp8"
    require(x.dim() == 2, name, "x", "must be [T, H]", x.shape)
    floats(name, "x", x)
    require(w2.dim() == 3, name, "w2", "must be [E, H, I]", w2.shape)
    experts, wide, hidden = w2.shape[0], w2.shape[2], x.shape[1]
    require(hidden % FP8_GROUP == 0, name, "x", f"must have columns that {FP8_GROUP} divides", x.shape)
    require(wide % FP8_GROUP == 0, name, "w2", f"must have columns that {FP8_GROUP} divides", w2.shape)
    shapes = {"w13": (experts, 2 * wide, hidden), "w2": (experts, hidden, wide)}
    for which, w, scale in (("w13", w13, w13_scale), ("w2", w2, w2_scale)):
        want = shapes[which]
        blocks = (want[0], want[1] // FP8_GROUP, want[2] // FP8_GROUP)
        require(w.shape == want, name, which, f"must be {want}", w.shape)
        require(w.dtype == torch.float8_e4m3fn, name, which, "must be float8_e4m3fn", w.dtype)
        require(scale.shape == blocks, name, f"{which}_scale", f"must be {blocks}", scale.shape)
        require(scale.dtype == torch.float32, name, f"{which}_scale", "must be float32", scale.dtype)
        require(w.device == x.device, name, which, f"must be on {x.device}", w.device)
        require(scale.device == x.device, name, f"{which}_scale", f"must be on {x.device}", scale.device)
    check_choice(name, x, ids, weights)
    check_ids(name, experts, ids)
    result: Tensor = op_of(name, x, weights)(x, w13, w13_scale, w2, w2_scale, ids, weights)
    return result
