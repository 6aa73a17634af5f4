"""The tensors of a draft head: the MTP layer of a checkpoint, or an EAGLE folder beside it.

A head predicts the token after the next from the model's last hidden state and the next token's embedding: a projection
of both, one decoder layer, the model's own output matrix. Knows names and shapes, not what is computed with them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from omni_proxy.workers.engine.checkpoint import (
    Checkpoint,
    CheckpointError,
    ModelConfig,
    Stored,
    digest_of,
    load_checkpoint,
    read_tensors,
)
from omni_proxy.workers.engine.hf_config import read_config
from omni_proxy.workers.engine.tensor_files import TensorFolder
from omni_proxy.workers.engine.tensor_shapes import DRAFT, Shape, draft_layer, layer_shapes

_EAGLE_LAYER: Final = "layers.0."
_EAGLE_SHARED: Final = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, slots=True)
class HeadCheckpoint:
    """A draft head; its tensors go by their names in DeepSeek-V3's layer, what a format lacks is absent."""

    config: ModelConfig
    """Of its layer, which has the number `num_layers`."""
    tensors: Mapping[str, Tensor]


def load_with_head(
    folder: str | Path, dtype: torch.dtype, draft: bool, draft_folder: str | None
) -> tuple[Checkpoint, HeadCheckpoint | None]:
    """A model with the head that is asked for: that of `draft_folder`, or its own. Raises CheckpointError."""
    if not draft:
        return load_checkpoint(folder, dtype), None
    if draft_folder is not None:
        return _with_eagle(load_checkpoint(folder, dtype), Path(draft_folder), dtype)
    checkpoint = load_checkpoint(folder, dtype, draft=True)
    tensors = {name.removeprefix(DRAFT): t for name, t in checkpoint.tensors.items() if name.startswith(DRAFT)}
    return checkpoint, HeadCheckpoint(draft_layer(checkpoint.config), tensors)


def _with_eagle(model: Checkpoint, folder: Path, dtype: torch.dtype) -> tuple[Checkpoint, HeadCheckpoint]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    config = read_config(folder)
    _check_fit(folder / "config.json", config, model.config)
    files = TensorFolder(folder, config.fp8_block)
    where = {_canonical(name): Stored(file, name) for name, file in files.where.items()}
    expected = _eagle_shapes(config, where)
    missing = next((name for name in expected if name not in where), None)
    if missing is not None:
        raise CheckpointError(f"{files.main_file}: tensor {missing} is missing")
    tensors = read_tensors(where, files, expected, _ignored, dtype)
    both = blake2b((model.digest + digest_of(config, tensors)).encode(), digest_size=8).hexdigest()
    named = {_in_layer(name): tensor for name, tensor in tensors.items()}
    joined = Checkpoint(replace(model.config, draft_layers=1), model.tensors, both)
    return joined, HeadCheckpoint(draft_layer(config), named)


def _check_fit(path: Path, head: ModelConfig, model: ModelConfig) -> None:
    """Raise CheckpointError unless the head's layer can read this model's states and share its cache."""
    if head.num_layers != 1 or head.latent is not None or head.num_experts:
        raise CheckpointError(f"{path}: a draft head of one dense layer is expected")
    for name in ("vocab_size", "hidden_size", "kv_planes", "num_kv_heads", "head_dim"):
        mine, its = getattr(head, name), getattr(model, name)
        if mine != its:
            raise CheckpointError(f"{path}: {name} {mine} of the draft head differs from {its} of the model")


def _canonical(name: str) -> str:
    return name.removeprefix("model.")


def _eagle_shapes(config: ModelConfig, present: Container[str]) -> dict[str, Shape]:
    """EAGLE's first format: the layer has no norm before its attention, and nothing has one behind it."""
    hidden = config.hidden_size
    layer = layer_shapes(draft_layer(config), config.num_layers, _EAGLE_LAYER, present)
    del layer["input_layernorm.weight"]
    shapes: dict[str, Shape] = {"fc.weight": (hidden, 2 * hidden)}
    if "fc.bias" in present:
        shapes["fc.bias"] = (hidden,)
    return {**shapes, **{_EAGLE_LAYER + name: shape for name, shape in layer.items()}}


def _in_layer(name: str) -> str:
    return name.replace("fc.", "eh_proj.").removeprefix(_EAGLE_LAYER)


def _ignored(name: str) -> bool:
    return name in _EAGLE_SHARED or name.endswith("rotary_emb.inv_freq")
