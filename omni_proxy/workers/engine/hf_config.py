"""config.json of a Hugging Face folder -> a validated `ModelConfig`.

Reads both spellings of what transformers 5 renamed, and refuses what would change the computation instead of
ignoring it. Knows nothing of tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MODEL_TYPES: Final = ("qwen3_moe",)


class CheckpointError(ValueError):
    """The folder cannot be served; the text is one line for the operator."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Qwen3-MoE decoder, names as in Hugging Face's config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of the dense layers' MLP."""
    moe_intermediate_size: int
    num_experts: int
    top_k: int
    norm_topk_prob: bool
    sparse_layers: frozenset[int]
    """Layers that have experts; the others have one dense MLP."""
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    max_model_len: int
    eos_token_ids: frozenset[int]


def read_config(path: Path) -> ModelConfig:
    """Validate config.json (and the end tokens of generation_config.json). Raises CheckpointError."""
    raw = read_json(path / "config.json")
    fields = _Fields(path / "config.json", raw)
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise fields.error(f"model_type {model_type!r} is not supported (supported: {known})")
    _refuse_variants(fields)
    layers = fields.integer("num_hidden_layers")
    experts = fields.integer("num_experts", "num_local_experts")
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    config = ModelConfig(
        model_type=str(model_type),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=heads),
        head_dim=fields.integer("head_dim", default=hidden // heads),
        intermediate_size=fields.integer("intermediate_size", default=1),
        moe_intermediate_size=fields.integer("moe_intermediate_size"),
        num_experts=experts,
        top_k=fields.integer("num_experts_per_tok"),
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
        sparse_layers=_sparse_layers(fields, layers),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(fields),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        max_model_len=fields.integer("max_position_embeddings"),
        eos_token_ids=_eos_token_ids(path, raw),
    )
    _check_config(fields, config)
    return config


class _Fields:
    """Typed access to config.json whose errors name the file and the field."""

    def __init__(self, path: Path, raw: Mapping[str, Any]) -> None:
        self.path = path
        self.raw = raw

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {text}")

    def integer(self, *names: str, default: int | None = None) -> int:
        """The first of `names` that is there, as a positive integer."""
        for name in names:
            value = self.raw.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise self.error(f"{name} must be a positive integer, got {value!r}")
            return value
        if default is None:
            raise self.error(f"{' or '.join(names)} is missing")
        return default

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(f"{name} must be a positive number, got {value!r}")
        return float(value)


def _refuse_variants(fields: _Fields) -> None:
    """Options that change the computation and that the engine lacks must not be ignored."""
    raw = fields.raw
    if raw.get("hidden_act", "silu") != "silu":
        raise fields.error(f"hidden_act {raw['hidden_act']!r} is not supported (silu is)")
    for name in ("attention_bias", "use_sliding_window", "quantization_config"):
        if raw.get(name):
            raise fields.error(f"{name} is not supported")


def _rope_theta(fields: _Fields) -> float:
    """transformers 5 moved rope_theta into rope_parameters; older files have rope_scaling beside it."""
    rope: Mapping[str, Any] = {}
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.raw.get(name)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise fields.error(f"{name} must be an object, got {value!r}")
        kind = value.get("rope_type", value.get("type", "default"))
        if kind != "default":
            raise fields.error(f"{name}: rope_type {kind!r} is not supported (default is)")
        rope = {**value, **rope}
    if "rope_theta" in rope:
        return _Fields(fields.path, rope).number("rope_theta", 1e4)
    return fields.number("rope_theta", 1e4)


def _sparse_layers(fields: _Fields, layers: int) -> frozenset[int]:
    """Layer i has experts unless it is listed in mlp_only_layers or missed by decoder_sparse_step."""
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise fields.error(f"mlp_only_layers must be a list, got {dense!r}")
    return frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0)


def _eos_token_ids(path: Path, raw: Mapping[str, Any]) -> frozenset[int]:
    found: set[int] = set()
    sources = [raw]
    if (path / "generation_config.json").is_file():
        sources.append(read_json(path / "generation_config.json"))
    for source in sources:
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)


def _check_config(fields: _Fields, config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise fields.error(
            f"num_attention_heads {config.num_heads} is no multiple of num_key_value_heads {config.num_kv_heads}"
        )
    if config.top_k > config.num_experts:
        raise fields.error(f"num_experts_per_tok {config.top_k} exceeds {config.num_experts} experts")
    if config.head_dim % 2:
        raise fields.error(f"head_dim {config.head_dim} must be even")
    if not all(isinstance(t, int) and 0 <= t < config.vocab_size for t in config.eos_token_ids):
        raise fields.error(f"eos_token_id {sorted(config.eos_token_ids)} is not in the vocabulary")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{path}: not readable as JSON: {one_line(exc)}") from exc
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is expected")
    return value


def one_line(exc: BaseException) -> str:
    """An exception's text without line breaks."""
    return " ".join(str(exc).split())
