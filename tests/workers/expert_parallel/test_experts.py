"""What a rank computes for a row depends on the row and the expert alone; weights survive every way to a slot."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import omni_kernels as ops
from omni_proxy.workers.engine.checkpoint import CheckpointError
from omni_proxy.workers.engine.expert_parallel.experts import ExpertSlots, _in_blocks
from omni_proxy.workers.engine.expert_parallel.weights import ExpertFiles, load_slots
from omni_proxy.workers.engine.hf_config import read_config

HIDDEN, WIDE, SLOTS = 64, 48, 3


def pair(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(2 * WIDE, HIDDEN, generator=generator) / 8,
        torch.randn(HIDDEN, WIDE, generator=generator) / 8,
    )


@pytest.fixture
def slots() -> ExpertSlots:
    made = ExpertSlots(1, SLOTS, WIDE, HIDDEN, torch.float32)
    for slot in range(SLOTS):
        made.put(0, slot, pair(slot))
    return made


def test_rows_get_their_experts_result(slots: ExpertSlots) -> None:
    rows = torch.randn(9, HIDDEN)
    counts = np.array([[2, 0, 3], [1, 2, 1]])
    got = slots.compute(0, rows, counts)
    for row, slot in enumerate([0, 0, 2, 2, 2, 0, 1, 1, 2]):
        w13, w2 = pair(slot)
        want = ops.silu_and_mul(rows[row : row + 1] @ w13.t()) @ w2.t()
        assert torch.allclose(got[row : row + 1], want, atol=1e-5)


@pytest.mark.parametrize("plain", [False, True])
def test_the_company_of_a_row_changes_no_bit(slots: ExpertSlots, plain: bool) -> None:
    rows = torch.randn(60, HIDDEN)

    def compute(some: torch.Tensor) -> torch.Tensor:
        if not plain:
            return slots.compute(0, some, np.array([[0, len(some), 0]]))
        stacked = [torch.stack(matrices) for matrices in zip(*map(pair, range(SLOTS)), strict=True)]
        packed = ops.PackedExperts(*(ops.pack(w, torch.float32, backend="torch") for w in stacked))
        return _in_blocks(packed, some, np.ones(len(some), np.int64))

    whole = compute(rows)
    for start, stop in [(0, 1), (5, 7), (3, 20), (17, 58)]:
        assert torch.equal(compute(rows[start:stop]), whole[start:stop])


def test_no_rows_are_no_work(slots: ExpertSlots) -> None:
    assert slots.compute(0, torch.zeros(0, HIDDEN), np.zeros((2, SLOTS), np.int64)).shape == (0, HIDDEN)


def test_packed_weights_travel(slots: ExpertSlots) -> None:
    other = ExpertSlots(1, SLOTS, WIDE, HIDDEN, torch.float32)
    other.put_packed(0, 2, slots.packed(0, 1))
    rows = torch.randn(5, HIDDEN)
    assert torch.equal(other.compute(0, rows, np.array([[0, 0, 5]])), slots.compute(0, rows, np.array([[0, 5, 0]])))


@pytest.mark.slow
@pytest.mark.parametrize("shard_size", ["1GB", "100KB"])
def test_single_and_stacked_tensors_give_the_same_slots(
    write_checkpoint: Callable[..., Path], shard_size: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(shard_size=shard_size)
    config = read_config(folder)
    held = [[3, -1, 0], [5, 1, 7]]
    slots = load_slots(folder, config, held, torch.float32)
    stacked = load_slots(_stacked(folder, tmp_path), config, held, torch.float32)
    for nth in range(2):
        for slot in range(3):
            for ours, theirs in zip(slots.packed(nth, slot), stacked.packed(nth, slot), strict=True):
                assert torch.equal(ours, theirs)


def _stacked(folder: Path, target: Path) -> Path:
    """The same experts as fused tensors [E, 2I, H] and [E, H, I]."""
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    fused = {}
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts."
        names = ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (torch.stack([tensors[f"{prefix}{e}.{name}.weight"] for e in range(8)]) for name in names)
        fused[prefix + "gate_up_proj"] = torch.cat([gate, up], dim=1)
        fused[prefix + "down_proj"] = down
    save_file(fused, target / "model.safetensors")
    return target


@pytest.mark.slow
def test_bfloat16_files_are_kept_as_such(write_checkpoint: Callable[..., Path]) -> None:
    folder = write_checkpoint(torch.bfloat16)
    with ExitStack() as stack:
        assert ExpertFiles(folder, stack, "qwen3_moe").stored_dtype(0, torch.float32) is torch.bfloat16


def test_missing_files_and_tensors_are_named(tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(CheckpointError, match=r"model\.safetensors"):
        ExpertFiles(tmp_path, stack, "qwen3_moe")
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with ExitStack() as stack, pytest.raises(CheckpointError, match="is missing"):
        ExpertFiles(tmp_path, stack, "qwen3_moe").expert(0, 0, torch.float32)
