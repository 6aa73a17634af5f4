"""A random tiny checkpoint with MoE and dense layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 7,
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def write_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write the checkpoint, with changes to its config or dtype, and return the folder."""

    def write(dtype: torch.dtype = torch.float32, shard_size: str = "1GB", **changes: Any) -> Path:
        torch.manual_seed(0)
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SHAPE, **changes}))
        model.to(dtype)
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder, max_shard_size=shard_size)
        return folder

    return write


@pytest.fixture(scope="session")
def model(write_checkpoint: Callable[..., Path]) -> Path:
    return write_checkpoint()
