"""Qwen3-MoE: grouped-query attention with a norm of each head, softmax routing."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from omni_proxy.workers.engine.architectures.architecture import Architecture
from omni_proxy.workers.engine.config_fields import Fields, dense_config, sparse_layers
from omni_proxy.workers.engine.model_config import ModelConfig, Routing


def _read(fields: Fields) -> ModelConfig:
    fields.refuse("use_sliding_window")
    dense = dense_config(fields)
    bias = fields.flag("attention_bias")
    return replace(
        dense,
        qk_norm="heads",
        qkv_bias=bias,
        out_bias=bias,
        num_experts=fields.integer("num_experts", "num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        sparse_layers=sparse_layers(fields, dense.num_layers),
        routing=Routing(renormalise=fields.flag("norm_topk_prob")),
    )


QWEN3_MOE: Final = Architecture(_read)
