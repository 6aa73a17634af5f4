"""Names and shapes of the tensors that a checkpoint must hold, from its config. Pure.

Canonical names are those of Qwen3-MoE and DeepSeek in Hugging Face's format; `architectures/` maps others to them.
Those of a draft head begin with `draft.` instead of a layer's number.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Final

from omni_proxy.workers.engine.model_config import Latent, ModelConfig

Shape = tuple[int, ...]
DRAFT: Final = "draft."
_SHARED: Final = (DRAFT + "embed_tokens.weight", DRAFT + "shared_head.head.weight")
"""Copies of the model's own, which a head shares."""


def tensor_shapes(config: ModelConfig, present: Container[str]) -> dict[str, Shape]:
    """All tensors; where a checkpoint has a choice (experts stacked or single), that which is `present`."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        shapes.update({prefix + name: shape for name, shape in layer_shapes(config, i, prefix, present).items()})
    if config.draft_layers:
        shapes.update(_draft_shapes(config, present))
    return shapes


def layer_shapes(config: ModelConfig, layer: int, prefix: str, present: Container[str]) -> dict[str, Shape]:
    """The tensors of one decoder layer, without its prefix."""
    norms = dict.fromkeys(("input_layernorm.weight", "post_attention_layernorm.weight"), (config.hidden_size,))
    return {**norms, **_attention(config), **_mlp(config, layer, prefix, present)}


def draft_layer(config: ModelConfig) -> ModelConfig:
    """`config` with layer `num_layers` as that of the draft head has it: with experts where the model has any."""
    return replace(config, sparse_layers=frozenset({config.num_layers} if config.num_experts else ()))


def _draft_shapes(config: ModelConfig, present: Container[str]) -> dict[str, Shape]:
    """One layer more, behind a projection of the next token's embedding and the last hidden state (DeepSeek-V3)."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        **dict.fromkeys(("enorm.weight", "hnorm.weight", "shared_head.norm.weight"), (hidden,)),
        "eh_proj.weight": (hidden, 2 * hidden),
        **layer_shapes(draft_layer(config), config.num_layers, DRAFT, present),
    }
    return {DRAFT + name: shape for name, shape in shapes.items()}


def draft_name(name: str, config: ModelConfig) -> str:
    """The canonical name of a tensor that may be one of the layer behind the last, DeepSeek-V3's place for the head."""
    prefix = f"model.layers.{config.num_layers}."
    return DRAFT + name.removeprefix(prefix) if name.startswith(prefix) else name


def stored_name(name: str, config: ModelConfig) -> str:
    """What `draft_name` makes a canonical name of."""
    return f"model.layers.{config.num_layers}." + name.removeprefix(DRAFT) if name.startswith(DRAFT) else name


def may_be_ignored(name: str, config: ModelConfig) -> bool:
    """Tensors that say nothing new (tied heads, rotary tables) or that nobody asked for (a head, layers beyond it)."""
    if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq") or name.startswith("model.mtp_layers."):
        return True
    if name.startswith(DRAFT):
        return not config.draft_layers or name in _SHARED
    index = name.removeprefix("model.layers.").split(".", 1)[0]
    return name.startswith("model.layers.") and index.isdigit() and int(index) > config.num_layers


def _attention(config: ModelConfig) -> dict[str, Shape]:
    shapes = _grouped(config) if config.latent is None else _latent(config, config.latent)
    return {f"self_attn.{name}": shape for name, shape in shapes.items()}


def _grouped(config: ModelConfig) -> dict[str, Shape]:
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, Shape] = {
        "q_proj.weight": (queries, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden),
        "o_proj.weight": (hidden, queries),
    }
    if config.qkv_bias:
        shapes.update({"q_proj.bias": (queries,), "k_proj.bias": (keys,), "v_proj.bias": (keys,)})
    if config.out_bias:
        shapes["o_proj.bias"] = (hidden,)
    if config.qk_norm != "none":
        rows = config.qk_norm == "rows"
        shapes["q_norm.weight"] = (queries if rows else dim,)
        shapes["k_norm.weight"] = (keys if rows else dim,)
    return shapes


def _latent(config: ModelConfig, latent: Latent) -> dict[str, Shape]:
    hidden, heads = config.hidden_size, config.num_heads
    queries = heads * (latent.plain_dim + latent.rotary_dim)
    shapes: dict[str, Shape] = {
        "kv_a_proj_with_mqa.weight": (latent.rank + latent.rotary_dim, hidden),
        "kv_a_layernorm.weight": (latent.rank,),
        "kv_b_proj.weight": (heads * (latent.plain_dim + latent.value_dim), latent.rank),
        "o_proj.weight": (hidden, heads * latent.value_dim),
    }
    if latent.query_rank is None:
        return {**shapes, "q_proj.weight": (queries, hidden)}
    return {
        **shapes,
        "q_a_proj.weight": (latent.query_rank, hidden),
        "q_a_layernorm.weight": (latent.query_rank,),
        "q_b_proj.weight": (queries, latent.query_rank),
    }


def _mlp(config: ModelConfig, layer: int, prefix: str, present: Container[str]) -> dict[str, Shape]:
    hidden, experts, wide = config.hidden_size, config.num_experts, config.moe_intermediate_size
    if layer not in config.sparse_layers:
        return _gated("mlp.", hidden, config.intermediate_size)
    shapes: dict[str, Shape] = {"mlp.gate.weight": (experts, hidden)}
    if config.routing.corrected:
        shapes["mlp.gate.e_score_correction_bias"] = (experts,)
    if config.routing.per_group and prefix + "mlp.router_scale" in present:
        shapes["mlp.router_scale"] = (1, experts)
    if config.shared_intermediate_size:
        shapes.update(_gated("mlp.shared_experts.", hidden, config.shared_intermediate_size))
    if prefix + "mlp.experts.gate_up_proj" in present:
        shapes["mlp.experts.gate_up_proj"] = (experts, 2 * wide, hidden)
        shapes["mlp.experts.down_proj"] = (experts, hidden, wide)
        return shapes
    for e in range(experts):
        shapes.update(_gated(f"mlp.experts.{e}.", hidden, wide))
    return shapes


def _gated(prefix: str, hidden: int, wide: int) -> dict[str, Shape]:
    return {
        prefix + "gate_proj.weight": (wide, hidden),
        prefix + "up_proj.weight": (wide, hidden),
        prefix + "down_proj.weight": (hidden, wide),
    }
