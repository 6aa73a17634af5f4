"""Logits equal transformers' for the same folder, however the tokens are cut into chunks and batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import omni_kernels as ops
import omni_proxy.workers
from omni_proxy.workers.engine.checkpoint import load_checkpoint
from omni_proxy.workers.engine.model import Batch, DecoderModel
from tests.workers.engine.helpers import prompt

SIZE = 4
LIMIT = 1e-3
DEMO_MODEL = Path(omni_proxy.workers.__file__).parent / "demo_model"


class Paged:
    """A model with a cache in which each sequence has scattered blocks."""

    def __init__(self, folder: Path, sequences: int, length: int, **changes: Any) -> None:
        self.model = DecoderModel(load_checkpoint(folder, **changes), 256)
        need = -(-length // SIZE)
        order = torch.randperm(sequences * need, generator=torch.Generator().manual_seed(0)).tolist()
        self.tables = [order[i * need : (i + 1) * need] for i in range(sequences)]
        self.kv = torch.zeros(self.model.kv_shape(len(order), SIZE), dtype=self.model.dtype)

    @torch.inference_mode()
    def run(self, chunks: Sequence[tuple[int, int, Sequence[int]]]) -> list[torch.Tensor]:
        """Chunks (sequence, start, tokens), single tokens first -> logits of each chunk's rows."""
        tokens = [t for _, _, part in chunks for t in part]
        places = [(s, start + i) for s, start, part in chunks for i in range(len(part))]
        slots = [self.tables[s][p // SIZE] * SIZE + p % SIZE for s, p in places]
        attention = ops.attention_batch(
            [len(part) for _, _, part in chunks],
            [start + len(part) for _, start, part in chunks],
            [self.tables[s] for s, _, _ in chunks],
            SIZE,
            self.model.dtype,
        )
        batch = Batch(
            torch.tensor(tokens),
            torch.tensor([p for _, p in places]),
            torch.tensor(slots),
            attention,
            torch.arange(len(tokens)),
        )
        return list(torch.split(self.model.forward(batch, self.kv), [len(part) for _, _, part in chunks]))


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


@pytest.mark.parametrize("length", [1, 2, 4, 17, 33])
def test_logits_of_a_prompt(checkpoint: Path, reference_of: Callable[..., Any], length: int) -> None:
    tokens = prompt(length)
    (got,) = Paged(checkpoint, 1, length).run([(0, 0, tokens)])
    assert difference(got, reference_of(checkpoint).logits(tokens)) < LIMIT


def test_logits_in_chunks_and_token_by_token(checkpoint: Path, reference_of: Callable[..., Any]) -> None:
    tokens = prompt(30)
    want = reference_of(checkpoint).logits(tokens)
    for cuts in ((0, 7, 8, 21, 30), tuple(range(31)), (0, 29, 30)):
        paged = Paged(checkpoint, 1, 30)
        for start, stop in pairwise(cuts):
            (got,) = paged.run([(0, start, tokens[start:stop])])
            assert difference(got, want[start:stop]) < LIMIT


def test_logits_of_a_ragged_batch(checkpoint: Path, reference_of: Callable[..., Any]) -> None:
    """Two decodes, a chunk in the middle of a prompt and a whole prompt in one step."""
    prompts = [prompt(n, seed=n) for n in (9, 22, 15, 6)]
    want = [reference_of(checkpoint).logits(tokens) for tokens in prompts]
    paged = Paged(checkpoint, 4, 24)
    paged.run([(0, 0, prompts[0][:8]), (1, 0, prompts[1][:21]), (2, 0, prompts[2][:5])])
    got = paged.run([(0, 8, prompts[0][8:]), (1, 21, prompts[1][21:]), (2, 5, prompts[2][5:]), (3, 0, prompts[3])])
    for logits, tail in zip(got, (want[0][8:], want[1][21:], want[2][5:], want[3]), strict=True):
        assert difference(logits, tail) < LIMIT


def test_sparse_step_leaves_dense_layers_between(
    write_checkpoint: Callable[..., Path], reference_of: Callable[..., Any]
) -> None:
    folder = write_checkpoint("tied", decoder_sparse_step=2)
    tokens = prompt(12)
    (got,) = Paged(folder, 1, 12).run([(0, 0, tokens)])
    assert difference(got, reference_of(folder).logits(tokens)) < LIMIT


def test_experts_are_counted(tied: Path) -> None:
    paged = Paged(tied, 1, 12)
    paged.run([(0, 0, prompt(12))])
    assert paged.model.expert_tokens.sum(1).tolist() == [24, 24]


def test_bfloat16_is_close(tied: Path, reference_of: Callable[..., Any]) -> None:
    tokens = prompt(12)
    (got,) = Paged(tied, 1, 12, dtype=torch.bfloat16).run([(0, 0, tokens)])
    want = reference_of(tied).logits(tokens)
    assert (got.float() - want).norm() / want.norm() < 0.1


@pytest.mark.skipif(not (DEMO_MODEL / "model.safetensors").exists(), reason="no demo model yet")
def test_logits_of_the_demo_model(reference_of: Callable[..., Any]) -> None:
    vocab = load_checkpoint(DEMO_MODEL).config.vocab_size
    tokens = prompt(40, vocab=vocab)
    (got,) = Paged(DEMO_MODEL, 1, 40).run([(0, 0, tokens)])
    assert difference(got, reference_of(DEMO_MODEL).logits(tokens)) < LIMIT
