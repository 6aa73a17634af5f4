"""A whole decoder's step in one call: embedding, every layer (norm, qkv, rotation, paged attention, router, experts),
final norm and logits. For models so small that dispatching single ops costs more than their arithmetic.

The definition is the same sequence of single ops; activations are float32 whatever the weights' and the cache's dtype.
Only in a model of bfloat16 (its embedding, and all its matrices) are the rows that enter a product rounded to that,
where the CPU multiplies pairs of them, and so are queries that meet keys of bfloat16; the router's rows are not. With
weights of int8 rows may become whole numbers, see `build_decoder`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from omni_kernels import registry
from omni_kernels.drafts import Burst, Drafts
from omni_kernels.progress import StepProgress
from omni_kernels.ragged import AttentionBatch


@dataclass(frozen=True, slots=True)
class Routing:
    """How a layer's experts are chosen beyond the number and the sum of their weights; see `moe_route`."""

    scoring: str = "softmax"
    bias: Tensor | None = None
    groups: int = 1
    top_groups: int | None = None
    per_group: bool = False
    scale: float = 1.0
    group_best: int = 2


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer, as a checkpoint holds them. Without `gate` the MLP is dense: w13 [2I, H], w2 [H, I]."""

    attention_norm: Tensor
    qkv: Tensor
    """[(heads + 2 kv_heads) * D, H]."""
    qk_norm: Tensor | None
    """[heads + kv_heads, D]."""
    out: Tensor
    mlp_norm: Tensor
    w13: Tensor
    """[E, 2I, H], gate rows first."""
    w2: Tensor
    """[E, H, I]."""
    gate: Tensor | None
    """[E, H], the router."""
    top_k: int = 1
    renormalise: bool = True
    routing: Routing = Routing()
    shared13: Tensor | None = None
    """[2J, H], an expert that takes every row."""
    shared2: Tensor | None = None
    """[H, J]."""
    qkv_bias: Tensor | None = None
    """[(heads + 2 kv_heads) * D]."""
    out_bias: Tensor | None = None
    """[H]."""


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights of a decoder; `cos` and `sin` as `rope_table` makes them."""

    embedding: Tensor
    layers: Sequence[DecoderLayer]
    norm: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor
    heads: int
    kv_heads: int
    eps: float
    norm_rows: bool = False
    """`qk_norm` takes all heads of the queries, and those of the keys, as one row (OLMoE); else head by head."""
    clip: float | None = None
    """Queries, keys and values are cut to -clip..clip, after the norm of rows and before that of heads."""


@dataclass(frozen=True, slots=True)
class Chances:
    """How each sequence's tokens are drawn in a burst; see `sample`."""

    temperature: Tensor
    """[T] float64."""
    top_k: Tensor
    """[T] int64."""
    top_p: Tensor
    """[T] float64."""
    uniform: Tensor
    """[n, T] float64, of the first, second ... token that each draws."""


class Decoder(Protocol):
    """A decoder whose step is one call."""

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        batch: AttentionBatch,
        logit_rows: Tensor,
        kv: Tensor,
        expert_tokens: Tensor | None = None,
        progress: StepProgress | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Compute rows, put their keys and values into `kv` and return float32 logits [n, vocab] of `logit_rows`.

        `tokens`, `positions`, `slots` [T] and `logit_rows` [n] are int64; `kv` [layers, 2, blocks, block_size,
        kv_heads, D]; a slot of -1 is not written; `expert_tokens` [layers, E] int64 counts rows by expert; `progress`
        hears of each layer whose keys and values are written; `hidden` [T, H] float32 gets every row after the
        final norm, which a draft head reads. A row's result depends neither on the rows beside it nor on the number of
        threads. ValueError names a wrong argument.
        """
        ...

    def burst(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        batch: AttentionBatch,
        kv: Tensor,
        steps: int,
        chances: Chances | None = None,
        expert_tokens: Tensor | None = None,
        most: Sequence[int] | None = None,
        drafts: Drafts | None = None,
        ends: Sequence[Collection[int]] | None = None,
    ) -> Burst:
        """Up to `steps` steps of sequences with one row each, in one call.

        Each step takes the tokens that the one before has drawn, further on in the tables of `batch`, which need blocks
        for all. No `chances` take the largest logit. It ends early when a sequence has `most` tokens (of each; None:
        as many as steps). With `drafts` what may follow is computed beside each token, and a sequence goes on as many
        places as were right, and one. It also ends when a sequence draws one of its `ends`; after that one there may be
        more of a draft. The tokens are those of `step` and `sample` in turn.
        """
        ...


def build_decoder(weights: DecoderWeights, dtype: torch.dtype | None = None, row_bits: int = 0) -> Decoder | None:
    """A decoder of the device's best backend, or None where none has one: then compose the single ops.

    `dtype` and `row_bits` are those of the packed matrices, see `pack`; the router stays as it is. int8 without
    `row_bits` takes 16 where the CPU multiplies such numbers fastest.
    """
    library = registry.cpu_library() if weights.embedding.device.type == "cpu" else None
    if library is None or weights.embedding.dtype not in (torch.float32, torch.bfloat16):
        return None
    from omni_kernels.cpu.decoder import CpuDecoder

    return CpuDecoder(library, weights, dtype, row_bits)
