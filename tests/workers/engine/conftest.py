"""Random tiny checkpoints written by transformers, and the models themselves to compare with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

SHAPES: Final[dict[str, dict[str, Any]]] = {
    "tied": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "untied": {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "moe_intermediate_size": 40,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "tie_word_embeddings": False,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
}
COMMON: Final[dict[str, Any]] = {
    "vocab_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 7,
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def write_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a random checkpoint of a shape, with changes to its config, and return the folder."""

    def write(shape: str, seed: int = 0, shard_size: str = "1GB", **changes: Any) -> Path:
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**COMMON, **SHAPES[shape], **changes}))
        folder = tmp_path_factory.mktemp(shape)
        model.save_pretrained(folder, max_shard_size=shard_size)
        return folder

    return write


@pytest.fixture(scope="session")
def checkpoints(write_checkpoint: Callable[..., Path]) -> dict[str, Path]:
    return {shape: write_checkpoint(shape) for shape in SHAPES}


@pytest.fixture(scope="session", params=list(SHAPES))
def checkpoint(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Path:
    return checkpoints[request.param]


@pytest.fixture(scope="session")
def tied(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["tied"]


class Reference:
    """transformers' own model of a folder."""

    def __init__(self, folder: Path) -> None:
        self.model = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).train(False)

    @torch.no_grad()
    def logits(self, tokens: tuple[int, ...]) -> torch.Tensor:
        """Next-token logits [len(tokens), vocab]."""
        logits: torch.Tensor = self.model(torch.tensor([tokens])).logits[0]
        return logits

    @torch.no_grad()
    def greedy(self, tokens: tuple[int, ...], count: int) -> list[int]:
        out = self.model.generate(
            torch.tensor([tokens]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.int64),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return [int(t) for t in out[0, len(tokens) :]]


@pytest.fixture(scope="session")
def reference_of() -> Callable[[Path], Reference]:
    """transformers' model of a folder, loaded once."""
    loaded: dict[Path, Reference] = {}

    def reference(folder: Path) -> Reference:
        if folder not in loaded:
            loaded[folder] = Reference(folder)
        return loaded[folder]

    return reference
