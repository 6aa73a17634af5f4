"""How large a model is, by part, from its Hugging Face config.json: what its weights, cache and products cost.

Reads the spellings of transformers 4 and 5. Knows no device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from omni_kernels.layout.errors import LayoutError

BYTES: Final[Mapping[str, float]] = MappingProxyType(
    {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
)
"""Of one weight, by the name of its type."""


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Parameters by part (numbers, not bytes), the cache of one token, and products a token."""

    name: str
    layers: int
    dense_layers: int
    """Layers whose MLP is no mixture."""
    hidden: int
    heads: int
    kv_heads: int
    query_dim: int
    """Of a head, of queries and keys."""
    value_dim: int
    latent: int
    """Cached values a token and layer of MLA, rotated part included; 0: keys and values by head."""
    attention: float
    """Parameters a layer."""
    dense: float
    """Parameters of a layer's dense MLP."""
    expert: float
    """Parameters of one routed expert."""
    shared: float
    """Parameters a layer that every token passes beside the routed experts."""
    experts: int
    top_k: int
    sends: int
    """Nodes at most that a token's experts lie on (DeepSeek's limit), else top_k."""
    vocabulary: float
    """Parameters of embedding and head."""
    weight_type: str

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers

    @property
    def parameters(self) -> float:
        """All of them."""
        sparse = self.moe_layers * (self.expert * self.experts + self.shared)
        return self.layers * self.attention + self.dense_layers * self.dense + sparse + self.vocabulary

    @property
    def active(self) -> float:
        """Those that one token passes; the embedding is looked up, not multiplied with."""
        sparse = self.moe_layers * (self.expert * self.top_k + self.shared)
        return self.layers * self.attention + self.dense_layers * self.dense + sparse + self.vocabulary / 2

    @property
    def weight_bytes(self) -> float:
        """Of one weight."""
        return BYTES[self.weight_type]

    def kv_bytes(self, tp: int) -> float:
        """Cache of one token in one layer on one of `tp` ranks, in 16-bit values. MLA's is whole on each of them."""
        if self.latent:
            return 2.0 * self.latent
        return 2.0 * (self.query_dim + self.value_dim) * max(1.0, self.kv_heads / tp)


class _Fields:
    """Typed access to a config whose errors name the file and the field."""

    def __init__(self, where: str, raw: Mapping[str, Any]) -> None:
        self.where = where
        self.raw = raw

    def integer(self, *names: str, default: int | None = None) -> int:
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 1 << 40:
                raise LayoutError(f"{self.where}: {name} must be a positive integer, got {value!r}")
            return value
        if default is None:
            raise LayoutError(f"{self.where}: {' or '.join(names)} is missing")
        return default

    def optional(self, name: str) -> int:
        """0 where the field is absent or 0."""
        return 0 if not self.raw.get(name) else self.integer(name)


def model_sizes(config: Mapping[str, Any], where: str, weight_type: str | None = None) -> ModelSizes:
    """Sizes of the model that config.json describes. Raises LayoutError, which begins with `where`."""
    inner = config.get("text_config")
    fields = _Fields(where, {**config, **inner} if isinstance(inner, dict) else config)
    hidden, layers = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    heads = fields.integer("num_attention_heads")
    experts = fields.integer("n_routed_experts", "num_experts", "num_local_experts", default=1)
    dense = 3.0 * hidden * fields.integer("intermediate_size", default=4 * hidden)
    dense_layers = min(layers, _dense_layers(fields, layers)) if experts > 1 else layers
    wide = fields.integer("moe_intermediate_size", "intermediate_size", default=4 * hidden)
    top_k = fields.integer("num_experts_per_tok", default=1) if experts > 1 else 1
    if top_k > experts:
        raise LayoutError(f"{where}: num_experts_per_tok must be at most the {experts} experts, got {top_k}")
    shared = (
        3.0 * hidden * (wide * fields.optional("n_shared_experts") + fields.optional("shared_expert_intermediate_size"))
    )
    attention, query_dim, value_dim, latent = _attention(fields, hidden, heads)
    tied = bool(config.get("tie_word_embeddings", False))
    return ModelSizes(
        name=str(fields.raw.get("model_type", "model")),
        layers=layers,
        dense_layers=dense_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=fields.integer("num_key_value_heads", default=heads),
        query_dim=query_dim,
        value_dim=value_dim,
        latent=latent,
        attention=attention,
        dense=dense,
        expert=3.0 * hidden * wide,
        shared=(shared + hidden * experts) if experts > 1 else 0.0,
        experts=experts if experts > 1 else 0,
        top_k=top_k,
        sends=min(top_k, fields.optional("topk_group") or top_k),
        vocabulary=(1.0 if tied else 2.0) * fields.integer("vocab_size") * hidden,
        weight_type=weight_type or _weight_type(fields),
    )


def _dense_layers(fields: _Fields, layers: int) -> int:
    listed = fields.raw.get("mlp_only_layers")
    step = fields.integer("decoder_sparse_step", default=1)
    count = len(listed) if isinstance(listed, list) else 0
    return max(fields.optional("first_k_dense_replace"), count, layers - layers // step)


def _attention(fields: _Fields, hidden: int, heads: int) -> tuple[float, int, int, int]:
    """(parameters a layer, query and key dim of a head, value dim, cached latent or 0)."""
    rank = fields.optional("kv_lora_rank")
    if not rank:
        dim = fields.integer("head_dim", default=max(1, hidden // heads))
        kv_heads = fields.integer("num_key_value_heads", default=heads)
        return float(hidden * dim * (2 * heads + 2 * kv_heads)), dim, dim, 0
    rotated, plain = fields.integer("qk_rope_head_dim"), fields.integer("qk_nope_head_dim")
    value, query_rank = fields.integer("v_head_dim"), fields.optional("q_lora_rank")
    query = heads * (rotated + plain)
    queries = hidden * query_rank + query_rank * query if query_rank else hidden * query
    keys = hidden * (rank + rotated) + rank * heads * (plain + value)
    return float(queries + keys + heads * value * hidden), rotated + plain, value, rank + rotated


def _weight_type(fields: _Fields) -> str:
    how = fields.raw.get("quantization_config")
    if isinstance(how, dict):
        method, bits = str(how.get("quant_method", "")), how.get("bits") or how.get("weight_bits")
        return "int4" if bits == 4 else "fp8" if method == "fp8" else "int8"
    kept = str(fields.raw.get("torch_dtype") or fields.raw.get("dtype") or "bfloat16").removeprefix("torch.")
    if kept not in BYTES:
        raise LayoutError(f"{fields.where}: torch_dtype must be one of {', '.join(BYTES)}, got {kept!r}")
    return kept


_DEEPSEEK_V3: Final[Mapping[str, Any]] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "first_k_dense_replace": 3,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "num_attention_heads": 128, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "vocab_size": 129280, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
PRESETS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "deepseek-v3": _DEEPSEEK_V3,
        "deepseek-r1": _DEEPSEEK_V3,
        "qwen3-30b-a3b": {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "torch_dtype": "bfloat16",
        },
        "qwen3-235b-a22b": {
            "model_type": "qwen3_moe",
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "torch_dtype": "bfloat16",
        },
        "llama-3.1-70b": {
            "model_type": "llama",
            "hidden_size": 8192,
            "num_hidden_layers": 80,
            "intermediate_size": 28672,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "torch_dtype": "bfloat16",
        },
    }
)
"""Configs of well-known checkpoints, for planning without their files."""


def read_model(text: str, weight_type: str | None = None) -> ModelSizes:
    """The model a folder, a config.json or a preset's name stands for. Raises LayoutError."""
    if weight_type is not None and weight_type not in BYTES:
        raise LayoutError(f"dtype: must be one of {', '.join(BYTES)}, got {weight_type!r}")
    preset = PRESETS.get(text.lower())
    if preset is not None:
        return model_sizes(preset, text, weight_type)
    path = Path(text)
    path = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_bytes())
    except OSError as exc:
        known = ", ".join(PRESETS)
        raise LayoutError(f"model: {path}: {exc.strerror or exc} (a folder, a config.json, or one of {known})") from exc
    except ValueError as exc:
        raise LayoutError(f"model: {path}: not JSON: {exc}") from exc
    if not isinstance(raw, dict):
        raise LayoutError(f"model: {path}: must be an object")
    return model_sizes(raw, str(path), weight_type)
