"""`Decoder` on the compiled library: weights packed at construction, one foreign call a step."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from omni_kernels.cpu.bursts import DraftState, EndTokens, Told, draws_of
from omni_kernels.cpu.native import Cache, Experts, Layer, Matrix, Model, Routing, StepArgs, check
from omni_kernels.cpu.ops import DTYPES, CpuOps, matrix, ragged
from omni_kernels.decoder import Chances, DecoderLayer, DecoderWeights
from omni_kernels.drafts import Burst, Drafts
from omni_kernels.progress import StepProgress
from omni_kernels.ragged import AttentionBatch

_NOTHING = torch.empty(0, dtype=torch.int64)


class CpuDecoder:
    """A decoder's packed weights and the structures that point to them."""

    def __init__(
        self, library: ctypes.CDLL, weights: DecoderWeights, dtype: torch.dtype | None = None, row_bits: int = 0
    ) -> None:
        self._library = library
        self._ops = CpuOps(library)
        self._dtype = dtype
        # Rounded to 16 bits rows lose nothing beside weights of 8, and VNNI multiplies such numbers fastest.
        self._row_bits = row_bits or (16 if dtype == torch.int8 and library.omni_vnni() else 0)
        self._kept: list[Tensor] = []  # memory that the structures point to
        self._layers = (Layer * len(weights.layers))(*map(self._layer, weights.layers))
        vocab, hidden = weights.embedding.shape
        self._experts = max((layer.gate.shape[0] for layer in weights.layers if layer.gate is not None), default=0)
        self._model = Model(
            layers=len(weights.layers),
            hidden=hidden,
            heads=weights.heads,
            kv_heads=weights.kv_heads,
            dim=weights.cos.shape[1],
            vocab=vocab,
            table_len=weights.cos.shape[0],
            eps=weights.eps,
            clip=weights.clip or 0.0,
            norm_rows=weights.norm_rows,
            embedding_dtype=DTYPES[weights.embedding.dtype],
            embedding=self._keep(weights.embedding),
            cos=self._floats(weights.cos),
            sin=self._floats(weights.sin),
            norm=self._floats(weights.norm),
            head=self._matrix(weights.head),
            layer=self._layers,
        )

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        batch: AttentionBatch,
        logit_rows: Tensor,
        kv: Tensor,
        expert_tokens: Tensor | None = None,
        progress: StepProgress | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """See `Decoder.step`."""
        if hidden is not None:
            self._check_hidden(hidden, batch.rows)
        logits = torch.empty((logit_rows.shape[0], self._model.vocab))
        args = self._args(tokens, positions, slots, batch, logit_rows, kv, expert_tokens, logits)
        if hidden is not None:
            args.hidden = hidden.data_ptr()
        if progress is not None:
            args.progress, args.progress_fd = progress.address, progress.write_fd
        check(self._library.omni_step(self._model, args, torch.get_num_threads()), "step")
        return logits

    def burst(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        batch: AttentionBatch,
        kv: Tensor,
        steps: int,
        chances: Chances | None = None,
        expert_tokens: Tensor | None = None,
        most: Sequence[int] | None = None,
        drafts: Drafts | None = None,
        ends: Sequence[Collection[int]] | None = None,
    ) -> Burst:
        """See `Decoder.burst`."""
        rows = batch.rows
        if steps < 1 or batch.num_single != len(batch.query_lens):
            raise ValueError(f"burst: takes single rows and at least one step, got {batch.query_lens} and {steps}")
        most = [steps] * rows if most is None else most
        if len(most) != rows or min(most, default=1) < 1:
            raise ValueError(f"burst: most must be {rows} numbers of tokens, got {list(most)}")
        if ends is not None and len(ends) != rows:
            raise ValueError(f"burst: ends must be of {rows} sequences, got {len(ends)}")
        width = max(most, default=1) if drafts is not None else min((steps, *most))
        args = self._args(tokens, positions, slots, batch, _NOTHING, kv, expert_tokens, _NOTHING)
        draws = None if chances is None else draws_of(chances, width, rows)
        state = None if drafts is None else DraftState(drafts, most)
        last = None if ends is None or not any(ends) else EndTokens(ends)
        told = Told(rows, steps, width)
        status = self._library.omni_burst(
            self._model,
            args,
            draws,
            None if state is None else state.native,
            None if last is None else last.native,
            steps,
            told.native,
            torch.get_num_threads(),
        )
        check(status, "burst")
        if state is not None:
            state.take_back()
        return told.read()

    def _args(
        self,
        tokens: Tensor,
        positions: Tensor,
        slots: Tensor,
        batch: AttentionBatch,
        logit_rows: Tensor,
        kv: Tensor,
        expert_tokens: Tensor | None,
        logits: Tensor,
    ) -> StepArgs:
        """The C structure of a step without hidden states and progress. All that it points to must outlive it."""
        rows = batch.rows
        named = {"tokens": tokens, "positions": positions, "slots": slots, "logit_rows": logit_rows}
        for name, value in named.items():
            good = value.dtype == torch.int64 and value.is_contiguous() and value.is_cpu
            if not good or value.dim() != 1 or (name != "logit_rows" and value.shape[0] != rows):
                raise ValueError(f"step: {name} must be [{rows}] int64, got {value.dtype} {tuple(value.shape)}")
        self._check_cache(kv, batch)
        if expert_tokens is not None:
            self._check_counts(expert_tokens)
        _, _, blocks, size, heads, dim = kv.shape
        plane = blocks * size * heads * dim * kv.element_size()
        keys = kv.data_ptr()
        return StepArgs(
            rows,
            logit_rows.shape[0],
            tokens.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            logit_rows.data_ptr(),
            ragged(batch),
            Cache(keys, keys + plane, blocks, size, heads, dim, dim, heads * dim, dim, DTYPES[kv.dtype]),
            2 * plane,
            None if expert_tokens is None else expert_tokens.data_ptr(),
            logits.data_ptr(),
            None,
            None,
            -1,
        )

    def _check_cache(self, kv: Tensor, batch: AttentionBatch) -> None:
        model = self._model
        want = (model.layers, 2, batch.block_size, model.kv_heads, model.dim)
        got = (*kv.shape[:2], *kv.shape[3:])
        usable = kv.dtype in (torch.float32, torch.bfloat16) and kv.is_contiguous() and kv.device.type == "cpu"
        if got != want or not usable:
            raise ValueError(
                f"step: kv must be contiguous [{model.layers}, 2, blocks, {batch.block_size}, {model.kv_heads},"
                f" {model.dim}] float32 or bfloat16, got {kv.dtype} {tuple(kv.shape)}"
            )

    def _check_counts(self, counts: Tensor) -> None:
        want = (self._model.layers, self._experts)
        if counts.shape != want or counts.dtype != torch.int64 or not counts.is_contiguous():
            raise ValueError(f"step: expert_tokens must be {want} int64, got {counts.dtype} {tuple(counts.shape)}")

    def _check_hidden(self, hidden: Tensor, rows: int) -> None:
        want = (rows, self._model.hidden)
        if hidden.shape != want or hidden.dtype != torch.float32 or not hidden.is_contiguous():
            raise ValueError(f"step: hidden must be {want} float32, got {hidden.dtype} {tuple(hidden.shape)}")

    def _layer(self, layer: DecoderLayer) -> Layer:
        gated = layer.gate is not None
        w13, w2 = (layer.w13, layer.w2) if gated else (layer.w13.unsqueeze(0), layer.w2.unsqueeze(0))
        # A router decides; what int8 saves there is nothing.
        gate = Matrix() if layer.gate is None else self._matrix(layer.gate, exact=True)
        count = w13.shape[0]
        return Layer(
            self._floats(layer.attention_norm),
            self._maybe(layer.qk_norm),
            self._maybe(layer.qkv_bias),
            self._maybe(layer.out_bias),
            self._floats(layer.mlp_norm),
            self._matrix(layer.qkv),
            self._matrix(layer.out),
            gate,
            Experts(self._matrix(w13, gated=True), self._matrix(w2), *self._shared(layer), count),
            self._routing(layer, count),
        )

    def _shared(self, layer: DecoderLayer) -> tuple[Matrix, Matrix]:
        if layer.shared13 is None or layer.shared2 is None:
            return Matrix(), Matrix()
        return self._matrix(layer.shared13, gated=True), self._matrix(layer.shared2)

    def _routing(self, layer: DecoderLayer, count: int) -> Routing:
        how = layer.routing
        return Routing(
            experts=count,
            top_k=layer.top_k,
            groups=how.groups,
            top_groups=how.top_groups or how.groups,
            sigmoid=how.scoring == "sigmoid",
            renormalise=layer.renormalise,
            per_group=how.per_group,
            scale=how.scale,
            bias=self._maybe(how.bias),
            group_best=how.group_best,
        )

    def _matrix(self, w: Tensor, *, gated: bool = False, exact: bool = False) -> Matrix:
        if exact and self._dtype == torch.int8:
            packed = self._ops.pack(w, None, gated)
        else:
            packed = self._ops.pack(w, self._dtype, gated, self._row_bits)
        self._kept.append(packed.data)
        if packed.scale is not None:
            self._kept.append(packed.scale)
        return matrix(packed)

    def _maybe(self, x: Tensor | None) -> int | None:
        return None if x is None else self._floats(x)

    def _floats(self, x: Tensor) -> int:
        return self._keep(x.detach().float())

    def _keep(self, x: Tensor) -> int:
        x = x.detach().contiguous()
        self._kept.append(x)
        return x.data_ptr()
