"""Kernels of a mixture-of-experts transformer with a paged KV cache, one definition and several backends each.

`reference` defines the ops in plain torch, `api` checks arguments, `registry` picks the backend, `decoder` is a whole
model's step in one call. Depends on torch alone.
"""

from omni_kernels.api import (
    fused_moe,
    kv_gather,
    kv_scatter,
    kv_write,
    linear,
    mla_attention,
    mla_write,
    moe_route,
    pack,
    pack_experts,
    packed_moe,
    paged_attention,
    rms_norm,
    rope,
    sample,
    silu_and_mul,
)
from omni_kernels.decoder import Chances, Decoder, DecoderLayer, DecoderWeights, Routing, build_decoder
from omni_kernels.drafts import Burst, DraftLuck, DraftPolicy, Drafts
from omni_kernels.fp8 import dequantise_fp8, fused_moe_fp8
from omni_kernels.packing import PackedExperts, PackedMatrix
from omni_kernels.progress import StepProgress
from omni_kernels.ragged import AttentionBatch, attention_batch
from omni_kernels.reference import rope_table
from omni_kernels.registry import DEVICES, OPS, backend_of, backends
from omni_kernels.rope_scaling import RopeScaling, yarn_mscale
from omni_kernels.side import SideStream, side_stream

__all__ = [
    "DEVICES",
    "OPS",
    "AttentionBatch",
    "Burst",
    "Chances",
    "Decoder",
    "DecoderLayer",
    "DecoderWeights",
    "DraftLuck",
    "DraftPolicy",
    "Drafts",
    "PackedExperts",
    "PackedMatrix",
    "RopeScaling",
    "Routing",
    "SideStream",
    "StepProgress",
    "attention_batch",
    "backend_of",
    "backends",
    "build_decoder",
    "dequantise_fp8",
    "fused_moe",
    "fused_moe_fp8",
    "kv_gather",
    "kv_scatter",
    "kv_write",
    "linear",
    "mla_attention",
    "mla_write",
    "moe_route",
    "pack",
    "pack_experts",
    "packed_moe",
    "paged_attention",
    "rms_norm",
    "rope",
    "rope_table",
    "sample",
    "side_stream",
    "silu_and_mul",
    "yarn_mscale",
]
