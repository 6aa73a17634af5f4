"""DeepSeek-V2 and V3: latent attention, shared experts, dense first layers, routing limited to the best groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from omni_proxy.workers.engine.architectures.architecture import Architecture
from omni_proxy.workers.engine.config_fields import Fields, dense_config
from omni_proxy.workers.engine.model_config import Latent, ModelConfig, Routing


def _read_v3(fields: Fields) -> ModelConfig:
    method = fields.raw.get("topk_method", "noaux_tc")
    if method != "noaux_tc":
        raise fields.error(f"topk_method {method!r} is not supported (noaux_tc is)")
    routing = Routing(
        scoring="sigmoid",
        renormalise=fields.flag("norm_topk_prob", True),
        corrected=True,
        groups=fields.integer("n_group", default=1),
        top_groups=fields.integer("topk_group", default=1),
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    return _read(fields, routing, interleaved=fields.flag("rope_interleave", True))


def _read_v2(fields: Fields) -> ModelConfig:
    fields.refuse("norm_topk_prob")
    method = fields.raw.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error(f"topk_method {method!r} is not supported (greedy and group_limited_greedy are)")
    limited = method == "group_limited_greedy"
    routing = Routing(
        renormalise=False,
        groups=fields.integer("n_group", default=1) if limited else 1,
        top_groups=fields.integer("topk_group", default=1) if limited else 1,
        group_best=1,
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    return _read(fields, routing, interleaved=True)


def _read(fields: Fields, routing: Routing, interleaved: bool) -> ModelConfig:
    fields.refuse("attention_bias")
    if fields.integer("moe_layer_freq", default=1) != 1:
        raise fields.error("moe_layer_freq is not supported")
    latent = Latent(
        rank=fields.integer("kv_lora_rank"),
        plain_dim=fields.integer("qk_nope_head_dim"),
        rotary_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
        query_rank=fields.integer("q_lora_rank") if fields.raw.get("q_lora_rank") else None,
        interleaved=interleaved,
    )
    dense = dense_config(fields)
    wide = fields.integer("moe_intermediate_size")
    return replace(
        dense,
        num_kv_heads=1,
        head_dim=latent.rank + latent.rotary_dim,
        latent=latent,
        num_experts=fields.integer("n_routed_experts", "num_local_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        moe_intermediate_size=wide,
        shared_intermediate_size=wide * fields.count("n_shared_experts"),
        sparse_layers=frozenset(range(fields.count("first_k_dense_replace"), dense.num_layers)),
        routing=routing,
        draft_layers=fields.count("num_nextn_predict_layers"),
    )


DEEPSEEK_V2: Final = Architecture(_read_v2)
DEEPSEEK_V3: Final = Architecture(_read_v3)
