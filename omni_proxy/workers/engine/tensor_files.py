"""Where the tensors of a folder lie, and reading them: safetensors, whole or sharded.

Faults are `CheckpointError`s that name the file and the tensor. Knows nothing of what a model needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open
from torch import Tensor

from omni_proxy.workers.engine.config_fields import CheckpointError, one_line, read_json

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"


def locate_tensors(folder: Path) -> dict[str, Path]:
    """Which file holds which tensor: from the index of a sharded checkpoint, or from the single file."""
    index = folder / INDEX
    if not index.is_file():
        return dict.fromkeys(_names(folder / SINGLE), folder / SINGLE)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: weight_map is missing")
    held = {file: set(_names(folder / file)) for file in sorted(set(weight_map.values()))}
    for name, file in weight_map.items():
        if name not in held[file]:
            raise CheckpointError(f"{folder / file}: tensor {name} is missing, {index.name} promises it")
    return {name: folder / file for name, file in weight_map.items()}


def main_file(folder: Path) -> Path:
    """The file to name when a tensor is nowhere."""
    return folder / INDEX if (folder / INDEX).is_file() else folder / SINGLE


def read_tensors(file: Path, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of one file, one after the other, as they are stored."""
    with _opened(file) as tensors:
        for name in names:
            try:
                yield name, tensors.get_tensor(name)
            except SafetensorError as exc:
                raise CheckpointError(f"{file}: tensor {name}: {one_line(exc)}") from exc


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
