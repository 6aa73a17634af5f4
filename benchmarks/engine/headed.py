"""Checkpoints whose draft head is right most of the time, made so: there is no trained head to be had offline.

Weights are random, and of the size that is written here, so that a step costs what it costs. But what the layers add to
a row is small, and the head hands the embedding of the next token on to the same output matrix: it says what the model
says wherever the layers do not decide. How often a trained head is right, this does not tell.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

_COMMON: Final = {"vocab_size": 8000, "max_position_embeddings": 2048, "eos_token_id": 1, "rms_norm_eps": 1e-6}
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "Llama with an EAGLE head": {
        **_COMMON,
        "model_type": "llama",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "intermediate_size": 2048,
    },
    "DeepSeek-V3 with an MTP layer": {
        **_COMMON,
        "model_type": "deepseek_v3",
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 128,
        "q_lora_rank": 192,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "num_nextn_predict_layers": 1,
    },
}


@dataclass(frozen=True)
class Headed:
    """A model's folder, and its head's if that lies beside it."""

    name: str
    folder: Path
    draft_model: str | None
    vocab: int


def constructed(folder: Path, name: str, share: float) -> Headed:
    """Write a model and its head; the layers add `share` of what random ones would."""
    said = SHAPES[name]
    layers, hidden = said["num_hidden_layers"], said["hidden_size"]
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{**said, "num_hidden_layers": layers + 1})  # the last is the head's
    model: Any = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for weight, value in model.model.layers.named_parameters():
            if "o_proj" in weight or "down_proj" in weight:
                value.mul_(share)
    model.to(torch.bfloat16).save_pretrained(folder)
    size = sum(value.numel() for value in model.parameters())
    eye = torch.eye(hidden, dtype=torch.bfloat16)
    draft_model = _divide(folder, said, torch.cat((eye, torch.zeros_like(eye)), 1))
    return Headed(f"{name}, {size / 1e6:.0f} M", folder, draft_model, said["vocab_size"])


def _divide(folder: Path, said: dict[str, Any], project: torch.Tensor) -> str | None:
    """Write the last layer as the head's."""
    layers, hidden = said["num_hidden_layers"], said["hidden_size"]
    tensors, last = load_file(folder / "model.safetensors"), f"model.layers.{layers}."
    head = {name.removeprefix(last): tensors.pop(name) for name in list(tensors) if name.startswith(last)}
    config = json.loads((folder / "config.json").read_text())
    config.pop("layer_types", None)
    beside = None
    if said["model_type"] == "llama":
        beside = folder / "head"
        beside.mkdir()
        del head["input_layernorm.weight"]
        save_file({"fc.weight": project, **{f"layers.0.{n}": t for n, t in head.items()}}, beside / "model.safetensors")
        (beside / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    else:
        ones = {f"{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
        tensors |= {last + name: tensor for name, tensor in {**head, **ones, "eh_proj.weight": project}.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    return None if beside is None else str(beside)
