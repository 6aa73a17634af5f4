"""Stands in for torch_npu: the signatures its documentation gives, computed in torch, with the documented limits.

Every argument that the real operator has is here, keyword-only where it is there, so that a wrong name or order fails.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor]:
    wide = self.float()
    rstd = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * rstd * gamma.float()).to(self.dtype), rstd


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-06) -> tuple[Tensor, Tensor, Tensor]:
    total = x1 + x2
    return *npu_rms_norm(total, gamma, epsilon), total


def npu_rotary_mul(self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    assert self.dim() == r1.dim() == r2.dim() == 4
    assert rotary_mode == "half"
    first, second = self.chunk(2, -1)
    return self * r1 + torch.cat((-second, first), -1) * r2


def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    gate, up = self.chunk(2, dim)
    return F.silu(gate) * up


def npu_moe_gating_top_k_softmax(
    x: Tensor, finished: Tensor | None = None, k: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    weights, ids = x.float().softmax(-1).topk(k, -1)
    return weights, ids.int(), torch.arange(ids.numel(), dtype=torch.int32).view(k, -1).t()


def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    assert group_count == 1 or x.shape[1] == 256
    assert renorm == 0
    scores = x.float().sigmoid() if norm_type else x.float().softmax(-1)
    choice = scores if bias is None else scores + bias
    if group_count > 1:
        grouped = choice.view(x.shape[0], group_count, -1)
        total = grouped.topk(2, -1).values.sum(-1) if group_select_mode else grouped.amax(-1)
        kept = torch.zeros_like(total).scatter_(1, total.topk(k_group, -1).indices, 1).bool()
        choice = grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    ids = choice.topk(k, -1).indices
    weights = scores.gather(-1, ids)
    if norm_type:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return weights * routed_scaling_factor, ids.int(), scores


def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = 0,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert expert_idx.dtype == torch.int32
    assert active_num == expert_idx.numel()
    assert list(active_expert_range) == [0, expert_num]
    assert (drop_pad_mode, expert_tokens_num_type, quant_mode, row_idx_type) == (0, 1, -1, 0)
    assert expert_tokens_num_flag
    assert expert_idx.min() >= 0
    flat = expert_idx.flatten().long()
    order = flat.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    counts = torch.bincount(flat, minlength=expert_num)
    return x[order // expert_idx.shape[1]], place.int(), counts, torch.empty(0)


def npu_grouped_matmul(
    x: list[Tensor],
    weight: list[Tensor],
    *,
    bias: list[Tensor] | None = None,
    scale: list[Tensor] | None = None,
    offset: list[Tensor] | None = None,
    antiquant_scale: list[Tensor] | None = None,
    antiquant_offset: list[Tensor] | None = None,
    per_token_scale: list[Tensor] | None = None,
    group_list: Tensor | None = None,
    activation_input: list[Tensor] | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    act_type: int = 0,
    output_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    assert (split_item, group_type, group_list_type) == (2, 0, 1)
    assert group_list is not None
    assert group_list.dtype == torch.int64
    assert len(x) == len(weight) == 1
    assert x[0].dtype == weight[0].dtype
    parts = x[0].split(group_list.tolist())
    return [torch.cat([part @ w for part, w in zip(parts, weight[0], strict=True)])]


def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int = 0,
) -> Tensor:
    assert drop_pad_mode == 2
    assert scales is not None
    assert scales.dtype == expanded_permuted_rows.dtype
    rows = expanded_permuted_rows[expanded_src_to_dst_row.long()].view(*scales.shape, -1)
    return (rows * scales.unsqueeze(-1)).sum(1)


def npu_fused_infer_attention_score(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pse_shift: Tensor | None = None,
    atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None,
    actual_seq_lengths_kv: list[int] | None = None,
    block_table: Tensor | None = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = 2147483647,
    next_tokens: int = 2147483647,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:
    assert input_layout == "TND"
    assert sparse_mode == 3
    assert atten_mask is not None
    assert atten_mask.shape == (2048, 2048)
    assert actual_seq_lengths is not None
    assert actual_seq_lengths_kv is not None
    assert block_table is not None
    assert block_table.dtype == torch.int32
    out, first = torch.empty_like(query), 0
    for last, keys, table in zip(actual_seq_lengths, actual_seq_lengths_kv, block_table.long(), strict=True):
        rows, dim = last - first, query.shape[2]
        k, v = (part[table].view(-1, num_key_value_heads, dim)[:keys].repeat_interleave(
            num_heads // num_key_value_heads, 1) for part in (key, value))  # fmt: skip
        scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), k.float()) * scale
        hidden = torch.arange(keys) > torch.arange(keys - rows, keys).unsqueeze(1)
        seen = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", seen, v.float()).to(out.dtype)
        first = last
    return out, torch.empty(0)


def npu_scatter_nd_update_(self: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    assert indices.shape == (updates.shape[0], 1)
    self[indices[:, 0]] = updates
    return self
