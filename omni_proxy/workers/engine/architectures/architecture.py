"""What an architecture has to say: a reader of its config, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from omni_proxy.workers.engine.config_fields import Fields
from omni_proxy.workers.engine.model_config import ModelConfig


def same_name(name: str) -> str:
    """For checkpoints that use the canonical names (those of Qwen3-MoE and DeepSeek)."""
    return name


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of `model_type`."""

    read: Callable[[Fields], ModelConfig]
    """Raises CheckpointError for what cannot be served."""
    canonical: Callable[[str], str] = same_name
    """The canonical name of a tensor of the checkpoint, see `tensor_shapes`."""
