"""On an NVIDIA GPU: the Triton experts' results and times against torch's grouped product and vLLM's kernel.

Standard output is a table; `--json FILE` writes it too. Exits 1 if a result is wrong. `--dry-run` runs the same code on
the CPU with small shapes: its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import omni_kernels as ops
from omni_kernels import reference
from omni_kernels.packing import quantise_fp8

SHAPES = {"Qwen3-30B-A3B": (2048, 768, 128, 8), "DeepSeek-V3, 32 of its experts": (7168, 2048, 32, 8)}
ROWS = (1, 8, 64, 512, 4096)
DRY_SHAPES = {"small": (256, 128, 4, 2)}
LIMIT = 2e-2
FLUSH_BYTES = 256 << 20
"""Written between runs, so that weights come from memory and not from the L2 cache."""


def milliseconds(run: Callable[[], object], flush: Tensor, turns: int = 20) -> float:
    """Median of device times with a cold cache."""
    times: list[float] = []
    if flush.device.type == "cpu":
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3
    for _ in range(3):
        run()
    for _ in range(turns):
        flush.zero_()
        event: Callable[..., torch.cuda.Event] = torch.cuda.Event
        start, stop = event(enable_timing=True), event(enable_timing=True)
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[turns // 2]


def grouped(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The same by torch's grouped product over sorted rows."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=w13.shape[0]).cumsum(0).int()
    hidden = reference.silu_and_mul(F.grouped_mm(x[order // ids.shape[1]], w13.transpose(1, 2), offs=ends))
    y = F.grouped_mm(hidden, w2.transpose(1, 2), offs=ends)
    y = y * weights.flatten()[order].to(y.dtype).unsqueeze(1)
    return torch.zeros_like(x).index_add_(0, order // ids.shape[1], y)


def vllm_experts(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> Callable[[], Tensor] | None:
    """vLLM's Triton kernel, if it is installed and runs once; else the reason goes to standard error."""
    try:
        from vllm.model_executor.layers.fused_moe import fused_experts  # type: ignore[import-not-found]

        fused_experts(x, w13, w2, weights, ids.int())
    except Exception as exc:  # noqa: BLE001  (a peer's fault, whatever it is, must not cost the run)
        sys.stderr.write(f"left out: vLLM: {type(exc).__name__}: {' '.join(str(exc).split())[:200]}\n")
        return None
    return lambda: fused_experts(x, w13, w2, weights, ids.int())


def fp8(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> tuple[Callable[[], Tensor], float]:
    """The experts over float8 weights, and their error against the definition."""
    (q13, s13), (q2, s2) = quantise_fp8(w13), quantise_fp8(w2)
    got = ops.fused_moe_fp8(x, q13, s13, q2, s2, ids, weights)
    want = reference.fused_moe_fp8(x, q13, s13, q2, s2, ids, weights)
    error = float((got.float() - want.float()).abs().max() / want.float().abs().max())
    return lambda: ops.fused_moe_fp8(x, q13, s13, q2, s2, ids, weights), error


def measure(name: str, rows: int, flush: Tensor) -> dict[str, Any]:
    """One row of the table."""
    hidden, wide, experts, top_k = {**SHAPES, **DRY_SHAPES}[name]
    like: dict[str, Any] = {"device": flush.device, "dtype": torch.bfloat16}
    x = torch.randn(rows, hidden, **like)
    w13 = torch.randn(experts, 2 * wide, hidden, **like) / hidden**0.5
    w2 = torch.randn(experts, hidden, wide, **like) / wide**0.5
    ids, weights, counts = ops.moe_route(torch.randn(rows, experts, device=flush.device), top_k, True)
    want = grouped(x.float().to(torch.bfloat16), w13, w2, ids, weights)
    got = ops.fused_moe(x, w13, w2, ids, weights, counts)
    error = float((got.float() - want.float()).abs().max() / want.float().abs().max())
    runs: dict[str, Callable[[], object]] = {
        "triton": lambda: ops.fused_moe(x, w13, w2, ids, weights, counts),
        "grouped_mm": lambda: grouped(x, w13, w2, ids, weights),
    }
    theirs = vllm_experts(x, w13, w2, ids, weights)
    if theirs is not None:
        runs["vLLM"] = theirs
    runs["triton fp8"], error8 = fp8(x, w13, w2, ids, weights)
    row: dict[str, Any] = {"shape": name, "rows": rows, "error": error, "error fp8": error8}
    for label, run in runs.items():
        row[label] = milliseconds(run, flush)
    read = int((counts > 0).sum()) * 3 * hidden * wide * 2
    row["TB/s"] = read / row["triton"] / 1e9
    row["TF/s"] = 6.0 * rows * top_k * hidden * wide / row["triton"] / 1e9
    return row


def main() -> int:
    """Measure all shapes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--dry-run", action="store_true", help="small shapes on the CPU, to see that all of it runs")
    args = parser.parse_args()
    dry = args.dry_run
    assert dry or ops.backend_of("fused_moe", "cuda") == "triton", ops.backends()
    torch.manual_seed(0)
    flush = torch.empty(1 if dry else FLUSH_BYTES, dtype=torch.uint8, device="cpu" if dry else "cuda")
    device = "dry run on the CPU" if dry else torch.cuda.get_device_name()
    sys.stdout.write(f"{device}, torch {torch.__version__}, bfloat16, ms (median, cold cache)\n")
    rows = []
    with torch.inference_mode():
        for name in DRY_SHAPES if dry else SHAPES:
            for count in ROWS[:3] if dry else ROWS:
                row = measure(name, count, flush)
                rows.append(row)
                cells = (f"{key}={value:.4g}" for key, value in row.items() if isinstance(value, float))
                sys.stdout.write(f"{name:<32} T={count:<5} {' '.join(cells)}\n")
                sys.stdout.flush()
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(max(row["error"], row["error fp8"]) > LIMIT for row in rows))


if __name__ == "__main__":
    sys.exit(main())
