"""Tiny random checkpoints of every architecture, written by transformers; Pangu's, which it lacks, by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

_COMMON: Final[dict[str, Any]] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LATENT: Final[dict[str, Any]] = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def _scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **more}}


CONFIGS: Final[dict[str, dict[str, Any]]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 3, "clip_qkv": 0.7},
    "deepseek_v3": {
        **_LATENT,
        "model_type": "deepseek_v3",
        "q_lora_rank": 16,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "rope_parameters": _YARN,
    },
    "deepseek_v3_half_split": {
        **_LATENT,
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "rope_interleave": False,
    },
    "deepseek_v2": {
        **_LATENT,
        "model_type": "deepseek_v2",
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.5,
    },
    "deepseek_v2_lite": {**_LATENT, "model_type": "deepseek_v2", "q_lora_rank": 16, "rope_parameters": _YARN},
    "llama3": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        **_scaled("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    },
    "llama_linear": {"model_type": "llama", "attention_bias": True, **_scaled("linear")},
    "llama_dynamic": {"model_type": "llama", **_scaled("dynamic")},
    "llama_yarn": {"model_type": "llama", **_scaled("yarn", original_max_position_embeddings=32)},
    "mistral": {"model_type": "mistral", "head_dim": 16, "sliding_window": 256},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "attention_bias": True,
    },
}


def write(folder: Path, config: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A random model of a config, saved to `folder`; biases and corrections, which start at zero, are random too."""
    torch.manual_seed(seed)
    said = {**_COMMON, **config}
    model: Any = AutoModelForCausalLM
    model = model.from_config(AutoConfig.for_model(**said)).float().train(False)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith((".bias", "e_score_correction_bias")):
                value.copy_(torch.randn_like(value) * 0.3)
            elif name.endswith("norm.weight"):
                value.copy_(torch.rand_like(value) + 0.5)
            elif name.endswith("gate.weight"):
                value.copy_(torch.randn_like(value) * 0.3)
    model.save_pretrained(folder)
    return model  # type: ignore[no-any-return]


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: tuple[int, ...]) -> torch.Tensor:
    """Next-token logits [len(tokens), vocab]."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


# -- Pangu Pro MoE: the definition, in plain torch

PANGU: Final[dict[str, Any]] = {
    **_COMMON,
    "model_type": "PanguProMoE",
    "num_key_value_heads": 2,
    "num_experts": 12,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "mlp_only_layers": [0],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
}


def write_pangu(folder: Path, seed: int = 0) -> Callable[[tuple[int, ...]], torch.Tensor]:
    """A random checkpoint, and its logits written out the slow way."""
    generator = torch.Generator().manual_seed(seed)
    c = PANGU
    tensors = {name: _random(name, shape, generator) for name, shape in _pangu_shapes(c).items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(c))
    save_file(tensors, folder / "model.safetensors")
    return lambda tokens: _pangu_logits(c, tensors, tokens)


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if "norm" in name or name.endswith("router_scale"):
        return torch.rand(shape, generator=generator) + 0.5
    return torch.randn(shape, generator=generator) * 0.2


def _pangu_shapes(c: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, vocab, dim = c["hidden_size"], c["vocab_size"], c["hidden_size"] // c["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    widths = {"q": c["num_attention_heads"] * dim, "k": c["num_key_value_heads"] * dim}
    widths["v"] = widths["k"]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {at + name: (hidden,) for name in ("input_layernorm.weight", "post_attention_layernorm.weight")}
        for name, wide in widths.items():
            shapes |= {f"{at}self_attn.{name}_proj.weight": (wide, hidden), f"{at}self_attn.{name}_proj.bias": (wide,)}
        shapes |= {at + "self_attn.o_proj.weight": (hidden, widths["q"]), at + "self_attn.o_proj.bias": (hidden,)}
        if i in c["mlp_only_layers"]:
            shapes |= _mlp_shapes(at + "mlp.", hidden, c["intermediate_size"])
            continue
        shapes |= {at + "mlp.gate.weight": (c["num_experts"], hidden), at + "mlp.router_scale": (1, c["num_experts"])}
        shapes |= _mlp_shapes(at + "mlp.shared_expert.", hidden, c["shared_expert_intermediate_size"])
        for e in range(c["num_experts"]):
            shapes |= _mlp_shapes(f"{at}mlp.experts.{e}.", hidden, c["moe_intermediate_size"])
    return shapes


def _mlp_shapes(prefix: str, hidden: int, wide: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
    return {f"{prefix}{name}_proj.weight": shape for name, shape in shapes.items()}


def _pangu_logits(c: dict[str, Any], t: dict[str, torch.Tensor], tokens: tuple[int, ...]) -> torch.Tensor:
    x = t["model.embed_tokens.weight"][list(tokens)]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        x = x + _attend(c, t, at + "self_attn.", _norm(x, t[at + "input_layernorm.weight"]))
        normed = _norm(x, t[at + "post_attention_layernorm.weight"])
        dense = i in c["mlp_only_layers"]
        x = x + (_mlp(t, at + "mlp.", normed) if dense else _grouped_experts(c, t, at + "mlp.", normed))
    return _norm(x, t["model.norm.weight"]) @ t["lm_head.weight"].t()


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _attend(c: dict[str, Any], t: dict[str, torch.Tensor], at: str, x: torch.Tensor) -> torch.Tensor:
    heads, dim = c["num_attention_heads"], c["hidden_size"] // c["num_attention_heads"]
    q, k, v = (x @ t[f"{at}{n}_proj.weight"].t() + t[f"{at}{n}_proj.bias"] for n in "qkv")
    angle = torch.arange(len(x)).unsqueeze(1) / c["rope_theta"] ** (torch.arange(0, dim, 2) / dim)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    out = torch.zeros(len(x), heads, dim)
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    for h in range(heads):
        pair = h // (heads // c["num_key_value_heads"])
        query, key = (_turn(part, cos, sin) for part in (q[:, h * dim :][:, :dim], k[:, pair * dim :][:, :dim]))
        scores = (query @ key.t() / dim**0.5).masked_fill(hidden, -torch.inf)
        out[:, h] = scores.softmax(-1) @ v[:, pair * dim :][:, :dim]
    return out.flatten(1) @ t[at + "o_proj.weight"].t() + t[at + "o_proj.bias"]


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


def _mlp(t: dict[str, torch.Tensor], at: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ t[f"{at}{n}_proj.weight"].t() for n in ("gate", "up"))
    return (gate * gate.sigmoid() * up) @ t[at + "down_proj.weight"].t()


def _grouped_experts(c: dict[str, Any], t: dict[str, torch.Tensor], at: str, x: torch.Tensor) -> torch.Tensor:
    """One expert out of each group, weighed by its probability among all times its scale; and the shared one."""
    groups = c["num_experts_per_tok"]
    width = c["num_experts"] // groups
    probs = (x @ t[at + "gate.weight"].t()).softmax(-1)
    out = _mlp(t, at + "shared_expert.", x)
    for row in range(len(x)):
        for g in range(groups):
            best = g * width + int(probs[row, g * width : (g + 1) * width].argmax())
            weight = probs[row, best] * t[at + "router_scale"][0, best]
            out[row] += weight * _mlp(t, f"{at}experts.{best}.", x[row : row + 1])[0]
    return out
