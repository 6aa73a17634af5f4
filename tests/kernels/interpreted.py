"""Runs the Triton kernels in the interpreter and prints each case's error, relative to the largest value, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from omni_kernels import reference
from omni_kernels.packing import PackedExperts, quantise_fp8, quantise_rows_fp8
from omni_kernels.triton import ops
from omni_kernels.triton.fp8 import fused_moe_fp8, quantise

MOE = {
    "one row": (1, 4, 2, 32, 16),
    "all experts": (5, 3, 3, 64, 48),
    "more tiles than experts": (40, 2, 1, 32, 32),
    "no rows": (0, 4, 2, 32, 16),
    "odd sizes": (3, 4, 2, 30, 10),
}


def error(got: Tensor, want: Tensor) -> float:
    """Largest difference; infinite if shapes or NaNs differ."""
    if got.shape != want.shape or not got.isfinite().all():
        return float("inf")
    if not want.numel():
        return 0.0
    return float((got.float() - want.float()).abs().max() / want.float().abs().max())


def moe(name: str, dtype: torch.dtype) -> float:
    """The fused experts of one case; two choices are -1 where there are enough rows."""
    rows, experts, top_k, hidden, wide = MOE[name]
    x = torch.randn(rows, hidden).to(dtype)
    w13 = (torch.randn(experts, 2 * wide, hidden) / hidden**0.5).to(dtype)
    w2 = (torch.randn(experts, hidden, wide) / wide**0.5).to(dtype)
    ids, weights, _ = reference.moe_route(torch.randn(rows, experts), top_k, True)
    if rows > 3:
        ids[0, 0], ids[3] = -1, -1
    counts = torch.bincount(ids[ids >= 0], minlength=experts)
    got = ops.fused_moe(x, w13, w2, ids, weights, counts)
    return error(got, reference.fused_moe(x.float(), w13.float(), w2.float(), ids, weights, counts))


def packed() -> float:
    """Packed experts with a shared one."""
    x, w13, w2 = torch.randn(5, 32), torch.randn(3, 32, 32) / 6, torch.randn(3, 32, 16) / 4
    shared = (torch.randn(32, 32) / 6, torch.randn(32, 16) / 4)
    ids, weights, _ = reference.moe_route(torch.randn(5, 3), 2, True)

    def experts(pack: Any) -> PackedExperts:
        return PackedExperts(pack(w13, None, True), pack(w2), pack(shared[0], None, True), pack(shared[1]))

    got = ops.packed_moe(x, experts(ops.pack), ids, weights)
    return error(got, reference.packed_moe(x, experts(reference.pack), ids, weights))


def moe_fp8(rows: int, top_k: int) -> float:
    """The fused experts over float8 weights, a choice of -1 among them."""
    experts, hidden, wide = 3, 256, 128
    x = torch.randn(rows, hidden)
    w13 = quantise_fp8(torch.randn(experts, 2 * wide, hidden) / hidden**0.5)
    w2 = quantise_fp8(torch.randn(experts, hidden, wide) / wide**0.5)
    ids, weights, _ = reference.moe_route(torch.randn(rows, experts), top_k, True)
    if rows > 1:
        ids[1, 0] = -1
    got = fused_moe_fp8(x, *w13, *w2, ids, weights)
    return error(got, reference.fused_moe_fp8(x, *w13, *w2, ids, weights))


def rows_to_fp8() -> float:
    """Quantised rows, but for the powers of two, to which the interpreter rounds wrongly."""
    x = torch.randn(7, 384)
    (values, scales), (want, want_scales) = quantise(x), quantise_rows_fp8(x)
    exact = want.float().abs().frexp().mantissa != 0.5
    same = values.float()[exact].equal(want.float()[exact])
    return error(scales, want_scales) if same else float("inf")


def row_ops() -> dict[str, float]:
    """Norm, gate and rotation, with strides and repeated weights."""
    x, residual, weight = torch.randn(3, 4, 40), torch.randn(3, 4, 40), torch.randn(4, 40)
    pairs: dict[str, Any] = {
        "rms_norm": (ops.rms_norm(x, weight, 1e-6)[0], reference.rms_norm(x, weight, 1e-6)[0]),
        "residual": (ops.rms_norm(x, weight, 1e-6, residual), reference.rms_norm(x, weight, 1e-6, residual)),
        "silu_and_mul": (ops.silu_and_mul(x), reference.silu_and_mul(x)),
    }
    cos, sin = (t[2:5] for t in reference.rope_table(24, 9, 1e4))
    q = torch.randn(3, 6, 24)[:, :4]
    pairs["rope"] = (ops.rope(q, cos, sin), reference.rope(q, cos, sin))
    first, second = pairs.pop("residual")
    pairs["residual normed"], pairs["residual sum"] = (first[0], second[0]), (first[1], second[1])
    return {name: error(got, want) for name, (got, want) in pairs.items()}


def main() -> None:
    """Print {case: error}."""
    assert ops.interpreted()
    torch.manual_seed(0)
    errors = {**row_ops(), "packed": packed()}
    errors["moe float8 one row"], errors["moe float8 rows"] = moe_fp8(1, 2), moe_fp8(20, 3)
    errors["rows to float8"] = rows_to_fp8()
    cases = [(name, torch.float32) for name in MOE]
    cases += [("all experts", torch.float16), ("all experts", torch.bfloat16)]
    for name, dtype in cases:
        errors[f"moe {str(dtype).removeprefix('torch.')} {name}"] = moe(name, dtype)
    sys.stdout.write(json.dumps(errors) + "\n")


if __name__ == "__main__":
    main()
