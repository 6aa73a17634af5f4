"""A GGUF file's metadata -> config.json and generation_config.json, as Hugging Face has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from omni_proxy.gguf.file import GgufError, GgufFile

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
"""Dense families; their names are those of `model_type` as well."""
_FIELDS: Final[Mapping[str, str]] = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_LLAMA3_ORIGINAL: Final = 8192
"""Context that Llama 3 was trained on before it was stretched; the file holds only the factors that follow from it."""


def architecture(file: GgufFile) -> str:
    """The family. Raises GgufError for one that is not served."""
    name = file.need("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise GgufError(f"{file.path}: general.architecture {name!r} is not supported (supported: {known})")
    return str(name)


def model_config(file: GgufFile) -> dict[str, Any]:
    """The content of config.json."""
    family = architecture(file)
    config: dict[str, Any] = {name: file.need(f"{family}.{key}") for name, key in _FIELDS.items()}
    heads = config["num_attention_heads"]
    if not isinstance(heads, int):
        raise GgufError(f"{file.path}: {family}.attention.head_count must be one number")
    config |= {
        "model_type": family,
        "vocab_size": file.shape("token_embd.weight")[0],
        "num_key_value_heads": file.get(f"{family}.attention.head_count_kv", heads),
        "head_dim": file.get(f"{family}.attention.key_length", config["hidden_size"] // heads),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file, family),
        "eos_token_id": end_tokens(file),
    }
    return config


def end_tokens(file: GgufFile) -> list[int]:
    """Ids that end a text or a turn."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return sorted({int(value) for key in keys if (value := file.get(key)) is not None})


def _rope(file: GgufFile, family: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(file.get(f"{family}.rope.freq_base", 1e4))}
    kind = file.get(f"{family}.rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        original = file.get(f"{family}.rope.scaling.original_context_length")
        rope |= {"rope_type": kind, "factor": float(file.need(f"{family}.rope.scaling.factor"))}
        rope |= {} if original is None else {"original_max_position_embeddings": original}
    elif kind != "none":
        raise GgufError(f"{file.path}: {family}.rope.scaling.type {kind!r} is not supported")
    if "rope_freqs.weight" in file.tensors:
        factor = float(file.array("rope_freqs.weight").max())
        bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"rope_type": "llama3", "factor": factor, "original_max_position_embeddings": _LLAMA3_ORIGINAL, **bands}
    return rope
