"""The checkpoints that are measured: the demo model, and a random MoE of about 100 million parameters."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from omni_proxy.demo import demo_model


@dataclass(frozen=True)
class Subject:
    """One checkpoint."""

    name: str
    folder: Path
    vocab: int
    active_bytes: int
    """Weights that a token passes, as bfloat16: what a decode step at batch 1 has to read."""


def demo() -> Subject:
    return _subject("demo model", demo_model())


def random_moe(folder: Path) -> Subject:
    """Written to `folder`: Qwen3-MoE, 8 layers of 16 experts, two of which a token takes; weights in bfloat16."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=8000,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
        intermediate_size=512,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        initializer_range=0.05,
        eos_token_id=1,
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return _subject("random MoE", folder)


def _subject(name: str, folder: Path) -> Subject:
    config = json.loads((folder / "config.json").read_text())
    per_token = config["num_experts_per_tok"] / (config.get("num_experts") or config["num_local_experts"])
    total = active = 0.0
    with safe_open(folder / "model.safetensors", framework="pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 (not a mapping)
            size = torch.Size(tensors.get_slice(key).get_shape()).numel()
            total += size
            active += size * (per_token if ".experts." in key else 1.0)
    return Subject(
        f"{name}, {total / 1e6:.0f} M ({active / 1e6:.1f} M active)", folder, config["vocab_size"], int(2 * active)
    )
