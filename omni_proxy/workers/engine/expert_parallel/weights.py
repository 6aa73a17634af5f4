"""Single experts out of a checkpoint, without reading the rest of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from omni_proxy.workers.engine.architectures.registry import ARCHITECTURES
from omni_proxy.workers.engine.checkpoint import CheckpointError
from omni_proxy.workers.engine.expert_parallel.experts import ExpertSlots, Pair
from omni_proxy.workers.engine.hf_config import ModelConfig, read_json


class ExpertFiles:
    """The safetensors files of a folder, opened; tensors go by their canonical names."""

    def __init__(self, folder: Path, stack: ExitStack, model_type: str) -> None:
        index = folder / "model.safetensors.index.json"
        names = set(read_json(index)["weight_map"].values()) if index.is_file() else {"model.safetensors"}
        canonical = ARCHITECTURES[model_type].canonical
        self._where: dict[str, tuple[Any, str]] = {}
        """File, and the tensor's name there."""
        for name in sorted(names):
            try:
                file = stack.enter_context(safe_open(folder / name, framework="pt"))
            except Exception as exc:
                raise CheckpointError(f"{folder / name}: cannot be read: {exc}") from exc
            self._where.update({canonical(at): (file, at) for at in file.keys()})  # noqa: SIM118 - not a dict

    def stored_dtype(self, layer: int, dtype: torch.dtype) -> torch.dtype:
        """What keeps the file's values exactly in the fewest bytes, for computing in `dtype`; the same on all ranks."""
        prefix = f"model.layers.{layer}.mlp.experts."
        name = prefix + "gate_up_proj" if prefix + "gate_up_proj" in self._where else prefix + "0.gate_proj.weight"
        if name not in self._where:
            raise CheckpointError(f"tensor {name} is missing")
        file, at = self._where[name]
        return torch.bfloat16 if file.get_slice(at).get_dtype() == "BF16" else dtype

    def expert(self, layer: int, expert: int, dtype: torch.dtype) -> Pair:
        """Weights of one expert; `layer` counts all layers of the model."""
        prefix = f"model.layers.{layer}.mlp.experts."
        if prefix + "gate_up_proj" in self._where:
            w13, down = (self._slice(prefix + name, expert) for name in ("gate_up_proj", "down_proj"))
        else:
            gate, up, down = (self._tensor(f"{prefix}{expert}.{name}_proj.weight") for name in ("gate", "up", "down"))
            w13 = torch.cat([gate, up])
        scale = f"model.layers.{layer}.mlp.router_scale"
        if scale in self._where:
            down = down * self._tensor(scale).flatten()[expert]
        return w13.to(dtype), down.to(dtype)

    def _tensor(self, name: str) -> torch.Tensor:
        if name not in self._where:
            raise CheckpointError(f"tensor {name} is missing")
        file, at = self._where[name]
        tensor: torch.Tensor = file.get_tensor(at)
        return tensor

    def _slice(self, name: str, index: int) -> torch.Tensor:
        file, at = self._where[name]
        tensor: torch.Tensor = file.get_slice(at)[index]
        return tensor


def load_slots(folder: Path, config: ModelConfig, held: Sequence[Sequence[int]], dtype: torch.dtype) -> ExpertSlots:
    """The slots of one rank: `held[n][slot]` is the expert (or -1) in a slot of the n-th MoE layer."""
    wide, hidden = config.moe_intermediate_size, config.hidden_size
    with ExitStack() as stack:
        files = ExpertFiles(folder, stack, config.model_type)
        stored = files.stored_dtype(min(config.sparse_layers), dtype)
        slots = ExpertSlots(len(held), len(held[0]), wide, hidden, dtype, stored)
        for nth, slot, layer, expert in _wanted(config, held):
            slots.put(nth, slot, files.expert(layer, expert, dtype))
    return slots


def _wanted(config: ModelConfig, held: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int, int]]:
    for nth, layer in enumerate(sorted(config.sparse_layers)):
        for slot, expert in enumerate(held[nth]):
            if expert >= 0:
                yield nth, slot, layer, expert
