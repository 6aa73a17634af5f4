"""The one-call step against the model op by op, on the model that ships; and the engine's runner without a library."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import omni_kernels as ops
import omni_proxy.workers
from omni_kernels import registry
from omni_proxy.workers.engine.checkpoint import Checkpoint, load_checkpoint
from omni_proxy.workers.engine.model import Batch, DecoderModel

DEMO_MODEL = Path(omni_proxy.workers.__file__).parent / "demo_model"
SIZE, BLOCKS = 16, 12


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load_checkpoint(DEMO_MODEL)


def batch(model: DecoderModel, first: int, last: int) -> Batch:
    """Rows first..last of one sequence in blocks from the cache's end on."""
    table = list(range(BLOCKS - 1, -1, -1))
    places = range(first, last)
    return Batch(
        torch.tensor([(7 * p + 3) % model.config.vocab_size for p in places]),
        torch.tensor(places),
        torch.tensor([table[p // SIZE] * SIZE + p % SIZE for p in places]),
        ops.attention_batch([last - first], [last], [table], SIZE),
        torch.arange(last - first),
    )


def cache(model: DecoderModel) -> torch.Tensor:
    return torch.zeros(model.kv_shape(BLOCKS, SIZE))


@torch.inference_mode()
def run(model: DecoderModel) -> torch.Tensor:
    kv = cache(model)
    return torch.cat([model.forward(batch(model, *chunk), kv) for chunk in ((0, 70), (70, 71), (71, 100))])


@pytest.mark.slow
def test_one_call_equals_op_by_op(checkpoint: Checkpoint) -> None:
    fused, single = DecoderModel(checkpoint, 256), DecoderModel(checkpoint, 256, fused=False)
    got, want = run(fused), run(single)
    assert (got - want).abs().max() < 1e-3
    assert got.argmax(-1).equal(want.argmax(-1))
    assert fused.expert_tokens.equal(single.expert_tokens)


@pytest.mark.slow
def test_without_a_library_the_model_is_computed_op_by_op(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "cpu_library", lambda: None)
    model = DecoderModel(checkpoint, 256)
    with torch.inference_mode():
        assert model.forward(batch(model, 0, 3), cache(model)).isfinite().all()


@pytest.mark.slow
def test_a_chunk_and_single_rows_yield_the_same_bits(checkpoint: Checkpoint) -> None:
    if registry.cpu_library() is None:
        pytest.skip("no compiled kernels here")
    model = DecoderModel(checkpoint, 256)
    with torch.inference_mode():
        whole = model.forward(batch(model, 0, 40), cache(model))
        kv = cache(model)
        rows = [model.forward(batch(model, p, p + 1), kv) for p in range(40)]
    assert torch.cat(rows).equal(whole)
