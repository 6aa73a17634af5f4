"""The shape of a decoder-only transformer, in one vocabulary for all architectures.

Filled by the readers in `architectures/`; the model, the sizes and the tensor list follow from it. Knows no files and
no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from omni_kernels.rope_scaling import RopeScaling, yarn_mscale


@dataclass(frozen=True, slots=True)
class Routing:
    """How an MoE layer chooses its experts; the words are those of `omni_kernels.moe_route`."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    corrected: bool = False
    """The checkpoint has a correction of the scores, for the choice only (DeepSeek-V3)."""
    groups: int = 1
    top_groups: int | None = None
    group_best: int = 2
    per_group: bool = False
    """Equally many of each group (MoGE)."""
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): one compressed key and value for all heads."""

    rank: int
    """Width of the compressed key and value."""
    plain_dim: int
    """Of a head's query and key, the part without rotation."""
    rotary_dim: int
    value_dim: int
    query_rank: int | None
    """Width of the compressed query; None where it is not compressed."""
    interleaved: bool
    """Rotated pairs lie side by side in the checkpoint, not half the width apart."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder. Names as in Hugging Face's config.json where it has them."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of a cached key; with `latent` that of the whole cached row."""
    intermediate_size: int
    """Width of the dense layers' MLP."""
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    max_model_len: int
    eos_token_ids: frozenset[int]
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    qk_norm: Literal["none", "heads", "rows"] = "none"
    """Norm of queries and keys: none, of each head, or of all heads as one row (OLMoE)."""
    qkv_bias: bool = False
    out_bias: bool = False
    clip_qkv: float | None = None
    latent: Latent | None = None
    num_experts: int = 0
    top_k: int = 1
    moe_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    """Width of the expert that takes every row; 0 where there is none."""
    sparse_layers: frozenset[int] = field(default_factory=frozenset)
    """Layers that have experts; the others have one dense MLP."""
    routing: Routing = field(default_factory=Routing)
    draft_layers: int = 0
    """Layers of the draft head: those a config.json names, and once a checkpoint is loaded, those loaded with it."""
    fp8_block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale where the checkpoint has weights in float8."""
    draft_hidden_first: bool = False
    """The head's projection takes the hidden state before the embedding (MiMo), not after it."""

    @property
    def cached_layers(self) -> int:
        """Layers that keep rows in the cache; those of the draft head are the last."""
        return self.num_layers + self.draft_layers

    @property
    def longest(self) -> int:
        """Most tokens of a sequence when asked for: `dynamic` scaling stretches beyond the trained context."""
        how = self.rope_scaling
        return int(self.max_model_len * how.factor) if how.kind == "dynamic" else self.max_model_len

    @property
    def rotary_dim(self) -> int:
        """Rotated width of a head."""
        return self.head_dim if self.latent is None else self.latent.rotary_dim

    @property
    def kv_planes(self) -> int:
        """Rows that a token and a head keep in the cache: key and value, or one that is both."""
        return 2 if self.latent is None else 1

    @property
    def attention_scale(self) -> float:
        """Factor of the attention logits."""
        if self.latent is None:
            return float(self.head_dim**-0.5)
        how = self.rope_scaling
        plain = (self.latent.plain_dim + self.latent.rotary_dim) ** -0.5
        stretched = how.kind != "default" and how.mscale_all_dim
        return float(plain * yarn_mscale(how.factor, how.mscale_all_dim) ** 2) if stretched else float(plain)
