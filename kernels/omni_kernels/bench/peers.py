"""Other people's expert layers on the same weights: transformers' block, and vLLM's CPU kernel from a venv of its own.

A peer that cannot be had is left out, with the reason in the table's foot.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omni_kernels.bench.cases import Run, Shape

Make = Callable[[Tensor, Tensor, Tensor], Run]
VLLM_SCRIPT = Path(__file__).with_name("vllm_cpu.py")


def transformers_peers(shape: Shape, w13: Tensor, w2: Tensor, *, float32: bool) -> tuple[dict[str, Make], str]:
    """Qwen3-MoE's experts as transformers runs them, by implementation and dtype; or why not."""
    try:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
    except ImportError as exc:
        return {}, f"transformers: {exc}"
    made: dict[str, Make] = {}
    dtypes = {"bf16": torch.bfloat16, **({"f32": torch.float32} if float32 else {})}
    for implementation in ("eager", "grouped_mm"):
        for label, dtype in dtypes.items():
            sizes: dict[str, Any] = {
                "hidden_size": shape.hidden,
                "moe_intermediate_size": shape.wide,
                "num_experts": shape.experts,
                "num_experts_per_tok": shape.top_k,
                "experts_implementation": implementation,
            }
            experts_class: Any = Qwen3MoeExperts
            with torch.device("meta"):
                block = experts_class(Qwen3MoeConfig(**sizes))
            block.gate_up_proj = torch.nn.Parameter(w13.to(dtype), requires_grad=False)
            block.down_proj = torch.nn.Parameter(w2.to(dtype), requires_grad=False)
            made[f"transformers {implementation} {label}"] = _bind(block, dtype)
    return made, ""


def _bind(block: Any, dtype: torch.dtype) -> Make:
    def make(x: Tensor, ids: Tensor, weights: Tensor) -> Run:
        rows, shares = x.to(dtype), weights.to(dtype)
        return lambda: block(rows, ids, shares)

    return make


def vllm_times(
    venv: Path | None, shape: Shape, rows: list[int], threads: int, turns: int = 12
) -> tuple[Mapping[int, float], str]:
    """Least seconds of vLLM's CPU kernel by number of rows, measured by a script in its venv; or why not."""
    if venv is None:
        return {}, "vLLM: no venv given (--vllm-venv)"
    python = venv / "bin" / "python"
    if not python.is_file():
        return {}, f"vLLM: {python} is missing"
    sizes = [shape.hidden, shape.wide, shape.experts, shape.top_k, threads]
    command = [str(python), str(VLLM_SCRIPT), json.dumps({"shape": sizes, "rows": rows, "turns": turns})]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    except subprocess.TimeoutExpired:
        return {}, "vLLM: no answer in 900 s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {}, f"vLLM: {last[:200]}"
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {int(n): seconds for n, seconds in found.items()}, ""
