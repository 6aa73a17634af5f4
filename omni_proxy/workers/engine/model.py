"""A decoder as a function of a ragged batch and a paged KV cache, on the ops of `omni_kernels`.

Knows weights and tensors; requests, plans and block bookkeeping are the runner's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import omni_kernels as ops
from omni_proxy.workers.engine.attention import GroupedAttention, LatentAttention, Places, Rows, attention
from omni_proxy.workers.engine.checkpoint import Checkpoint, ModelConfig
from omni_proxy.workers.engine.layer_weights import GroupedWeights, LayerWeights, layer_weights
from omni_proxy.workers.engine.mlp import DenseMlp, Experts, SparseMlp

__all__ = ["Batch", "DecoderModel", "Experts"]


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
class _Layer:
    attention_norm: Tensor
    attention: GroupedAttention | LatentAttention
    mlp_norm: Tensor
    mlp: Callable[[Tensor], Tensor]


class DecoderModel:
    """The decoder of one checkpoint: one call of `omni_kernels` a step where it offers that, else op by op.

    `fused` False takes the single ops in any case: they define what the one call computes. So do `experts` elsewhere
    and latent attention. `weight_dtype` int8 quantises the matrices at load; None keeps what they hold. `row_bits` 8
    quantises rows as well, which only the one call does: ValueError where there is none.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        max_model_len: int,
        *,
        fused: bool = True,
        experts: Experts | None = None,
        weight_dtype: torch.dtype | None = None,
        row_bits: int = 0,
    ) -> None:
        self.config = config = checkpoint.config
        tensors = checkpoint.tensors
        self.embedding = tensors["model.embed_tokens.weight"]
        self._norm = tensors["model.norm.weight"]
        head = self.embedding if config.tie_word_embeddings else tensors["lm_head.weight"]
        self.dtype = self.embedding.dtype
        self._cos, self._sin = ops.rope_table(
            config.rotary_dim, max_model_len, config.rope_theta, self.dtype, config.rope_scaling
        )
        self.expert_tokens = torch.zeros(config.num_layers, config.num_experts, dtype=torch.int64)
        """Rows routed to [layer, expert] since the start."""
        self._decoder: ops.Decoder | None = None
        self._layers: list[_Layer] = []
        weights = [layer_weights(config, tensors, i, experts is None) for i in range(config.num_layers)]
        if fused and experts is None:
            self._decoder = self._build_decoder(weights, head, weight_dtype, row_bits)
        if self._decoder is None and row_bits:
            raise ValueError("quantization w8a8: this model runs op by op here, which has no such products")
        if self._decoder is None:
            self._layers = [self._layer(i, w, experts, weight_dtype) for i, w in enumerate(weights)]
            self._head = ops.pack(head, weight_dtype)

    @property
    def output(self) -> ops.PackedMatrix | None:
        """The packed output matrix; None where the one call has it."""
        return self._head if self._decoder is None else None

    def kv_shape(self, blocks: int, block_size: int) -> tuple[int, ...]:
        """[layers, planes, blocks, block_size, kv_heads, D] of the cache: planes are key and value, or one for both.

        `forward` takes the model's layers of it; that of a draft head lies behind them.
        """
        return kv_shape(self.config, blocks, block_size)

    def forward(
        self,
        batch: Batch,
        kv: Tensor,
        progress: ops.StepProgress | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Compute the rows, write their keys and values into `kv` (see `kv_shape`) and return logits [n, vocab].

        `progress` hears of each layer that is in it; `hidden` [T, H] float32 gets every row after the final norm.
        """
        if self._decoder is not None:
            counts = self.expert_tokens if self.config.num_experts else None
            return self._decoder.step(
                batch.tokens,
                batch.positions,
                batch.slots,
                batch.attention,
                batch.logit_rows,
                kv,
                counts,
                progress,
                hidden,
            )
        return self._op_by_op(batch, kv, progress, hidden)

    @property
    def bursts(self) -> bool:
        """It has `burst`."""
        return self._decoder is not None

    def burst(
        self,
        batch: Batch,
        kv: Tensor,
        steps: int,
        chances: ops.Chances | None,
        most: Sequence[int] | None = None,
        drafts: ops.Drafts | None = None,
        ends: Sequence[Collection[int]] | None = None,
    ) -> ops.Burst:
        """Up to `steps` steps of single rows. See `Decoder.burst` of `omni_kernels`."""
        assert self._decoder is not None
        counts = self.expert_tokens if self.config.num_experts else None
        rows = batch.tokens, batch.positions, batch.slots, batch.attention
        return self._decoder.burst(*rows, kv, steps, chances, counts, most, drafts, ends)

    def _op_by_op(self, batch: Batch, kv: Tensor, progress: ops.StepProgress | None, hidden: Tensor | None) -> Tensor:
        x = F.embedding(batch.tokens, self.embedding)
        cos = self._cos.index_select(0, batch.positions)
        sin = self._sin.index_select(0, batch.positions)
        rows = Rows(Places(cos, sin, batch.slots), batch.attention)
        residual: Tensor | None = None
        eps = self.config.rms_norm_eps
        for i, layer in enumerate(self._layers):
            normed, residual = ops.rms_norm(x, layer.attention_norm, eps, residual)
            x = layer.attention(normed, kv[i], rows)
            if progress is not None:
                progress.layer_done(i + 1)
            normed, residual = ops.rms_norm(x, layer.mlp_norm, eps, residual)
            x = layer.mlp(normed)
        if hidden is not None:
            hidden.copy_(ops.rms_norm(x, self._norm, eps, residual)[0])
        last = x.index_select(0, batch.logit_rows)
        if residual is not None:
            residual = residual.index_select(0, batch.logit_rows)
        normed, _ = ops.rms_norm(last, self._norm, eps, residual)
        return ops.linear(normed, self._head)

    def _layer(self, index: int, weights: LayerWeights, experts: Experts | None, dtype: torch.dtype | None) -> _Layer:
        config, mlp = self.config, weights.mlp
        return _Layer(
            weights.attention_norm,
            attention(config, weights.attention, dtype),
            weights.mlp_norm,
            DenseMlp(mlp.w13, mlp.w2, dtype)
            if mlp.gate is None
            else SparseMlp(config, index, mlp, self.expert_tokens[index], experts, dtype),
        )

    def _build_decoder(
        self, layers: list[LayerWeights], head: Tensor, dtype: torch.dtype | None, row_bits: int
    ) -> ops.Decoder | None:
        config = self.config
        if config.latent is not None:
            return None
        return ops.build_decoder(
            ops.DecoderWeights(
                embedding=self.embedding,
                layers=[_decoder_layer(config, layer) for layer in layers],
                norm=self._norm,
                head=head,
                cos=self._cos,
                sin=self._sin,
                heads=config.num_heads,
                kv_heads=config.num_kv_heads,
                eps=config.rms_norm_eps,
                norm_rows=config.qk_norm == "rows",
                clip=config.clip_qkv,
            ),
            dtype,
            row_bits,
        )


def kv_shape(config: ModelConfig, blocks: int, block_size: int) -> tuple[int, ...]:
    """See `DecoderModel.kv_shape`."""
    return (config.cached_layers, config.kv_planes, blocks, block_size, config.num_kv_heads, config.head_dim)


def _decoder_layer(config: ModelConfig, weights: LayerWeights) -> ops.DecoderLayer:
    at, mlp, how = weights.attention, weights.mlp, config.routing
    assert isinstance(at, GroupedWeights)
    return ops.DecoderLayer(
        attention_norm=weights.attention_norm,
        qkv=at.qkv,
        qk_norm=at.norm,
        out=at.out,
        mlp_norm=weights.mlp_norm,
        w13=mlp.w13,
        w2=mlp.w2,
        gate=mlp.gate,
        top_k=config.top_k,
        renormalise=how.renormalise,
        routing=ops.Routing(
            how.scoring, mlp.correction, how.groups, how.top_groups, how.per_group, how.scale, how.group_best
        ),
        shared13=mlp.shared13,
        shared2=mlp.shared2,
        qkv_bias=at.qkv_bias,
        out_bias=at.out_bias,
    )
