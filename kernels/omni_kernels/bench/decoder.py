"""The step of a decoder of the demo model's shape: in one call, op by op compiled, op by op in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import omni_kernels as ops
from omni_kernels import registry
from omni_kernels.bench.cases import DEMO, Case, Run

LAYERS, HEADS, KV_HEADS, DIM, VOCAB, SIZE = 4, 8, 4, 32, 2048, 16


def random_weights() -> ops.DecoderWeights:
    """float32 tensors whose values are bfloat16's, as a served checkpoint's are."""

    def w(*shape: int) -> Tensor:
        scaled: Tensor = torch.randn(shape) / float(shape[-1]) ** 0.5
        return scaled.to(torch.bfloat16).float()

    hidden, wide, experts = DEMO.hidden, DEMO.wide, DEMO.experts
    layers = [
        ops.DecoderLayer(
            torch.ones(hidden),
            w((HEADS + 2 * KV_HEADS) * DIM, hidden),
            torch.ones(HEADS + KV_HEADS, DIM),
            w(hidden, HEADS * DIM),
            torch.ones(hidden),
            w(experts, 2 * wide, hidden),
            w(experts, hidden, wide),
            w(experts, hidden),
            DEMO.top_k,
        )
        for _ in range(LAYERS)
    ]
    embedding = w(VOCAB, hidden)
    return ops.DecoderWeights(
        embedding, layers, torch.ones(hidden), embedding, *ops.rope_table(DIM, 4096, 1e4), HEADS, KV_HEADS, 1e-6
    )


def step_case(weights: ops.DecoderWeights, sequences: int, kv_len: int, rows_each: int = 1) -> Case:
    """`sequences` of `kv_len` keys, the last `rows_each` of which are this step's rows."""
    blocks = -(-kv_len // SIZE)
    tables = torch.randperm(sequences * blocks).view(sequences, blocks).tolist()
    kv = torch.randn(LAYERS, 2, sequences * blocks, SIZE, KV_HEADS, DIM)
    tokens = torch.randint(0, VOCAB, (sequences * rows_each,))
    positions = torch.arange(kv_len - rows_each, kv_len).repeat(sequences)
    slots = torch.tensor([t[p // SIZE] * SIZE + p % SIZE for t in tables for p in range(kv_len - rows_each, kv_len)])
    last = torch.arange(rows_each - 1, sequences * rows_each, rows_each)

    def batch() -> ops.AttentionBatch:
        return ops.attention_batch([rows_each] * sequences, [kv_len] * sequences, tables, SIZE)

    runs: dict[str, Run] = {}
    for label, model, dtype, row_bits in (
        ("", weights, None, 0),
        (" bf16", _halved(weights), None, 0),
        (" int8", _halved(weights), torch.int8, 0),
        (" w8a8", _halved(weights), torch.int8, 8),
    ):
        decoder = ops.build_decoder(model, dtype, row_bits)
        if decoder is not None:
            cache = kv.to(model.embedding.dtype)
            runs[f"cpu one call{label}"] = partial(_step, decoder, tokens, positions, slots, batch, last, cache)
    if runs:
        runs["cpu op by op"] = lambda: _by_ops(
            weights, registry.ops_of("cpu"), tokens, positions, slots, batch(), last, kv
        )
    runs["torch op by op"] = lambda: _by_ops(weights, registry.TORCH, tokens, positions, slots, batch(), last, kv)
    rows = sequences * rows_each
    flop = 2.0 * rows * _active(weights) + 2.0 * sequences * VOCAB * DEMO.hidden
    name = f"demo model, {sequences} x {rows_each} rows, {kv_len} keys"
    return Case("decoder step", name, runs, dict.fromkeys(runs, 2.0 * _active(weights)), flop)


def _step(
    decoder: ops.Decoder,
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    batch: Callable[[], ops.AttentionBatch],
    last: Tensor,
    kv: Tensor,
) -> Tensor:
    return decoder.step(tokens, positions, slots, batch(), last, kv)


def _halved(weights: ops.DecoderWeights) -> ops.DecoderWeights:
    """A model of bfloat16: its embedding and head, and so its activations' dtype; the other values are exact in it."""
    return replace(weights, embedding=weights.embedding.bfloat16(), head=weights.head.bfloat16())


def _active(weights: ops.DecoderWeights) -> int:
    """Parameters that one row passes, without embedding and head."""
    layer = weights.layers[0]
    return len(weights.layers) * (layer.qkv.numel() + layer.out.numel() + DEMO.top_k * 3 * DEMO.hidden * DEMO.wide)


def _by_ops(
    w: ops.DecoderWeights,
    table: Mapping[str, registry.Op],
    tokens: Tensor,
    positions: Tensor,
    slots: Tensor,
    batch: ops.AttentionBatch,
    last: Tensor,
    kv: Tensor,
) -> Tensor:
    run = {**registry.TORCH, **table}
    x, residual = F.embedding(tokens, w.embedding), None
    cos, sin = w.cos[positions], w.sin[positions]
    for i, layer in enumerate(w.layers):
        assert layer.qk_norm is not None
        assert layer.gate is not None
        normed, residual = run["rms_norm"](x, layer.attention_norm, w.eps, residual)
        qkv = F.linear(normed, layer.qkv).view(x.shape[0], -1, DIM)
        qk, _ = run["rms_norm"](qkv[:, : HEADS + KV_HEADS], layer.qk_norm, w.eps)
        qk = run["rope"](qk, cos, sin)
        run["kv_write"](kv[i], slots, qk[:, HEADS:], qkv[:, HEADS + KV_HEADS :])
        x = F.linear(run["paged_attention"](qk[:, :HEADS], kv[i], batch, DIM**-0.5).flatten(1), layer.out)
        normed, residual = run["rms_norm"](x, layer.mlp_norm, w.eps, residual)
        ids, weights, counts = run["moe_route"](F.linear(normed, layer.gate), layer.top_k, True)
        x = run["fused_moe"](normed, layer.w13, layer.w2, ids, weights, counts)
    assert residual is not None
    normed, _ = run["rms_norm"](x[last], w.norm, w.eps, residual[last])
    return F.linear(normed, w.head)
