"""Runs in a venv that has vLLM for CPUs: times its fused expert kernel and prints {rows: seconds} as JSON.

Argument: {"shape": [hidden, wide, experts, top_k, threads], "rows": [...]}. Standard output ends with the result.
"""

from __future__ import annotations

import json
import sys
import time

import torch


def main() -> None:
    """Measure every number of rows and print the least times."""
    request = json.loads(sys.argv[1])
    hidden, wide, experts, top_k, threads = request["shape"]
    torch.set_num_threads(threads)
    import vllm._custom_ops as ops  # type: ignore[import-not-found]  # its venv alone has it

    isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
    w13 = torch.randn(experts, 2 * wide, hidden, dtype=torch.bfloat16)
    w2 = torch.randn(experts, hidden, wide, dtype=torch.bfloat16)
    packed13, packed2 = (ops.cpu_prepack_moe_weight(w, isa) for w in (w13, w2))
    result = {}
    for rows in request["rows"]:
        x = torch.randn(rows, hidden, dtype=torch.bfloat16)
        weights, ids = torch.randn(rows, experts).softmax(-1).topk(top_k)
        ids = ids.to(torch.int32)
        best = float("inf")
        for _ in range(8):
            start = time.perf_counter()
            ops.cpu_fused_moe(x, packed13, packed2, None, None, weights, ids, "silu", isa)
            best = min(best, time.perf_counter() - start)
        result[rows] = best
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
