"""Where the tensors of a folder lie, and reading them: safetensors, whole or sharded, or one GGUF file.

Weights in float8 come back multiplied by their scales.
Faults are `CheckpointError`s that name the file and the tensor. Knows nothing of what a model needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from omni_kernels import dequantise_fp8
from omni_proxy.gguf.file import GgufError, GgufFile
from omni_proxy.gguf.folder import WEIGHTS
from omni_proxy.gguf.tensors import hugging_face_array, hugging_face_name
from omni_proxy.workers.engine.config_fields import CheckpointError, one_line, read_json

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
SCALE: Final = "_scale_inv"
"""What follows a float8 tensor's name in that of its scales."""
_FLOAT8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)


class TensorFolder:
    """The tensors of one folder."""

    def __init__(self, folder: Path, fp8_block: tuple[int, int] | None = None) -> None:
        """Tensors in float8 have a scale for each block of this size. Raises CheckpointError."""
        self._folder = folder
        self._fp8_block = fp8_block
        self._gguf = _opened_gguf((folder / WEIGHTS).resolve()) if (folder / WEIGHTS).is_symlink() else None
        where = self._locate()
        self._scales = {name: file for name, file in where.items() if name.removesuffix(SCALE) in where.keys() - {name}}
        self.where: Mapping[str, Path] = {name: file for name, file in where.items() if name not in self._scales}
        """Which file holds which tensor."""

    @property
    def main_file(self) -> Path:
        """The file to name when a tensor is nowhere."""
        if self._gguf is not None:
            return self._gguf.path
        return self._folder / INDEX if (self._folder / INDEX).is_file() else self._folder / SINGLE

    def read(self, file: Path, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of one file, one after the other, as they are stored (GGUF, float8: dequantised to float32)."""
        if self._gguf is not None:
            yield from _read_gguf(self._gguf, names)
            return
        scales = self._read_scales([name + SCALE for name in names if name + SCALE in self._scales])
        for name, tensor in _read_safetensors(file, names):
            scale = scales.get(name + SCALE)
            yield name, self._unscaled(file, name, tensor, scale)

    def _read_scales(self, names: Sequence[str]) -> dict[str, Tensor]:
        scales: dict[str, Tensor] = {}
        for file in sorted({self._scales[name] for name in names}):
            scales.update(_read_safetensors(file, [name for name in names if self._scales[name] == file]))
        return scales

    def _unscaled(self, file: Path, name: str, tensor: Tensor, scale: Tensor | None) -> Tensor:
        """`tensor`, with its scales multiplied in if it is float8."""
        if tensor.dtype not in _FLOAT8:
            if scale is not None:
                raise CheckpointError(f"{file}: tensor {name} has scales, but its type is {tensor.dtype}, not float8")
            return tensor
        if scale is None:
            raise CheckpointError(f"{file}: tensor {name} is float8, and {name + SCALE} is missing")
        if self._fp8_block is None:
            raise CheckpointError(f"{file}: tensor {name} is float8, and config.json has no quantization_config")
        blocks = [-(-size // side) for size, side in zip(tensor.shape[-2:], self._fp8_block, strict=False)]
        want, shape = [*tensor.shape[:-2], *blocks], list(scale.shape)
        if shape != want or not scale.is_floating_point():
            where, kind = self._scales[name + SCALE], scale.dtype
            raise CheckpointError(f"{where}: tensor {name + SCALE} is {kind} {shape}, floats {want} are expected")
        return dequantise_fp8(tensor, scale, self._fp8_block)

    def _locate(self) -> dict[str, Path]:
        """From the GGUF file, the index of a sharded checkpoint, or the single file."""
        if self._gguf is not None:
            return {hugging_face_name(name): self._gguf.path for name in self._gguf.tensors}
        index, single = self._folder / INDEX, self._folder / SINGLE
        if not index.is_file():
            return dict.fromkeys(_names(single), single)
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index}: weight_map is missing")
        held = {file: set(_names(self._folder / file)) for file in sorted(set(weight_map.values()))}
        for name, file in weight_map.items():
            if name not in held[file]:
                raise CheckpointError(f"{self._folder / file}: tensor {name} is missing, {index.name} promises it")
        return {name: self._folder / file for name, file in weight_map.items()}


def _read_safetensors(file: Path, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    with _opened(file) as tensors:
        for name in names:
            try:
                yield name, tensors.get_tensor(name)
            except SafetensorError as exc:
                raise CheckpointError(f"{file}: tensor {name}: {one_line(exc)}") from exc


def _read_gguf(source: GgufFile, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    stored = {hugging_face_name(name): name for name in source.tensors}
    for name in names:
        try:
            yield name, torch.from_numpy(hugging_face_array(source, stored[name]).copy())
        except GgufError as exc:
            raise CheckpointError(str(exc)) from exc


def _opened_gguf(file: Path) -> GgufFile:
    try:
        return GgufFile(file)
    except GgufError as exc:
        raise CheckpointError(str(exc)) from exc


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
