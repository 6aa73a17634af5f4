"""How large the engine is, from its config and the model's shape. Pure arithmetic.

Everything that is decided once at load and reported to others; what moves while it runs is elsewhere.
"""

from __future__ import annotations

from typing import Final

from omni_proxy.workers.engine.checkpoint import Checkpoint, ModelConfig
from omni_proxy.workers.engine.leases import Layout
from omni_proxy.workers.engine.types import EngineConfig, EngineInfo

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2}
LAYOUT_VERSION: Final = 1
"""Raised when the bytes of a block change their meaning."""


def block_bytes(config: EngineConfig, model: ModelConfig) -> int:
    """Keys and values of one block in all layers."""
    token_values = model.kv_planes * model.cached_layers * model.num_kv_heads * model.head_dim
    return token_values * config.block_size * ITEM_BYTES[config.dtype]


def engine_info(config: EngineConfig, model: ModelConfig, side_channel_port: int) -> EngineInfo:
    """Sizes of the engine. Raises ValueError when the KV cache cannot hold what is asked for."""
    size = block_bytes(config, model)
    num_blocks = config.kv_cache_bytes // size
    if num_blocks < 1:
        raise ValueError(f"kv_cache_bytes {config.kv_cache_bytes} is less than one block ({size})")
    return EngineInfo(
        model_type=model.model_type,
        max_model_len=_max_model_len(config, model, num_blocks),
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        block_size=config.block_size,
        num_blocks=num_blocks,
        block_bytes=size,
        dtype=config.dtype,
        side_channel_port=side_channel_port,
    )


def _max_model_len(config: EngineConfig, model: ModelConfig, num_blocks: int) -> int:
    """The longest sequence: it must fit the cache alone, so that every admitted request can end."""
    room = num_blocks * config.block_size
    asked = config.max_model_len
    if asked is None:
        return min(model.max_model_len, room)
    if not 2 <= asked <= model.longest:
        raise ValueError(f"max_model_len {asked} is outside the model's 2..{model.longest}")
    if asked > room:
        raise ValueError(
            f"max_model_len {asked} does not fit the KV cache of {room} tokens (kv_cache_bytes {config.kv_cache_bytes})"
        )
    return asked


def kv_layout(config: EngineConfig, checkpoint: Checkpoint) -> Layout:
    """What two engines must have in common to exchange blocks: the weights, and how their KV lies."""
    model = checkpoint.config
    return {
        "version": LAYOUT_VERSION,
        "model_type": model.model_type,
        "layers": model.cached_layers,
        "planes": model.kv_planes,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "dtype": config.dtype,
        "quantization": config.quantization or "none",
        "block_size": config.block_size,
        "weights": checkpoint.digest,
    }
