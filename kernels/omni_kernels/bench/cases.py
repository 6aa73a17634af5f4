"""What is measured: ops on shapes, each as contestants by backend, with the bytes and FLOP that the op cannot avoid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

import omni_kernels as ops
from omni_kernels import registry
from omni_kernels.packing import PackedExperts

Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer of experts."""

    name: str
    hidden: int
    wide: int
    experts: int
    top_k: int


QWEN: Final = Shape("Qwen3-30B-A3B", 2048, 768, 128, 8)
DEMO: Final = Shape("demo", 256, 128, 16, 2)
SHAPES: Final = {"qwen": QWEN, "demo": DEMO}


CONTESTANTS: Final = (
    ("cpu bf16", torch.bfloat16, 0),
    ("cpu int8", torch.int8, 0),
    ("cpu w8a16", torch.int8, 16),
    ("cpu w8a8", torch.int8, 8),
)
"""Name, dtype and row bits of packed experts."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row group of the table."""

    op: str
    shape: str
    runs: Mapping[str, Run]
    bytes_by_run: Mapping[str, float]
    """What must be read, at least."""
    flop: float


class MoeLayer:
    """Random weights of a shape in bfloat16, packed for each contestant once."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        w13 = (shape.experts, 2 * shape.wide, shape.hidden)
        self.w13 = (torch.randn(w13) / shape.hidden**0.5).to(torch.bfloat16)
        self.w2 = (torch.randn(shape.experts, shape.hidden, shape.wide) / shape.wide**0.5).to(torch.bfloat16)
        self.packed: dict[str, PackedExperts] = {}
        if registry.cpu_library() is not None:
            for name, dtype, row_bits in CONTESTANTS:
                self.packed[name] = ops.pack_experts(self.w13, self.w2, dtype, backend="cpu", row_bits=row_bits)

    def case(self, rows: int, peers: Mapping[str, Callable[[Tensor, Tensor, Tensor], Run]]) -> Case:
        """Contestants for `rows` rows; `peers` make theirs from (x, ids, weights)."""
        shape = self.shape
        x = torch.randn(rows, shape.hidden)
        chosen = torch.Generator().manual_seed(rows)  # `vllm_cpu` chooses the same
        logits = torch.randn(rows, shape.experts, generator=chosen)
        ids, weights, counts = ops.moe_route(logits, shape.top_k, True)
        half = x.to(torch.bfloat16)
        runs: dict[str, Run] = {}
        read: dict[str, float] = {}
        values = int((counts > 0).sum()) * 3 * shape.hidden * shape.wide
        for name, packed in self.packed.items():
            size = 2 if "bf16" in name else 1
            inputs = ((name, half),) if packed.w13.row_bits else ((name, half), (f"{name}, f32 rows", x))
            for label, rows_in in inputs:
                runs[label] = partial(ops.packed_moe, rows_in, packed, ids, weights)
                read[label] = values * size
        runs["torch bf16"] = lambda: registry.TORCH["fused_moe"](half, self.w13, self.w2, ids, weights, counts)
        read["torch bf16"] = values * 2
        for name, make in peers.items():
            runs[name] = make(x, ids, weights)
            read[name] = values * (4 if "f32" in name else 2)
        return Case(
            "fused_moe", f"{shape.name} T={rows}", runs, read, 6.0 * rows * shape.top_k * shape.hidden * shape.wide
        )


def row_ops(rows: int, hidden: int, heads: int, dim: int, kv_len: int) -> Iterator[Case]:
    """Norm, rotation, gate, router and attention, on float32 rows."""
    x, residual, weight = torch.randn(rows, hidden), torch.randn(rows, hidden), torch.rand(hidden)
    cos, sin = (t[:rows] for t in ops.rope_table(dim, max(rows, 2), 1e4))
    q = torch.randn(rows, heads, dim)
    logits = torch.randn(rows, 128)
    size = 16
    blocks = -(-kv_len // size)
    kv = torch.randn(2, rows * blocks, size, heads // 4, dim)
    tables = torch.randperm(rows * blocks).view(rows, blocks).tolist()
    batch = ops.attention_batch([1] * rows, [kv_len] * rows, tables, size)
    calls: dict[str, tuple[tuple[object, ...], float]] = {
        "rms_norm": ((x, weight, 1e-6, residual), 16.0 * rows * hidden),
        "rope": ((q, cos, sin), 8.0 * q.numel()),
        "silu_and_mul": ((x,), 6.0 * rows * hidden),
        "moe_route": ((logits, 8, True), 4.0 * logits.numel()),
        "paged_attention": ((q, kv, batch, dim**-0.5), float(kv.nbytes)),
    }
    for op, (arguments, read) in calls.items():
        runs: dict[str, Run] = {}
        for backend in ("cpu", "torch"):
            table = registry.TORCH if backend == "torch" else _compiled()
            if op in table:
                runs[backend] = partial(table[op], *arguments)
        yield Case(op, f"rows={rows} H={hidden}", runs, dict.fromkeys(runs, read), 0.0)


def _compiled() -> Mapping[str, registry.Op]:
    return {} if registry.cpu_library() is None else registry.ops_of("cpu")
