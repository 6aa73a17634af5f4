"""Carries a plan out: builds the ragged batch, runs the model, draws the tokens. Owns the KV tensor.

Knows tensors and sequences' state, which it only reads; the planner moves them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor

import omni_kernels as ops
from omni_proxy.workers.engine.checkpoint import Checkpoint
from omni_proxy.workers.engine.draft_checkpoint import HeadCheckpoint
from omni_proxy.workers.engine.draft_head import DraftHead
from omni_proxy.workers.engine.guesser import Guesser
from omni_proxy.workers.engine.model import Batch, DecoderModel, Experts
from omni_proxy.workers.engine.penalties import Said
from omni_proxy.workers.engine.planner import Chunk
from omni_proxy.workers.engine.sampler import Draw, Drawn, chances, sample, score
from omni_proxy.workers.engine.sequence import Sequence as Request
from omni_proxy.workers.engine.sequence import ending_tokens
from omni_proxy.workers.engine.types import Guide


class Runner:
    """Model and KV cache [layers, planes, blocks + 1, block_size, kv_heads, head_dim] of one engine.

    The last layer is that of the draft head, if there is one.
    The extra block takes the keys of rows whose KV is valid already and may be shared: it is written, never read.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        experts: Experts | None = None,
        weight_dtype: torch.dtype | None = None,
        head: HeadCheckpoint | None = None,
        row_bits: int = 0,
    ) -> None:
        self.model = DecoderModel(
            checkpoint, max_model_len, experts=experts, weight_dtype=weight_dtype, row_bits=row_bits
        )
        self._block_size = block_size
        self._layers = checkpoint.config.num_layers
        self._spare_slot = num_blocks * block_size
        self._kv_shape = self.model.kv_shape(num_blocks + 1, block_size)
        self._kv = _zeros(self._kv_shape, self.model.dtype)
        self._eos = checkpoint.config.eos_token_ids
        self._guesser: Guesser | None = None
        if head is not None:
            built = DraftHead(head, checkpoint, self.model.output, max_model_len, weight_dtype)
            self._guesser = Guesser(built, block_size, self._spare_slot)

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], progress: ops.StepProgress | None = None) -> list[tuple[Drawn, ...]]:
        """Compute the chunks (single rows first) and draw for each that samples: a token, and those after right drafts.

        A draft is right as far as it is what is drawn; a row's draw depends on nothing but its seed, place and logits.
        """
        if self._guesser is not None:
            chunks = self._guesser.guess(chunks, self._kv[-1])
        batch, hidden = self._batch(chunks), self._hidden(chunks)
        logits = self._score(chunks, self.model.forward(batch, self._kv[: self._layers], progress, hidden))
        draws = [draw for chunk in chunks if chunk.samples for draw in self._draws(chunk)]
        drawn = iter(sample(logits, draws) if draws else [])
        right = [_right(chunk.draft, [next(drawn) for _ in range(_logit_rows(chunk))]) for chunk in chunks]
        for chunk, tokens in zip(chunks, right, strict=True):
            _guide_on(chunk.seq.request.guide, tokens)
        if self._guesser is not None and hidden is not None:
            self._guesser.follow(chunks, right, hidden, self._kv[-1])
            if progress is not None:
                progress.layer_done(self._layers + 1)
        return right

    @property
    def bursts(self) -> bool:
        """Several steps may go in one call. Not beside a draft head, which reads every step's rows."""
        return self.model.bursts and self._guesser is None

    @torch.inference_mode()
    def burst(
        self, chunks: Sequence[Chunk], steps: int, most: Sequence[int], drafts: ops.Drafts | None = None
    ) -> ops.Burst:
        """Compute single rows, with drafts beside them, up to `steps` times, each time what was drawn before.

        It ends early when a sequence has `most` tokens, or one that ends it.
        """
        draws = [Draw(chunk.seq.request.sampling, chunk.seq.seed, chunk.seq.num_generated) for chunk in chunks]
        how = chances(draws, max(most) if drafts is not None else min(steps, *most))
        ends = [ending_tokens(chunk.seq, self._eos) for chunk in chunks]
        return self.model.burst(self._batch(chunks), self._kv[: self._layers], steps, how, most, drafts, ends)

    def forget(self, request_id: str) -> None:
        """A sequence has ended or lost its blocks."""
        if self._guesser is not None:
            self._guesser.forget(request_id)

    def _hidden(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """Where the model puts what a draft head reads."""
        if self._guesser is None:
            return None
        return torch.empty(sum(chunk.rows for chunk in chunks), self.model.config.hidden_size)

    def _score(self, chunks: Sequence[Chunk], logits: Tensor) -> Tensor:
        """Keep log-probabilities of prompt tokens where wanted; returns the rows that tokens are drawn from."""
        if not any(chunk.seq.wants_scores for chunk in chunks):
            return logits
        kept: list[Tensor] = []
        row = 0
        for chunk in chunks:
            places, seq = scored_rows(chunk), chunk.seq
            after = row + len(places)
            if places:
                tokens = [seq.tokens[p + 1] for p in places]
                seq.scores += score(logits[row:after], tokens, seq.request.prompt_logprobs or 0)
            row = after + _logit_rows(chunk)
            kept.append(logits[after:row])
        return torch.cat(kept)

    @torch.inference_mode()
    def export_bytes(self, blocks: Sequence[int]) -> memoryview:
        """A copy of blocks [n, layers, planes, block_size, heads, dim]. Safe beside `run` while they are held."""
        data = ops.kv_gather(self._kv, torch.tensor(blocks))
        return memoryview(data.flatten().view(torch.uint8).numpy().data)

    @torch.inference_mode()
    def export_layer(self, layer: int, blocks: Sequence[int]) -> memoryview:
        """A copy of one layer's blocks [n, 1, 2, block_size, kv_heads, head_dim]. Safe beside `run`, as above."""
        data = ops.kv_gather(self._kv[layer : layer + 1], torch.tensor(blocks))
        return memoryview(data.flatten().view(torch.uint8).numpy().data)

    @torch.inference_mode()
    def import_layer(self, layer: int, blocks: Sequence[int], data: memoryview) -> None:
        """Put bytes of `export_layer` into blocks of this cache. Safe beside `run` while nobody computes with them."""
        plane = self._kv[layer : layer + 1]
        flat = torch.frombuffer(bytearray(data), dtype=plane.dtype)
        ops.kv_scatter(plane, torch.tensor(blocks), flat.view(len(blocks), 1, *plane.shape[1:2], *plane.shape[3:]))

    def free_cache(self) -> None:
        """Give the cache's memory back to the system; `renew_cache` before the next step."""
        self._kv = torch.empty(0, dtype=self.model.dtype)

    def renew_cache(self) -> None:
        """An empty cache again."""
        self._kv = _zeros(self._kv_shape, self.model.dtype)

    def expert_tokens(self) -> tuple[tuple[int, ...], ...]:
        """Rows routed to [layer][expert] since the start; empty where there are no experts."""
        if not self.model.config.num_experts:
            return ()
        return tuple(tuple(row) for row in self.model.expert_tokens.tolist())

    @torch.inference_mode()
    def import_blocks(self, blocks: Sequence[int], data: bytes | bytearray | memoryview) -> None:
        """Put bytes of `export_bytes` into blocks of this cache."""
        rest = (*self._kv.shape[:2], *self._kv.shape[3:])
        flat = torch.frombuffer(bytearray(data), dtype=self._kv.dtype)
        ops.kv_scatter(self._kv, torch.tensor(blocks), flat.view(len(blocks), *rest))

    def _batch(self, chunks: Sequence[Chunk]) -> Batch:
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logit_rows: list[int] = []
        query_lens: list[int] = []
        kv_lens: list[int] = []
        for chunk in chunks:
            seq, start, rows = chunk.seq, chunk.start, chunk.rows
            places = range(start, start + rows)
            tokens += seq.tokens[start : start + chunk.count]
            tokens += chunk.draft
            positions += places
            slots += self._slots(seq, places)
            if seq.wants_scores:
                first = len(tokens) - rows - start
                logit_rows += [first + place for place in scored_rows(chunk)]
            logit_rows += range(len(tokens) - _logit_rows(chunk), len(tokens))
            query_lens.append(rows)
            kv_lens.append(start + rows)
        attention = ops.attention_batch(
            query_lens,
            kv_lens,
            [chunk.seq.blocks for chunk in chunks],
            self._block_size,
            self.model.dtype,
        )
        count = len(tokens)
        # Making a tensor is dear, above all of a list.
        one = torch.frombuffer(array("q", [*tokens, *positions, *slots, *logit_rows]), dtype=torch.int64)
        ids, at, slot_ids, last = torch.split(one, [count, count, count, len(logit_rows)])
        return Batch(ids, at, slot_ids, attention, last)

    def _slots(self, seq: Request, places: range) -> list[int]:
        blocks, size, known, spare = seq.blocks, self._block_size, seq.kv_len, self._spare_slot
        return [blocks[p // size] * size + p % size if p >= known else spare for p in places]

    def _draws(self, chunk: Chunk) -> list[Draw]:
        first = chunk.seq.num_generated
        return [self._draw(chunk, index) for index in range(first, first + _logit_rows(chunk))]

    def _draw(self, chunk: Chunk, index: int) -> Draw:
        """How token number `index` of the answer is drawn."""
        sampling, guide = chunk.seq.request.sampling, chunk.seq.request.guide
        said = Said(chunk.seq.tokens, chunk.seq.prompt_len)
        if guide is not None:  # it says itself when the answer may end
            return Draw(sampling, chunk.seq.seed, index, allowed=guide.allowed(), said=said)
        forbidden = sampling.stop_token_ids | self._eos if index < sampling.min_tokens else frozenset[int]()
        return Draw(sampling, chunk.seq.seed, index, forbidden, said=said)


def _guide_on(guide: Guide | None, drawn: Sequence[Drawn]) -> None:
    if guide is not None:
        for token in drawn:
            guide.accept(token.token_id)


def _logit_rows(chunk: Chunk) -> int:
    """Rows of a chunk after which a token is drawn: its last, and those of its draft."""
    return 1 + len(chunk.draft) if chunk.samples else 0


def _right(draft: tuple[int, ...], drawn: list[Drawn]) -> tuple[Drawn, ...]:
    """What was drawn as long as the draft before it was right."""
    right = 0
    while right < len(draft) and drawn[right].token_id == draft[right]:
        right += 1
    return tuple(drawn[: right + 1])


def scored_rows(chunk: Chunk) -> range:
    """Places of a chunk whose logits tell log-probabilities that are wanted: those of the prompt tokens after them."""
    seq = chunk.seq
    if not seq.wants_scores:
        return range(0)
    return range(max(chunk.start, len(seq.scores)), min(chunk.start + chunk.count, seq.prompt_len - 1))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose memory the system gives when it is first touched (torch.zeros writes it all at once)."""
    data = np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)
