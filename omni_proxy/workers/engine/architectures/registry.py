"""All architectures, by the `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from omni_proxy.workers.engine.architectures import deepseek, llama, mimo, mixtral, olmoe, pangu, qwen, qwen3_moe
from omni_proxy.workers.engine.architectures.architecture import Architecture
from omni_proxy.workers.engine.config_fields import Fields

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "PanguProMoE": pangu.PANGU_PRO_MOE,
    "deepseek_v2": deepseek.DEEPSEEK_V2,
    "deepseek_v3": deepseek.DEEPSEEK_V3,
    "llama": llama.LLAMA,
    "mimo": mimo.MIMO,
    "mistral": llama.MISTRAL,
    "mixtral": mixtral.MIXTRAL,
    "olmoe": olmoe.OLMOE,
    "qwen2": qwen.QWEN2,
    "qwen3": qwen.QWEN3,
    "qwen3_moe": qwen3_moe.QWEN3_MOE,
}


def architecture_of(fields: Fields) -> Architecture:
    """The architecture that a config.json names. Raises CheckpointError."""
    model_type = fields.raw.get("model_type")
    found = ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if found is None:
        raise fields.error(f"model_type {model_type!r} is not supported (supported: {', '.join(ARCHITECTURES)})")
    return found
