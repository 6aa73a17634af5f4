"""Pangu Pro MoE: a mixture of grouped experts (MoGE), as many from every group, so that devices are in balance."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from omni_proxy.workers.engine.architectures.architecture import Architecture
from omni_proxy.workers.engine.config_fields import Fields, dense_config, sparse_layers
from omni_proxy.workers.engine.model_config import ModelConfig, Routing


def _read(fields: Fields) -> ModelConfig:
    dense = dense_config(fields)
    top_k = fields.integer("num_experts_per_tok")
    bias = fields.flag("attention_bias", True)
    return replace(
        dense,
        qkv_bias=bias,
        out_bias=bias,
        num_experts=fields.integer("num_experts", "num_local_experts"),
        top_k=top_k,
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        shared_intermediate_size=fields.count("shared_expert_intermediate_size"),
        sparse_layers=sparse_layers(fields, dense.num_layers),
        routing=Routing(
            renormalise=fields.flag("norm_topk_prob"),
            groups=fields.integer("num_expert_groups", default=top_k),
            per_group=True,
            scale=fields.number("routed_scaling_factor", 1.0),
        ),
    )


def _canonical(name: str) -> str:
    return name.replace(".mlp.shared_expert.", ".mlp.shared_experts.")


PANGU_PRO_MOE: Final = Architecture(_read, _canonical)
