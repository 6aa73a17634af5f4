"""Attention over one layer of the paged cache, op by op: grouped-query, and latent with its projections absorbed.

Both write the new rows' keys first, then attend. Shapes: `x` [T, H]; `cos`, `sin` [T, rotary]; result [T, H].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import omni_kernels as ops
from omni_proxy.workers.engine.layer_weights import GroupedWeights, LatentWeights
from omni_proxy.workers.engine.model_config import Latent, ModelConfig


@dataclass(frozen=True, slots=True)
class Places:
    """Where rows are: the rotations of their positions, and their slots in the cache."""

    cos: Tensor
    sin: Tensor
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """What the rows of a step need to attend."""

    places: Places
    batch: ops.AttentionBatch


class GroupedAttention:
    """Several query heads share one key and value head."""

    def __init__(self, config: ModelConfig, weights: GroupedWeights, dtype: torch.dtype | None) -> None:
        self._config = config
        self._weights = weights
        self._qkv = ops.pack(weights.qkv, dtype)
        self._out = ops.pack(weights.out, dtype)

    def __call__(self, x: Tensor, kv: Tensor, rows: Rows) -> Tensor:
        """`kv` is [2, blocks, block_size, kv_heads, D]."""
        config, weights = self._config, self._weights
        queries = self._written(x, kv, rows.places)
        seen = ops.paged_attention(queries, kv, rows.batch, config.attention_scale)
        out = ops.linear(seen.flatten(1), self._out)
        return out if weights.out_bias is None else out + weights.out_bias

    def write(self, x: Tensor, kv: Tensor, places: Places) -> None:
        """Only put the rows' keys and values into the cache."""
        self._written(x, kv, places)

    def _written(self, x: Tensor, kv: Tensor, places: Places) -> Tensor:
        """Put the rows' keys and values into the cache; their queries [T, heads, D]."""
        config, weights = self._config, self._weights
        heads, keys = config.num_heads, config.num_kv_heads
        qkv = ops.linear(x, self._qkv).view(x.shape[0], heads + 2 * keys, config.head_dim)
        if weights.qkv_bias is not None:
            qkv = qkv + weights.qkv_bias.view(1, -1, config.head_dim)
        qk, values = self._norm(qkv[:, : heads + keys]), qkv[:, heads + keys :]
        if config.clip_qkv is not None:
            qk, values = (part.clamp(-config.clip_qkv, config.clip_qkv) for part in (qk, values))
        qk = ops.rope(qk, places.cos, places.sin)
        ops.kv_write(kv, places.slots, qk[:, heads:], values)
        return qk[:, :heads]

    def _norm(self, qk: Tensor) -> Tensor:
        config, norm = self._config, self._weights.norm
        if norm is None:
            return qk
        if config.qk_norm == "heads":
            return ops.rms_norm(qk, norm, config.rms_norm_eps)[0]
        heads = config.num_heads
        pairs = ((qk[:, :heads], norm[:heads]), (qk[:, heads:], norm[heads:]))
        rows = [ops.rms_norm(part.flatten(1), one.flatten(), config.rms_norm_eps)[0] for part, one in pairs]
        return torch.cat(rows, 1).view_as(qk)


class LatentAttention:
    """DeepSeek's MLA: all heads read one compressed row, so that queries are projected into its space, not keys out."""

    def __init__(self, config: ModelConfig, latent: Latent, weights: LatentWeights, dtype: torch.dtype | None) -> None:
        self._config = config
        self._latent = latent
        self._weights = weights
        self._query_down = None if weights.query_down is None else ops.pack(weights.query_down, dtype)
        self._query = ops.pack(weights.query, dtype)
        self._down = ops.pack(weights.down, dtype)
        self._out = ops.pack(weights.out, dtype)

    def __call__(self, x: Tensor, kv: Tensor, rows: Rows) -> Tensor:
        """`kv` is [1, blocks, block_size, 1, rank + rotary]."""
        self.write(x, kv, rows.places)
        query = self._absorbed(x, rows)
        seen = ops.mla_attention(query, kv[0, :, :, 0], rows.batch, self._config.attention_scale, self._latent.rank)
        values = torch.bmm(seen.transpose(0, 1), self._weights.value_up)
        return ops.linear(values.transpose(0, 1).flatten(1), self._out)

    def write(self, x: Tensor, kv: Tensor, places: Places) -> None:
        """Only put the rows into the cache, one for all heads: the normed latent and the rotated key."""
        rank, eps = self._latent.rank, self._config.rms_norm_eps
        down = ops.linear(x, self._down)
        latent, _ = ops.rms_norm(down[:, :rank].contiguous(), self._weights.norm, eps)
        key = ops.rope(down[:, None, rank:], places.cos, places.sin)[:, 0]
        ops.mla_write(kv[0, :, :, 0], places.slots, torch.cat((latent, key), 1))

    def _absorbed(self, x: Tensor, rows: Rows) -> Tensor:
        """Queries [T, heads, rank + rotary] in the space of the cached rows."""
        latent, weights = self._latent, self._weights
        if self._query_down is not None and weights.query_norm is not None:
            x, _ = ops.rms_norm(ops.linear(x, self._query_down), weights.query_norm, self._config.rms_norm_eps)
        query = ops.linear(x, self._query).view(x.shape[0], self._config.num_heads, -1)
        plain, rotated = query[..., : latent.plain_dim], query[..., latent.plain_dim :]
        absorbed = torch.bmm(plain.transpose(0, 1), weights.key_up).transpose(0, 1)
        return torch.cat((absorbed, ops.rope(rotated.contiguous(), rows.places.cos, rows.places.sin)), -1)


def attention(
    config: ModelConfig, weights: GroupedWeights | LatentWeights, dtype: torch.dtype | None
) -> GroupedAttention | LatentAttention:
    """The attention of a layer; its matrices are packed as `dtype` (None keeps what they hold)."""
    if isinstance(weights, GroupedWeights):
        return GroupedAttention(config, weights, dtype)
    assert config.latent is not None
    return LatentAttention(config, config.latent, weights, dtype)
