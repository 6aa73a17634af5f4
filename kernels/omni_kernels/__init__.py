"""Kernels of a mixture-of-experts transformer with a paged KV cache, one definition and several backends each.

`reference` defines the ops in plain torch, `api` checks arguments and picks the backend. Depends on torch alone.
"""

from omni_kernels.api import (
    BACKENDS,
    OPS,
    AttentionBatch,
    attention_batch,
    backend_of,
    fused_moe,
    kv_gather,
    kv_scatter,
    kv_write,
    moe_route,
    paged_attention,
    rms_norm,
    rope,
    rope_table,
    silu_and_mul,
)

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
