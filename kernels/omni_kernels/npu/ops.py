"""The ops of `reference` as sequences of torch_npu operators. UNTESTED ON HARDWARE: argument mapping and results are
tested against a stand-in that has torch_npu's signatures and computes in torch.

General forms only (init_routing, grouped_matmul, swiglu, finalize_routing): the fused ones fit DeepSeek-V3's shapes and
little else. Operators are those documented for torch_npu 7.0 with CANN 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from omni_kernels import reference
from omni_kernels.packing import PackedExperts, PackedMatrix
from omni_kernels.ragged import AttentionBatch

HALVES: Final = (torch.float16, torch.bfloat16)
GROUPED_TOP_K_EXPERTS: Final = 256
"""npu_moe_gating_top_k with groups takes this many experts only."""
MASK_SIDE: Final = 2048
"""Sparse mode 3 (causal from the right bottom) wants a square mask of this side."""


class NpuOps:
    """The ops bound to the torch_npu module, which is given so that a stand-in can be."""

    def __init__(self, torch_npu: Any) -> None:
        self._npu = torch_npu

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `reference.rms_norm`; one weight for all rows, else the definition."""
        if weight.dim() != 1:
            return reference.rms_norm(x, weight, eps, residual)
        if residual is None:
            return self._npu.npu_rms_norm(x, weight, epsilon=eps)[0], x
        normed, _, total = self._npu.npu_add_rms_norm(x, residual, weight, epsilon=eps)
        return normed, total

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `reference.rope`. npu_rotary_mul negates the turned half itself, so the table's signs come off."""
        half = sin.shape[-1] // 2
        plain = torch.cat((-sin[:, :half], sin[:, half:]), -1)
        turned: Tensor = self._npu.npu_rotary_mul(x.unsqueeze(0), cos[None, :, None], plain[None, :, None])
        return turned[0]

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See `reference.silu_and_mul`."""
        gated: Tensor = self._npu.npu_swiglu(x, dim=-1)
        return gated

    def moe_route(
        self, logits: Tensor, top_k: int, renormalise: bool, scoring: str = "softmax", bias: Tensor | None = None,
        groups: int = 1, top_groups: int | None = None, per_group: bool = False, scale: float = 1.0,
        group_best: int = 2,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See `reference.moe_route`. MoGE and what the operators do not take go to the definition."""
        experts, kept = logits.shape[1], groups if top_groups is None else top_groups
        grouped = kept < groups
        if per_group or (grouped and experts != GROUPED_TOP_K_EXPERTS) or (scoring == "sigmoid" and not renormalise):
            return reference.moe_route(
                logits, top_k, renormalise, scoring, bias, groups, top_groups, per_group, scale, group_best
            )
        if scoring == "softmax" and bias is None and not grouped:
            weights, ids, _ = self._npu.npu_moe_gating_top_k_softmax(logits, None, k=top_k)
        else:
            weights, ids, _ = self._npu.npu_moe_gating_top_k(
                logits, k=top_k, bias=bias, k_group=kept if grouped else 1, group_count=groups if grouped else 1,
                group_select_mode=group_best - 1, renorm=0, norm_type=int(scoring == "sigmoid"),
                routed_scaling_factor=1.0, eps=1e-20,
            )  # fmt: skip
        weights = weights.float()
        if renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        ids = ids.long()
        return ids, weights * scale, torch.bincount(ids.flatten(), minlength=experts)

    def fused_moe(
        self, x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, counts: Tensor | None = None
    ) -> Tensor:
        """See `reference.fused_moe`; weights [E, 2I, H] and [E, H, I] are read transposed, not copied."""
        if x.dtype not in HALVES or not x.shape[0]:
            return self._defined(x, w13, w2, ids, weights, counts)
        experts, slots = w13.shape[0], ids.numel()
        # An id of -1 becomes a choice of expert 0 with weight 0: the operators know no empty choice.
        taken = ids >= 0
        rows, place, tokens, _ = self._npu.npu_moe_init_routing_v2(
            x, ids.clamp(min=0).int(), active_num=slots, expert_num=experts, drop_pad_mode=0,
            expert_tokens_num_type=1, expert_tokens_num_flag=True, quant_mode=-1, active_expert_range=[0, experts],
            row_idx_type=0,
        )  # fmt: skip
        groups = {"group_list": tokens, "split_item": 2, "group_type": 0, "group_list_type": 1}
        hidden = self._npu.npu_grouped_matmul([rows], [w13.transpose(1, 2)], **groups)[0]
        hidden = self._npu.npu_swiglu(hidden, dim=-1)
        y = self._npu.npu_grouped_matmul([hidden], [w2.transpose(1, 2)], **groups)[0]
        out: Tensor = self._npu.npu_moe_finalize_routing(
            y, skip1=None, skip2=None, bias=None, scales=(weights * taken).to(x.dtype),
            expanded_src_to_dst_row=place, export_for_source_row=None, drop_pad_mode=2,
        )  # fmt: skip
        return out

    def _defined(
        self, x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, counts: Tensor | None
    ) -> Tensor:
        if counts is None:
            counts = torch.bincount(ids[ids >= 0].flatten(), minlength=w13.shape[0])
        return reference.fused_moe(x, w13, w2, ids, weights, counts)

    def pack(self, w: Tensor, dtype: torch.dtype | None = None, gated: bool = False) -> PackedMatrix:
        """Rows as they are; int8 is the definition's."""
        plain = reference.pack(w, dtype, gated)
        return plain if plain.scale is not None else replace(plain, backend="npu")

    def linear(self, x: Tensor, w: PackedMatrix) -> Tensor:
        """See `reference.linear`."""
        return reference.linear(x, w)

    def packed_moe(self, x: Tensor, experts: PackedExperts, ids: Tensor, weights: Tensor) -> Tensor:
        """See `reference.packed_moe`."""
        dtype = experts.w13.data.dtype
        out = self.fused_moe(x.to(dtype), experts.w13.data, experts.w2.data, ids, weights).to(x.dtype)
        if experts.shared13 is not None and experts.shared2 is not None:
            out += self.linear(self.silu_and_mul(self.linear(x, experts.shared13)), experts.shared2)
        return out

    def paged_attention(self, q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
        """See `reference.paged_attention`: one call for decode and chunks, rows in TND layout, causal to the right."""
        if q.dtype not in HALVES:
            return reference.paged_attention(q, kv, batch, scale)
        blocks, size, heads, dim = kv.shape[1:]
        keys, values = (part.view(blocks, size, heads * dim) for part in kv)
        tables = [torch.tensor(table, dtype=torch.int32) for table in batch.block_tables]
        padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        hidden = torch.ones((MASK_SIDE, MASK_SIDE), dtype=torch.bool, device=q.device).triu_(1)
        seen, _ = self._npu.npu_fused_infer_attention_score(
            q, keys, values, atten_mask=hidden, actual_seq_lengths=list(accumulate(batch.query_lens)),
            actual_seq_lengths_kv=list(batch.kv_lens), block_table=padded.to(q.device), num_heads=q.shape[1],
            num_key_value_heads=heads, scale=scale, input_layout="TND", sparse_mode=3, block_size=size,
        )  # fmt: skip
        result: Tensor = seen
        return result

    def kv_write(self, kv: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """See `reference.kv_write`."""
        flat = kv.flatten(1, 2)
        for cache, new in zip(flat, (k, v), strict=True):
            self._npu.npu_scatter_nd_update_(cache, slots.view(-1, 1), new.contiguous())

    def table(self) -> Mapping[str, Callable[..., Any]]:
        """The ops by name."""
        names = (
            "rms_norm", "rope", "silu_and_mul", "moe_route", "fused_moe", "pack", "linear", "packed_moe",
            "paged_attention", "kv_write",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}
