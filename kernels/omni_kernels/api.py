"""The ops that the engine calls: arguments checked, then handed to the best backend of the tensor's device.

A backend is a mapping from op name to function with the signature of its definition in `reference.py`.
The first backend of a device that has an op serves it, so a backend may cover as few ops as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor

from omni_kernels import reference
from omni_kernels.reference import AttentionBatch, attention_batch, rope_table

__all__ = [
    "BACKENDS",
    "OPS",
    "AttentionBatch",
    "attention_batch",
    "backend_of",
    "fused_moe",
    "kv_gather",
    "kv_scatter",
    "kv_write",
    "moe_route",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_table",
    "silu_and_mul",
]

Op = Callable[..., Any]

OPS: Final = (
    "rms_norm",
    "rope",
    "silu_and_mul",
    "moe_route",
    "fused_moe",
    "paged_attention",
    "kv_write",
    "kv_gather",
    "kv_scatter",
)
_TORCH: Final[Mapping[str, Op]] = {name: getattr(reference, name) for name in OPS}

BACKENDS: Final[Mapping[str, Sequence[tuple[str, Mapping[str, Op]]]]] = {
    "cpu": (("torch", _TORCH),),
    "cuda": (("torch", _TORCH),),
    "npu": (("torch", _TORCH),),
}
"""Backends of each device type, best first."""


def _resolve() -> dict[tuple[str, str], tuple[str, Op]]:
    table: dict[tuple[str, str], tuple[str, Op]] = {}
    for device, backends in BACKENDS.items():
        for name, ops in backends:
            for op, function in ops.items():
                table.setdefault((device, op), (name, function))
    return table


_TABLE: Final[Mapping[tuple[str, str], tuple[str, Op]]] = _resolve()


def backend_of(op: str, device: str) -> str:
    """Name of the backend that serves `op` on a device type; KeyError if there is none."""
    return _TABLE[device, op][0]


def _op(name: str, on: Tensor) -> Op:
    found = _TABLE.get((on.device.type, name))
    if found is None:
        raise ValueError(f"{name}: no backend for device {on.device.type}")
    return found[1]


def _require(holds: bool, op: str, argument: str, why: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{op}: {argument} {why}, got {got}")


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `reference.rms_norm`."""
    width = x.shape[-1]
    _require(weight.shape[-1] == width, "rms_norm", "weight", f"must end in {width}", weight.shape)
    if residual is not None:
        same = residual.shape == x.shape
        _require(same, "rms_norm", "residual", f"must be {tuple(x.shape)}", residual.shape)
    result: tuple[Tensor, Tensor] = _op("rms_norm", x)(x, weight, eps, residual)
    return result


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `reference.rope`."""
    _require(x.dim() == 3 and x.shape[2] % 2 == 0, "rope", "x", "must be [T, heads, even]", x.shape)
    table = (x.shape[0], x.shape[2])
    _require(cos.shape == table, "rope", "cos", f"must be {table}", cos.shape)
    _require(sin.shape == table, "rope", "sin", f"must be {table}", sin.shape)
    result: Tensor = _op("rope", x)(x, cos, sin)
    return result


def silu_and_mul(x: Tensor) -> Tensor:
    """See `reference.silu_and_mul`."""
    _require(x.shape[-1] % 2 == 0, "silu_and_mul", "x", "must have an even last axis", x.shape)
    result: Tensor = _op("silu_and_mul", x)(x)
    return result


def moe_route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """See `reference.moe_route`."""
    _require(logits.dim() == 2, "moe_route", "logits", "must be [T, E]", logits.shape)
    experts = logits.shape[1]
    _require(1 <= top_k <= experts, "moe_route", "top_k", f"must be in 1..{experts}", top_k)
    result: tuple[Tensor, Tensor, Tensor] = _op("moe_route", logits)(logits, top_k, renormalise)
    return result


def fused_moe(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """See `reference.fused_moe`."""
    _require(x.dim() == 2, "fused_moe", "x", "must be [T, H]", x.shape)
    experts, width, hidden = w2.shape[0], w2.shape[2], x.shape[1]
    want13, want2 = (experts, 2 * width, hidden), (experts, hidden, width)
    _require(w13.shape == want13, "fused_moe", "w13", f"must be {want13}", w13.shape)
    _require(w2.shape == want2, "fused_moe", "w2", f"must be {want2}", w2.shape)
    rows = ids.dim() == 2 and ids.shape[0] == x.shape[0]
    _require(rows, "fused_moe", "ids", f"must be [{x.shape[0]}, K]", ids.shape)
    same = weights.shape == ids.shape
    _require(same, "fused_moe", "weights", f"must be {tuple(ids.shape)}", weights.shape)
    _require(counts.shape == (experts,), "fused_moe", "counts", f"must be [{experts}]", counts.shape)
    result: Tensor = _op("fused_moe", x)(x, w13, w2, ids, weights, counts)
    return result


def paged_attention(q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """See `reference.paged_attention`."""
    rows = sum(batch.query_lens)
    _require(q.dim() == 3 and q.shape[0] == rows, "paged_attention", "q", f"needs {rows} rows", q.shape)
    layout = kv.dim() == 5 and kv.shape[0] == 2 and kv.shape[4] == q.shape[2]
    _require(layout, "paged_attention", "kv", "must be [2, blocks, size, heads, D]", kv.shape)
    grouped = q.shape[1] % kv.shape[3] == 0
    _require(grouped, "paged_attention", "q", f"heads must divide by {kv.shape[3]}", q.shape)
    result: Tensor = _op("paged_attention", q)(q, kv, batch, scale)
    return result


def kv_write(kv: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """See `reference.kv_write`."""
    want = (slots.shape[0], *kv.shape[3:])
    _require(k.shape == want, "kv_write", "k", f"must be {want}", k.shape)
    _require(v.shape == want, "kv_write", "v", f"must be {want}", v.shape)
    _op("kv_write", kv)(kv, slots, k, v)


def kv_gather(kv: Tensor, blocks: Tensor) -> Tensor:
    """See `reference.kv_gather`."""
    _require(kv.dim() == 6, "kv_gather", "kv", "must be [layers, 2, blocks, ...]", kv.shape)
    _require(blocks.dim() == 1, "kv_gather", "blocks", "must be [n]", blocks.shape)
    result: Tensor = _op("kv_gather", kv)(kv, blocks)
    return result


def kv_scatter(kv: Tensor, blocks: Tensor, data: Tensor) -> None:
    """See `reference.kv_scatter`."""
    _require(kv.dim() == 6, "kv_scatter", "kv", "must be [layers, 2, blocks, ...]", kv.shape)
    want = (blocks.shape[0], *kv.shape[:2], *kv.shape[3:])
    _require(data.shape == want, "kv_scatter", "data", f"must be {want}", data.shape)
    _op("kv_scatter", kv)(kv, blocks, data)
