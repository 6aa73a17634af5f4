"""OLMoE: queries and keys are normed over all heads at once and may be cut; experts' weights are not renormalised."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from omni_proxy.workers.engine.architectures.architecture import Architecture
from omni_proxy.workers.engine.config_fields import Fields, dense_config
from omni_proxy.workers.engine.model_config import ModelConfig, Routing


def _read(fields: Fields) -> ModelConfig:
    fields.refuse("attention_bias")
    dense = dense_config(fields)
    clip = fields.raw.get("clip_qkv")
    return replace(
        dense,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
        qk_norm="rows",
        clip_qkv=None if clip is None else fields.number("clip_qkv", 1.0),
        num_experts=fields.integer("num_experts", "num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        moe_intermediate_size=dense.intermediate_size,
        sparse_layers=frozenset(range(dense.num_layers)),
        routing=Routing(renormalise=fields.flag("norm_topk_prob")),
    )


OLMOE: Final = Architecture(_read)
