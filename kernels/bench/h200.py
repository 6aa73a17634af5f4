"""On an NVIDIA GPU: the Triton experts' results and times against torch's grouped product and vLLM's kernel.

Standard output is a table; `--json FILE` writes it too. Exits 1 if a result is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import omni_kernels as ops
from omni_kernels import reference

SHAPES = {"Qwen3-30B-A3B": (2048, 768, 128, 8), "DeepSeek-V3, 32 of its experts": (7168, 2048, 32, 8)}
ROWS = (1, 8, 64, 512, 4096)
LIMIT = 2e-2
FLUSH_BYTES = 256 << 20
"""Written between runs, so that weights come from memory and not from the L2 cache."""


def milliseconds(run: Callable[[], object], flush: Tensor, turns: int = 20) -> float:
    """Median of device times with a cold cache."""
    times: list[float] = []
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


def vllm_experts() -> Callable[..., Tensor] | None:
    """vLLM's Triton kernel, if it is installed."""
    try:
        from vllm.model_executor.layers.fused_moe import fused_experts  # type: ignore[import-not-found]
    except ImportError:
        return None
    found: Callable[..., Tensor] = fused_experts
    return found


def measure(name: str, rows: int, flush: Tensor) -> dict[str, Any]:
    """One row of the table."""
    hidden, wide, experts, top_k = SHAPES[name]
    like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(rows, hidden, **like)
    w13 = torch.randn(experts, 2 * wide, hidden, **like) / hidden**0.5
    w2 = torch.randn(experts, hidden, wide, **like) / wide**0.5
    ids, weights, counts = ops.moe_route(torch.randn(rows, experts, device="cuda"), top_k, True)
    want = grouped(x.float().to(torch.bfloat16), w13, w2, ids, weights)
    got = ops.fused_moe(x, w13, w2, ids, weights, counts)
    error = float((got.float() - want.float()).abs().max() / want.float().abs().max())
    runs: dict[str, Callable[[], object]] = {
        "triton": lambda: ops.fused_moe(x, w13, w2, ids, weights, counts),
        "grouped_mm": lambda: grouped(x, w13, w2, ids, weights),
    }
    theirs = vllm_experts()
    if theirs is not None:
        runs["vLLM"] = lambda: theirs(x, w13, w2, weights, ids.int())
    row: dict[str, Any] = {"shape": name, "rows": rows, "error": error}
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
    args = parser.parse_args()
    assert ops.backend_of("fused_moe", "cuda") == "triton", ops.backends()
    torch.manual_seed(0)
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    sys.stdout.write(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, ms (median, cold cache)\n")
    rows = []
    with torch.inference_mode():
        for name in SHAPES:
            for count in ROWS:
                row = measure(name, count, flush)
                rows.append(row)
                cells = (f"{key}={value:.4g}" for key, value in row.items() if isinstance(value, float))
                sys.stdout.write(f"{name:<32} T={count:<5} {' '.join(cells)}\n")
                sys.stdout.flush()
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(row["error"] > LIMIT for row in rows))


if __name__ == "__main__":
    sys.exit(main())
