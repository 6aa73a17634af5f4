"""Runs in a venv that has vLLM for CPUs: times its fused expert kernel and prints {rows: seconds} as JSON.

Argument: {"shape": [hidden, wide, experts, top_k, threads], "rows": [...], "turns": n}. The last line is the result.
Loads vLLM's library of operators alone, so that nothing else of vLLM's needs to be there.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

FLUSH_BYTES = 256 << 20
REPEAT_S = 2e-3


def load_operators() -> str:
    """Load the library for this CPU and return the instruction set to ask it for."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise SystemExit("vllm is not installed here")
    capability = torch.backends.cpu.get_cpu_capability()
    tiles = torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()
    name = "_C" if tiles else "_C_AVX512" if capability == "AVX512" else "_C_AVX2"
    library = Path(spec.origin).with_name(f"{name}.abi3.so")
    load: Callable[[str], None] = torch.ops.load_library
    load(str(library if library.exists() else library.with_name("_C.abi3.so")))
    return "amx" if tiles else "vec"


def least(run: Callable[[], object], turns: int, clock: Callable[[], float], flush: Callable[[], object]) -> float:
    """As the bench measures its own: long runs read weights from memory, as after other layers; short ones repeat."""
    run()
    start = clock()
    run()
    count = max(1, int(REPEAT_S / max(clock() - start, 1e-7)))
    best = float("inf")
    for _ in range(turns):
        flush()
        if count > 1:
            run()
        start = clock()
        for _ in range(count):
            run()
        best = min(best, (clock() - start) / count)
    return best


def main() -> None:
    """Measure every number of rows and print the least times."""
    request = json.loads(sys.argv[1])
    hidden, wide, experts, top_k, threads = request["shape"]
    torch.set_num_threads(threads)
    isa = load_operators()
    ops = torch.ops._C
    packed = []
    for shape in ((experts, 2 * wide, hidden), (experts, hidden, wide)):
        weight = torch.randn(shape).to(torch.bfloat16)
        packed.append(torch.empty_like(weight))
        ops.prepack_moe_weight(weight, packed[-1], isa)
    result = {}
    flush = torch.ones(FLUSH_BYTES // 8, dtype=torch.int64)
    clock = time.thread_time if threads == 1 else time.perf_counter
    for rows in request["rows"]:
        x = torch.randn(rows, hidden).to(torch.bfloat16)
        chosen = torch.Generator().manual_seed(rows)  # the experts that `cases.MoeLayer` chooses
        weights, ids = torch.randn(rows, experts, generator=chosen).softmax(-1).topk(top_k)
        out, ids = torch.empty_like(x), ids.to(torch.int32)
        run = partial(ops.cpu_fused_moe, out, x, *packed, None, None, weights, ids, False, "silu", isa)
        result[rows] = least(run, request["turns"], clock, flush.sum)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
