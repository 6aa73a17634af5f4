"""Qwen3-MoE as a function of a ragged batch and a paged KV cache, on the ops of `omni_kernels`.

Knows weights and tensors; requests, plans and block bookkeeping are the runner's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import omni_kernels as ops
from omni_proxy.workers.engine.checkpoint import Checkpoint, ModelConfig


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of several sequences, one after the other: those with a single row first."""

    tokens: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, place of each row in its sequence."""
    slots: Tensor
    """[T] int64, where each row's key and value go: block * block_size + offset."""
    attention: ops.AttentionBatch
    logit_rows: Tensor
    """[n] int64, rows whose next-token logits are wanted."""


@dataclass(frozen=True, slots=True)
class _Mlp:
    """Dense or sparse; `gate` is the router of a sparse one."""

    w13: Tensor
    w2: Tensor
    gate: Tensor | None


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Tensor
    """[(heads + 2 kv_heads) * D, H]."""
    qk_norm: Tensor
    """[heads + kv_heads, D]: one norm for all query and key heads together."""
    out: Tensor
    mlp_norm: Tensor
    mlp: _Mlp


class Experts(Protocol):
    """Computes the experts of all MoE layers in place of the model, which then holds none."""

    def __call__(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor: ...


class Qwen3Moe:
    """The decoder of one checkpoint: one call of `omni_kernels` a step where it offers that, else op by op.

    `fused` False takes the single ops in any case: they define what the one call computes. So do `experts` elsewhere.
    """

    def __init__(
        self, checkpoint: Checkpoint, max_model_len: int, *, fused: bool = True, experts: Experts | None = None
    ) -> None:
        self.config = config = checkpoint.config
        self._experts = experts
        tensors = checkpoint.tensors
        self._embedding = tensors["model.embed_tokens.weight"]
        self._norm = tensors["model.norm.weight"]
        self._head = self._embedding if config.tie_word_embeddings else tensors["lm_head.weight"]
        self._layers = [_layer(config, tensors, i, experts is None) for i in range(config.num_layers)]
        self.dtype = self._embedding.dtype
        self._cos, self._sin = ops.rope_table(config.head_dim, max_model_len, config.rope_theta, self.dtype)
        self.expert_tokens = torch.zeros(config.num_layers, config.num_experts, dtype=torch.int64)
        """Rows routed to [layer, expert] since the start."""
        self._decoder = self._build_decoder() if fused and experts is None else None
        if self._decoder is not None:
            self._layers = []  # the decoder has its own form of them

    def forward(self, batch: Batch, kv: Tensor) -> Tensor:
        """Compute the rows, write their keys and values into `kv` and return logits [n, vocab].

        `kv` is [layers, 2, blocks, block_size, kv_heads, D].
        """
        if self._decoder is not None:
            return self._decoder.step(
                batch.tokens, batch.positions, batch.slots, batch.attention, batch.logit_rows, kv, self.expert_tokens
            )
        x = F.embedding(batch.tokens, self._embedding)
        cos = self._cos.index_select(0, batch.positions)
        sin = self._sin.index_select(0, batch.positions)
        residual: Tensor | None = None
        eps = self.config.rms_norm_eps
        for i, layer in enumerate(self._layers):
            normed, residual = ops.rms_norm(x, layer.attention_norm, eps, residual)
            x = self._attend(layer, normed, cos, sin, kv[i], batch)
            normed, residual = ops.rms_norm(x, layer.mlp_norm, eps, residual)
            x = self._mlp(i, layer.mlp, normed)
        last = x.index_select(0, batch.logit_rows)
        if residual is not None:
            residual = residual.index_select(0, batch.logit_rows)
        normed, _ = ops.rms_norm(last, self._norm, eps, residual)
        return F.linear(normed, self._head)

    def _build_decoder(self) -> ops.Decoder | None:
        config = self.config
        layers = [
            ops.DecoderLayer(
                attention_norm=layer.attention_norm,
                qkv=layer.qkv,
                qk_norm=layer.qk_norm,
                out=layer.out,
                mlp_norm=layer.mlp_norm,
                w13=layer.mlp.w13,
                w2=layer.mlp.w2,
                gate=layer.mlp.gate,
                top_k=config.top_k,
                renormalise=config.norm_topk_prob,
            )
            for layer in self._layers
        ]
        return ops.build_decoder(
            ops.DecoderWeights(
                embedding=self._embedding,
                layers=layers,
                norm=self._norm,
                head=self._head,
                cos=self._cos,
                sin=self._sin,
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                eps=config.rms_norm_eps,
            )
        )

    def _attend(self, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, batch: Batch) -> Tensor:
        config = self.config
        heads, keys = config.num_heads, config.num_kv_heads
        qkv = F.linear(x, layer.qkv).view(x.shape[0], heads + 2 * keys, config.head_dim)
        qk, _ = ops.rms_norm(qkv[:, : heads + keys], layer.qk_norm, config.rms_norm_eps)
        qk = ops.rope(qk, cos, sin)
        ops.kv_write(kv, batch.slots, qk[:, heads:], qkv[:, heads + keys :])
        scale = config.head_dim**-0.5
        seen = ops.paged_attention(qk[:, :heads], kv, batch.attention, scale)
        return F.linear(seen.flatten(1), layer.out)

    def _mlp(self, index: int, mlp: _Mlp, x: Tensor) -> Tensor:
        if mlp.gate is None:
            return F.linear(ops.silu_and_mul(F.linear(x, mlp.w13)), mlp.w2)
        config = self.config
        ids, weights, counts = ops.moe_route(F.linear(x, mlp.gate), config.top_k, config.norm_topk_prob)
        self.expert_tokens[index].add_(counts)
        if self._experts is not None:
            return self._experts(index, x, ids, weights)
        return ops.fused_moe(x, mlp.w13, mlp.w2, ids, weights, counts)


def _layer(config: ModelConfig, tensors: Mapping[str, Tensor], index: int, with_experts: bool) -> _Layer:
    prefix = f"model.layers.{index}."
    attention = prefix + "self_attn."
    qkv = torch.cat([tensors[f"{attention}{name}_proj.weight"] for name in "qkv"])
    q_norm, k_norm = (tensors[f"{attention}{name}_norm.weight"] for name in "qk")
    return _Layer(
        attention_norm=tensors[prefix + "input_layernorm.weight"],
        qkv=qkv,
        qk_norm=torch.cat((q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1))),
        out=tensors[attention + "o_proj.weight"],
        mlp_norm=tensors[prefix + "post_attention_layernorm.weight"],
        mlp=_mlp(config, tensors, index, prefix + "mlp.", with_experts),
    )


def _mlp(config: ModelConfig, tensors: Mapping[str, Tensor], index: int, prefix: str, with_experts: bool) -> _Mlp:
    if index not in config.sparse_layers:
        return _Mlp(*_gated(tensors, prefix), gate=None)
    gate = tensors[prefix + "gate.weight"]
    if not with_experts:
        return _Mlp(gate.new_empty(0), gate.new_empty(0), gate)
    fused = tensors.get(prefix + "experts.gate_up_proj")
    if fused is not None:
        return _Mlp(fused, tensors[prefix + "experts.down_proj"], gate)
    pairs = [_gated(tensors, f"{prefix}experts.{e}.") for e in range(config.num_experts)]
    return _Mlp(torch.stack([w13 for w13, _ in pairs]), torch.stack([w2 for _, w2 in pairs]), gate)


def _gated(tensors: Mapping[str, Tensor], prefix: str) -> tuple[Tensor, Tensor]:
    """Gate and up projections as one matrix, gate rows first; and the down projection."""
    halves = [tensors[f"{prefix}{name}_proj.weight"] for name in ("gate", "up")]
    return torch.cat(halves), tensors[prefix + "down_proj.weight"]
