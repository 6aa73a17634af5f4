"""A Hugging Face folder -> a validated config and named tensors.

Every fault of the folder is a `CheckpointError` of one line that names the file and, where there is one, the tensor.
Knows the files' layout, not what is computed from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from omni_proxy.workers.engine.hf_config import (
    CheckpointError,
    ModelConfig,
    one_line,
    read_config,
    read_json,
)

__all__ = ["Checkpoint", "CheckpointError", "ModelConfig", "load_checkpoint"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Config and tensors, each under its canonical name, with an identity of the weights."""

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    digest: str


def load_checkpoint(folder: str | Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    """Read and check the folder; weights come back as `dtype`. Raises CheckpointError."""
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    config = read_config(path)
    where = _locate_tensors(path)
    tensors = _read_tensors(path, where, _expected(config, where), dtype)
    return Checkpoint(config, tensors, _digest(config, tensors))


def _expected(config: ModelConfig, where: Mapping[str, Path]) -> dict[str, Shape]:
    """Names and shapes of all tensors that the files must hold."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (vocab, hidden)
    for i in range(config.num_layers):
        prefix = f"model.layers.{i}."
        layer = {**_attention_shapes(config), **_mlp_shapes(config, i, prefix, where)}
        shapes.update({prefix + name: shape for name, shape in layer.items()})
    return shapes


def _attention_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, dim = config.hidden_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    return {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
    }


def _mlp_shapes(config: ModelConfig, layer: int, prefix: str, where: Mapping[str, Path]) -> dict[str, Shape]:
    hidden, experts, wide = config.hidden_size, config.num_experts, config.moe_intermediate_size
    if layer not in config.sparse_layers:
        return _gated_shapes("mlp.", hidden, config.intermediate_size)
    shapes: dict[str, Shape] = {"mlp.gate.weight": (experts, hidden)}
    if prefix + "mlp.experts.gate_up_proj" in where:
        shapes["mlp.experts.gate_up_proj"] = (experts, 2 * wide, hidden)
        shapes["mlp.experts.down_proj"] = (experts, hidden, wide)
        return shapes
    for e in range(experts):
        shapes.update(_gated_shapes(f"mlp.experts.{e}.", hidden, wide))
    return shapes


def _gated_shapes(prefix: str, hidden: int, wide: int) -> dict[str, Shape]:
    return {
        prefix + "gate_proj.weight": (wide, hidden),
        prefix + "up_proj.weight": (wide, hidden),
        prefix + "down_proj.weight": (hidden, wide),
    }


def _locate_tensors(path: Path) -> dict[str, Path]:
    """Which file holds which tensor: from the index of a sharded checkpoint, or from the single file."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        single = path / "model.safetensors"
        return dict.fromkeys(_names(single), single)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: weight_map is missing")
    held = {file: set(_names(path / file)) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in held[file]:
            raise CheckpointError(f"{path / file}: tensor {name} is missing, {index.name} promises it")
    return {name: path / file for name, file in weight_map.items()}


def _names(file: Path) -> list[str]:
    with _opened(file) as tensors:
        return list(tensors.keys())


def _opened(file: Path) -> Any:
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file")
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as exc:
        raise CheckpointError(f"{file}: not a whole safetensors file: {one_line(exc)}") from exc


def _read_tensors(
    path: Path, where: Mapping[str, Path], expected: Mapping[str, Shape], dtype: torch.dtype
) -> dict[str, Tensor]:
    for name in expected:
        if name not in where:
            raise CheckpointError(f"{_main_file(path)}: tensor {name} is missing")
    extra = {name for name in where if name not in expected and name != "lm_head.weight"}
    if extra:
        first = min(extra)
        raise CheckpointError(f"{where[first]}: tensor {first} is not expected")
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(where.values())):
        names = [name for name in expected if where[name] == file]
        tensors.update(_read_file(file, names, expected, dtype))
    return tensors


def _read_file(
    file: Path, names: list[str], expected: Mapping[str, Shape], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    with _opened(file) as tensors:
        for name in names:
            try:
                tensor: Tensor = tensors.get_tensor(name)
            except SafetensorError as exc:
                raise CheckpointError(f"{file}: tensor {name}: {one_line(exc)}") from exc
            shape, want = list(tensor.shape), list(expected[name])
            if shape != want:
                raise CheckpointError(f"{file}: tensor {name} has shape {shape}, {want} is expected")
            if not tensor.is_floating_point():
                raise CheckpointError(f"{file}: tensor {name} has type {tensor.dtype}, not a float")
            yield name, tensor.to(dtype)


def _main_file(path: Path) -> Path:
    index = path / "model.safetensors.index.json"
    return index if index.is_file() else path / "model.safetensors"


def _digest(config: ModelConfig, tensors: Mapping[str, Tensor]) -> str:
    """Tells checkpoints of one shape apart: a hash over the config and a sample of every tensor."""
    state = blake2b(repr(config).encode(), digest_size=8)
    for name in sorted(tensors):
        flat = tensors[name].flatten()
        sample = flat[:: max(1, flat.numel() // 64)].float().contiguous()
        state.update(name.encode() + sample.numpy().tobytes())
    return state.hexdigest()
