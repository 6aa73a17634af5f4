"""Typed access to a config.json whose errors name the file and the field, and the fields that all decoders share.

Reads both spellings of what transformers 5 renamed, and refuses what would change the computation instead of
ignoring it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_kernels.rope_scaling import KINDS, RopeScaling
from omni_proxy.workers.engine.model_config import ModelConfig


class CheckpointError(ValueError):
    """The folder cannot be served; the text is one line for the operator."""


class Fields:
    """The fields of one config.json, or of an object in it."""

    def __init__(self, path: Path, raw: Mapping[str, Any]) -> None:
        self.path = path
        self.raw = raw

    def error(self, text: str) -> CheckpointError:
        """A fault of the file, in one line."""
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

    def count(self, name: str) -> int:
        """A number of things that may be 0 or absent."""
        value = self.raw.get(name) or 0
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(f"{name} must be an integer of 0 or more, got {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(f"{name} must be a positive number, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, got {value!r}")
        return default if value is None else value

    def refuse(self, *names: str) -> None:
        """Options that change the computation and that the engine lacks must not be ignored."""
        for name in names:
            if self.raw.get(name):
                raise self.error(f"{name} is not supported")


def dense_config(fields: Fields) -> ModelConfig:
    """What every architecture here shares; a reader replaces what is its own."""
    _refuse_variants(fields)
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    longest = fields.integer("max_position_embeddings")
    theta, scaling = _rope(fields, longest)
    return ModelConfig(
        model_type=str(fields.raw["model_type"]),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=heads),
        head_dim=fields.integer("head_dim", default=hidden // heads),
        intermediate_size=fields.integer("intermediate_size", default=1),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        max_model_len=longest,
        eos_token_ids=_end_tokens(fields),
        rope_scaling=scaling,
        fp8_block=_fp8_block(fields),
    )


def sparse_layers(fields: Fields, layers: int) -> frozenset[int]:
    """Layer i has experts unless it is listed in mlp_only_layers or missed by decoder_sparse_step."""
    step = fields.integer("decoder_sparse_step", default=1)
    dense = fields.raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise fields.error(f"mlp_only_layers must be a list, got {dense!r}")
    return frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0)


def window_limited(fields: Fields, config: ModelConfig) -> int:
    """Longest sequence that a sliding window does not cut: within the window, attention is the whole one."""
    return min(config.max_model_len, fields.integer("sliding_window", default=config.max_model_len))


def _refuse_variants(fields: Fields) -> None:
    act = fields.raw.get("hidden_act", "silu")
    if act != "silu":
        raise fields.error(f"hidden_act {act!r} is not supported (silu is)")
    fields.refuse("mlp_bias")


def _fp8_block(fields: Fields) -> tuple[int, int] | None:
    """The only quantisation that is read: float8 weights with a scale for each block (DeepSeek-V3)."""
    said = fields.raw.get("quantization_config")
    if not said:
        return None
    how = said if isinstance(said, dict) else {}
    if (method := how.get("quant_method")) != "fp8":
        raise fields.error(f"quantization_config: quant_method {method!r} is not supported (fp8 is)")
    block = how.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise fields.error(f"quantization_config: weight_block_size must be two positive integers, got {block!r}")
    return block[0], block[1]


def _rope(fields: Fields, longest: int) -> tuple[float, RopeScaling]:
    """transformers 5 moved rope_theta into rope_parameters; older files have rope_scaling beside it."""
    said: dict[str, Any] = {}
    kind: Any = "default"
    for name in ("rope_parameters", "rope_scaling"):
        value = fields.raw.get(name)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise fields.error(f"{name} must be an object, got {value!r}")
        said = {**value, **said}
        kind = value.get("rope_type", value.get("type", "default")) if kind == "default" else kind
    rope = Fields(fields.path, said)
    if kind not in KINDS:
        raise fields.error(f"rope_type {kind!r} is not supported (supported: {', '.join(KINDS)})")
    for place in (rope, fields):
        if place.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.error("partial_rotary_factor is not supported")
    theta = rope.number("rope_theta", fields.number("rope_theta", 1e4))
    return theta, RopeScaling() if kind == "default" else _scaling(rope, kind, fields, longest)


def _scaling(rope: Fields, kind: str, fields: Fields, longest: int) -> RopeScaling:
    name = "original_max_position_embeddings"
    original = rope.integer(name, default=fields.integer(name, default=longest))
    attention = rope.raw.get("attention_factor")
    return RopeScaling(
        kind=kind,
        factor=rope.number("factor", longest / original),
        original=longest if kind == "dynamic" else original,
        low_freq_factor=rope.number("low_freq_factor", 1.0),
        high_freq_factor=rope.number("high_freq_factor", 4.0),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=None if attention is None else rope.number("attention_factor", 1.0),
        mscale=float(said) if (said := rope.raw.get("mscale")) else 0.0,
        mscale_all_dim=float(said) if (said := rope.raw.get("mscale_all_dim")) else 0.0,
        truncate=rope.flag("truncate", True),
    )


def _end_tokens(fields: Fields) -> frozenset[int]:
    """From config.json and, beside it, generation_config.json."""
    found: set[Any] = set()
    sources = [fields.raw]
    beside = fields.path.parent / "generation_config.json"
    if beside.is_file():
        sources.append(read_json(beside))
    for source in sources:
        value = source.get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)


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
