"""config.json of a Hugging Face folder -> a validated `ModelConfig`, by the reader of its architecture."""

from __future__ import annotations

from pathlib import Path

from omni_proxy.workers.engine.architectures.registry import architecture_of
from omni_proxy.workers.engine.config_fields import CheckpointError, Fields, one_line, read_json
from omni_proxy.workers.engine.model_config import ModelConfig

__all__ = ["CheckpointError", "ModelConfig", "one_line", "read_config", "read_json"]


def read_config(path: Path) -> ModelConfig:
    """Validate config.json (and the end tokens of generation_config.json). Raises CheckpointError."""
    fields = Fields(path / "config.json", read_json(path / "config.json"))
    config = architecture_of(fields).read(fields)
    _check_config(fields, config)
    return config


def _check_config(fields: Fields, config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise fields.error(
            f"num_attention_heads {config.num_heads} is no multiple of num_key_value_heads {config.num_kv_heads}"
        )
    if config.rotary_dim % 2:
        raise fields.error(f"head_dim {config.rotary_dim} must be even")
    if not all(isinstance(t, int) and 0 <= t < config.vocab_size for t in config.eos_token_ids):
        raise fields.error(f"eos_token_id {sorted(config.eos_token_ids)} is not in the vocabulary")
    if config.sparse_layers:
        _check_routing(fields, config)


def _check_routing(fields: Fields, config: ModelConfig) -> None:
    experts, how = config.num_experts, config.routing
    if config.top_k > experts:
        raise fields.error(f"num_experts_per_tok {config.top_k} exceeds {experts} experts")
    if experts % how.groups:
        raise fields.error(f"{experts} experts do not divide into {how.groups} groups")
    if how.per_group and config.top_k % how.groups:
        raise fields.error(f"num_experts_per_tok {config.top_k} is no multiple of {how.groups} groups")
    kept = how.top_groups or how.groups
    if kept > how.groups or config.top_k > experts // how.groups * kept:
        raise fields.error(f"topk_group {kept} of {how.groups} groups cannot give {config.top_k} experts")
