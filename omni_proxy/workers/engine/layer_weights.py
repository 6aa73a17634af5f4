"""The weights of one decoder layer, from a checkpoint's tensors: what is multiplied together becomes one matrix.

Knows names and layouts; what is computed with them is `attention.py` and `mlp.py`, or a decoder of `omni_kernels`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from omni_proxy.workers.engine.model_config import Latent, ModelConfig


@dataclass(frozen=True, slots=True)
class GroupedWeights:
    """Grouped-query attention."""

    qkv: Tensor
    """[(heads + 2 kv_heads) * D, H]."""
    qkv_bias: Tensor | None
    norm: Tensor | None
    """[heads + kv_heads, D]: of all query and key heads together."""
    out: Tensor
    out_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Multi-head latent attention, rotated parts half-split."""

    query_down: Tensor | None
    query_norm: Tensor | None
    query: Tensor
    """[heads * (plain + rotary), H or query_rank]."""
    down: Tensor
    """[rank + rotary, H]."""
    norm: Tensor
    """[rank]."""
    key_up: Tensor
    """[heads, plain, rank]."""
    value_up: Tensor
    """[heads, rank, value]."""
    out: Tensor


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """Dense or sparse; `gate` is the router of a sparse one."""

    w13: Tensor
    """[2I, H] or [E, 2I, H], gate rows first."""
    w2: Tensor
    """[H, I] or [E, H, I]."""
    gate: Tensor | None = None
    correction: Tensor | None = None
    shared13: Tensor | None = None
    shared2: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer."""

    attention_norm: Tensor
    attention: GroupedWeights | LatentWeights
    mlp_norm: Tensor
    mlp: MlpWeights


def layer_weights(config: ModelConfig, tensors: Mapping[str, Tensor], index: int, with_experts: bool) -> LayerWeights:
    """Layer `index`; its experts are left empty unless `with_experts`."""
    prefix = f"model.layers.{index}."
    parts = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    latent = config.latent
    return LayerWeights(
        attention_norm=parts["input_layernorm.weight"],
        attention=_grouped(config, parts) if latent is None else _latent(config, latent, parts),
        mlp_norm=parts["post_attention_layernorm.weight"],
        mlp=_mlp(config, parts, index, with_experts),
    )


def _grouped(config: ModelConfig, parts: Mapping[str, Tensor]) -> GroupedWeights:
    biases = [parts.get(f"self_attn.{name}_proj.bias") for name in "qkv"]
    return GroupedWeights(
        qkv=torch.cat([parts[f"self_attn.{name}_proj.weight"] for name in "qkv"]),
        qkv_bias=torch.cat([bias for bias in biases if bias is not None]) if config.qkv_bias else None,
        norm=_head_norms(config, parts),
        out=parts["self_attn.o_proj.weight"],
        out_bias=parts.get("self_attn.o_proj.bias"),
    )


def _head_norms(config: ModelConfig, parts: Mapping[str, Tensor]) -> Tensor | None:
    if config.qk_norm == "none":
        return None
    queries, keys = (parts[f"self_attn.{name}_norm.weight"].view(-1, config.head_dim) for name in "qk")
    return torch.cat((queries.expand(config.num_heads, -1), keys.expand(config.num_kv_heads, -1)))


def _latent(config: ModelConfig, latent: Latent, parts: Mapping[str, Tensor]) -> LatentWeights:
    heads, rank = config.num_heads, latent.rank
    compressed = latent.query_rank is not None
    query = parts["self_attn.q_b_proj.weight" if compressed else "self_attn.q_proj.weight"]
    down = parts["self_attn.kv_a_proj_with_mqa.weight"]
    up = parts["self_attn.kv_b_proj.weight"].view(heads, latent.plain_dim + latent.value_dim, rank)
    return LatentWeights(
        query_down=parts.get("self_attn.q_a_proj.weight"),
        query_norm=parts.get("self_attn.q_a_layernorm.weight"),
        query=_half_split(query, heads, latent),
        down=_half_split(down, 1, latent),
        norm=parts["self_attn.kv_a_layernorm.weight"],
        key_up=up[:, : latent.plain_dim].contiguous(),
        value_up=up[:, latent.plain_dim :].transpose(1, 2).contiguous(),
        out=parts["self_attn.o_proj.weight"],
    )


def _half_split(w: Tensor, heads: int, latent: Latent) -> Tensor:
    """Rows of each head whose last `rotary_dim` are rotated: pairs that lie side by side go half the width apart."""
    if not latent.interleaved:
        return w
    rows = w.view(heads, -1, w.shape[1])
    plain, rotated = rows[:, : -latent.rotary_dim], rows[:, -latent.rotary_dim :]
    return torch.cat((plain, rotated[:, 0::2], rotated[:, 1::2]), 1).reshape(w.shape)


def _mlp(config: ModelConfig, parts: Mapping[str, Tensor], index: int, with_experts: bool) -> MlpWeights:
    if index not in config.sparse_layers:
        return MlpWeights(*_gated(parts, "mlp."))
    gate = parts["mlp.gate.weight"]
    w13, w2 = _experts(config, parts) if with_experts else (gate.new_empty(0), gate.new_empty(0))
    shared = _gated(parts, "mlp.shared_experts.") if config.shared_intermediate_size else (None, None)
    return MlpWeights(w13, w2, gate, parts.get("mlp.gate.e_score_correction_bias"), *shared)


def _experts(config: ModelConfig, parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    w13 = parts.get("mlp.experts.gate_up_proj")
    if w13 is not None:
        w2 = parts["mlp.experts.down_proj"]
    else:
        pairs = [_gated(parts, f"mlp.experts.{e}.") for e in range(config.num_experts)]
        w13, w2 = torch.stack([w13 for w13, _ in pairs]), torch.stack([w2 for _, w2 in pairs])
    scale = parts.get("mlp.router_scale")
    # A factor of an expert's weight is one of its output (Pangu Pro).
    return w13, w2 if scale is None else w2 * scale.view(-1, 1, 1)


def _gated(parts: Mapping[str, Tensor], prefix: str) -> tuple[Tensor, Tensor]:
    """Gate and up projections as one matrix, gate rows first; and the down projection."""
    halves = [parts[f"{prefix}{name}_proj.weight"] for name in ("gate", "up")]
    return torch.cat(halves), parts[prefix + "down_proj.weight"]
