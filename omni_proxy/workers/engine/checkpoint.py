"""A Hugging Face folder -> a validated config and named tensors.

Every fault of the folder is a `CheckpointError` of one line that names the file and, where there is one, the tensor.
Knows what a folder must hold, not what is computed from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from omni_proxy.workers.engine.architectures.registry import ARCHITECTURES
from omni_proxy.workers.engine.hf_config import CheckpointError, ModelConfig, read_config
from omni_proxy.workers.engine.tensor_files import TensorFolder
from omni_proxy.workers.engine.tensor_shapes import Shape, draft_name, may_be_ignored, stored_name, tensor_shapes

__all__ = ["Checkpoint", "CheckpointError", "ModelConfig", "load_checkpoint"]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Config and tensors, each under its canonical name, with an identity of the weights."""

    config: ModelConfig
    tensors: Mapping[str, Tensor]
    digest: str


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies, and its name there."""

    file: Path
    name: str


def load_checkpoint(folder: str | Path, dtype: torch.dtype = torch.float32, draft: bool = False) -> Checkpoint:
    """Read and check the folder, with its draft head if asked; weights come back as `dtype`. Raises CheckpointError."""
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    config = read_config(path)
    if draft and not config.draft_layers:
        raise CheckpointError(f"{path / 'config.json'}: num_nextn_predict_layers is 0: the model has no draft head")
    config = replace(config, draft_layers=int(draft))
    files = TensorFolder(path, config.fp8_block)
    tensors = _read(files, config, dtype)
    return Checkpoint(config, tensors, digest_of(config, tensors))


def _read(files: TensorFolder, config: ModelConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    canonical = ARCHITECTURES[config.model_type].canonical
    where = {draft_name(canonical(name), config): Stored(file, name) for name, file in files.where.items()}
    expected = tensor_shapes(config, where)
    missing = next((name for name in expected if name not in where), None)
    if missing is not None:
        raise CheckpointError(f"{files.main_file}: tensor {stored_name(missing, config)} is missing")
    return read_tensors(where, files, expected, lambda name: may_be_ignored(name, config), dtype)


def read_tensors(
    where: Mapping[str, Stored],
    files: TensorFolder,
    expected: Mapping[str, Shape],
    ignored: Callable[[str], bool],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The tensors that are expected, by canonical name; `where` has them and all others. Raises CheckpointError."""
    extra = {name for name in where if name not in expected and not ignored(name)}
    if extra:
        first = where[min(extra)]
        raise CheckpointError(f"{first.file}: tensor {first.name} is not expected")
    tensors: dict[str, Tensor] = {}
    for file in sorted({where[name].file for name in expected}):
        stored = {where[name].name: name for name in expected if where[name].file == file}
        tensors.update(_checked(files.read(file, list(stored)), file, stored, expected, dtype))
    return tensors


def _checked(
    tensors: Iterator[tuple[str, Tensor]],
    file: Path,
    stored: Mapping[str, str],
    expected: Mapping[str, Shape],
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Checked tensors under their canonical names; `stored` maps the file's names to those."""
    for name, tensor in tensors:
        shape, want = list(tensor.shape), list(expected[stored[name]])
        if shape != want:
            raise CheckpointError(f"{file}: tensor {name} has shape {shape}, {want} is expected")
        if not tensor.is_floating_point():
            raise CheckpointError(f"{file}: tensor {name} has type {tensor.dtype}, not a float")
        # What corrects a choice between close scores keeps all its bits.
        exact = stored[name].endswith("e_score_correction_bias")
        yield stored[name], tensor.to(torch.float32 if exact else dtype)


def digest_of(config: ModelConfig, tensors: Mapping[str, Tensor]) -> str:
    """Tells checkpoints of one shape apart: a hash over the config and a sample of every tensor."""
    state = blake2b(repr(config).encode(), digest_size=8)
    for name in sorted(tensors):
        flat = tensors[name].flatten()
        sample = flat[:: max(1, flat.numel() // 64)].float().contiguous()
        state.update(name.encode() + sample.numpy().tobytes())
    return state.hexdigest()
