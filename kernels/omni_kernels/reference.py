"""Plain torch operations that define what every backend must compute.

Each function is the meaning of one op of `api.py`: a faster backend is right when it agrees with the function here.
Nothing checks its arguments: `api.py` does, once, for all backends. Knows nothing of models, requests or schedules.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_kernels.packing import (
    FP8_GROUP,
    PackedExperts,
    PackedMatrix,
    plain,
    quantise_rows,
    quantise_rows_fp8,
)
from omni_kernels.ragged import AttentionBatch
from omni_kernels.rope_scaling import RopeScaling, frequencies


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Normalise rows of `x` [..., H] by their root mean square, in float32, and scale by `weight`.

    With `residual` the input is `x + residual`. Returns the normalised rows and the (summed) input,
    which is the next residual. `weight` may be [H] or anything that broadcasts against `x`.
    """
    total = x if residual is None else x + residual
    wide = total.float()
    inverse = wide.square().sum(-1, keepdim=True).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return (wide * inverse).to(x.dtype).mul_(weight), total


def rope_table(
    head_dim: int,
    length: int,
    theta: float,
    dtype: torch.dtype = torch.float32,
    scaling: RopeScaling | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim] of the rotary embedding (Su et al. 2021), halves repeated.

    The sines of the first half are negated, so that applying them needs a roll and no sign change.
    """
    turns, factor = frequencies(head_dim, theta, length, scaling)
    angle = torch.outer(torch.arange(length).float(), turns)
    cos, sin = angle.cos() * factor, angle.sin() * factor
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `x` [T, heads, D] by rows of `rope_table`, `cos` and `sin` [T, D] (half-split layout)."""
    turned = x.roll(x.shape[-1] // 2, -1).mul_(sin.unsqueeze(1))
    return turned.addcmul_(x, cos.unsqueeze(1))


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up for `x` [..., 2I] with the gate columns first; returns [..., I]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def moe_route(
    logits: Tensor,
    top_k: int,
    renormalise: bool,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int | None = None,
    per_group: bool = False,
    scale: float = 1.0,
    group_best: int = 2,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose `top_k` experts of each row of `logits` [T, E]; scores are their softmax or sigmoid in float32.

    `bias` [E] is added to the scores for the choice only (DeepSeek-V3). Experts in `groups` of equal size: either
    `top_k / groups` of each (`per_group`, MoGE of Pangu Pro), or all from the `top_groups` groups whose `group_best`
    best choices sum highest (DeepSeek-V3: 2, DeepSeek-V2: 1). The weights are the scores, summing to 1 if
    `renormalise`, times `scale`.
    Returns ids [T, K] int64 (best first; by group if `per_group`), weights [T, K] float32 and how many of the
    T*K choices fell on each expert, [E] int64. NaN counts as the largest score.
    """
    rows, experts = logits.shape
    wide = logits.float()
    scores = wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()
    choice = scores if bias is None else scores + bias
    if per_group:
        offset = torch.arange(0, experts, experts // groups, device=logits.device).unsqueeze(1)
        best = choice.view(rows, groups, -1).topk(top_k // groups, -1).indices
        ids = (best + offset).view(rows, top_k)
    else:
        if top_groups is not None and top_groups < groups:
            choice = _keep_groups(choice, groups, top_groups, group_best)
        ids = choice.topk(top_k, -1).indices
    weights = scores.gather(-1, ids)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale, torch.bincount(ids.flatten(), minlength=experts)


def _keep_groups(choice: Tensor, groups: int, top_groups: int, group_best: int) -> Tensor:
    """-inf outside the best groups of each row."""
    grouped = choice.view(choice.shape[0], groups, -1)
    total = grouped.topk(min(group_best, grouped.shape[2]), -1).values.sum(-1)
    kept = torch.zeros_like(total, dtype=torch.bool).scatter_(1, total.topk(top_groups, -1).indices, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).view_as(choice)


def fused_moe(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Sum over each row's chosen experts of weight * expert(row).

    `x` [T, H]; `w13` [E, 2I, H] gate rows first; `w2` [E, H, I]; `ids`, `weights` [T, K] and
    `counts` [E] as `moe_route` returns them; an id of -1 takes no part. Rows are sorted by expert, so that each
    expert that is used costs two matrix products whatever the number of its rows. Returns [T, H].
    """
    if x.shape[0] == 1:
        return _moe_one_row(x, w13, w2, ids, weights)
    order = ids.flatten().argsort(stable=True)
    rows = x.index_select(0, order // ids.shape[1])
    partial = torch.zeros_like(rows)
    start = ids.numel() - int(counts.sum())  # the -1 come first
    for expert, count in enumerate(counts.tolist()):
        if count:
            stop = start + count
            hidden = silu_and_mul(torch.mm(rows[start:stop], w13[expert].t()))
            torch.mm(hidden, w2[expert].t(), out=partial[start:stop])
            start = stop
    scaled = partial.mul_(weights.flatten().index_select(0, order).to(x.dtype).unsqueeze(1))
    slots = torch.empty_like(scaled).index_copy_(0, order, scaled)
    return slots.view(*ids.shape, x.shape[1]).sum(1)


def _moe_one_row(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """`fused_moe` of a single row: nothing to sort."""
    out = torch.zeros_like(x)
    for expert, weight in zip(ids[0].tolist(), weights[0].tolist(), strict=True):
        if expert < 0:
            continue
        hidden = silu_and_mul(torch.mm(x, w13[expert].t()))
        out.addmm_(hidden, w2[expert].t(), alpha=weight)
    return out


def dequantise_fp8(w: Tensor, scale: Tensor, block: tuple[int, int] = (FP8_GROUP, FP8_GROUP)) -> Tensor:
    """float32 weights of float8 ones `w` [..., n, k], each times the factor in `scale` of its block of n and of k.

    `scale` [..., ceil(n / block[0]), ceil(k / block[1])]: the last blocks may be cut off.
    """
    n, k = w.shape[-2:]
    rows = scale.float().repeat_interleave(block[0], -2)[..., :n, :]
    return w.float().mul_(rows.repeat_interleave(block[1], -1)[..., :k])


def fused_moe_fp8(
    x: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor, ids: Tensor, weights: Tensor
) -> Tensor:
    """`fused_moe` over float8 weights (e4m3) with scales for blocks of 128 x 128, rows quantised for every 128 of k.

    `w13` [E, 2I, H] with `w13_scale` [E, 2I/128, H/128], `w2` [E, H, I] with `w2_scale` [E, H/128, I/128], as
    DeepSeek-V3's checkpoints hold them (`weight_scale_inv`). Products are summed in float32; the rows between the two
    products take the dtype of `x` and are quantised again. Returns [T, H].
    """
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in sorted(set(ids.flatten().tolist()) - {-1}):
        row, slot = (ids == expert).nonzero(as_tuple=True)
        up = dequantise_fp8(w13[expert], w13_scale[expert])
        hidden = silu_and_mul(_rounded_fp8(x[row]) @ up.t()).to(x.dtype)
        y = _rounded_fp8(hidden) @ dequantise_fp8(w2[expert], w2_scale[expert]).t()
        out.index_add_(0, row, y * weights[row, slot].float().unsqueeze(1))
    return out.to(x.dtype)


def _rounded_fp8(x: Tensor) -> Tensor:
    values, scale = quantise_rows_fp8(x)
    return values.float() * scale.repeat_interleave(FP8_GROUP, -1)


def paged_attention(q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """Causal attention of ragged queries over paged keys and values.

    `q` [T, Hq, D] holds the sequences' rows one after the other; `kv` [2, blocks, block_size,
    Hkv, D] is one layer of the cache, in which the keys of the new rows are written already.
    Query head h reads key head h // (Hq // Hkv). Returns [T, Hq, D].
    """
    parts: list[Tensor] = []
    single = batch.num_single
    if single:
        parts.append(_attend_single(q[:single], kv, batch, scale))
    row = single
    for i, (table, mask) in enumerate(zip(batch.chunk_tables, batch.chunk_masks, strict=True), single):
        rows = q[row : row + batch.query_lens[i]]
        row += batch.query_lens[i]
        keys = kv.index_select(1, table).flatten(1, 2)[:, : batch.kv_lens[i]]
        parts.append(_attend_chunk(rows, keys, mask, scale))
    if not parts:
        return torch.empty_like(q)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_single(q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """One query row a sequence; the query heads of one key head take the place of query positions."""
    num, heads, dim = q.shape
    pages = kv.index_select(1, batch.single_table).view(2, num, -1, *kv.shape[3:])
    keys, values = pages[:, :, : batch.single_kv_len].transpose(2, 3)
    grouped = q.reshape(num, kv.shape[3], -1, dim)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=batch.single_mask, scale=scale)
    return out.reshape(num, heads, dim)


def _attend_chunk(q: Tensor, keys: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`q` [n, Hq, D] against `keys` [2, m, Hkv, D]."""
    k, v = keys.transpose(1, 2).unsqueeze(1)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def pack(w: Tensor, dtype: torch.dtype | None = None, gated: bool = False, row_bits: int = 0) -> PackedMatrix:
    """Keep matrices `w` [n, k] or [count, n, k] as rows, in `dtype` (see `packing.stored_dtype`).

    With `row_bits` 8 or 16 and `dtype` int8, `linear` and `packed_moe` multiply whole numbers: see `integer_product`.
    """
    stack = w if w.dim() == 3 else w.unsqueeze(0)
    data, scale = plain(stack, dtype)
    count, n, k = stack.shape
    return PackedMatrix("torch", data, scale, count, n, k, data.dtype, gated, row_bits)


def _unpacked(w: PackedMatrix, index: int, dtype: torch.dtype) -> Tensor:
    rows = w.data[index]
    return rows.to(dtype) if w.scale is None else (rows.float() * w.scale[index].unsqueeze(1)).to(dtype)


def integer_product(x: Tensor, w: Tensor, w_scale: Tensor, bits: int) -> Tensor:
    """Rows `x` [T, k] made whole numbers, times int8 `w` [n, k]; sums are exact. Returns float32 [T, n].

    Eight bits: sum * scale of the row * scale of the output, in this order, each rounded to float32. Sixteen bits are
    256 * high + low: the high bytes' sum and the low bytes' sum become float32 and are put together before the scales.
    """
    whole, scale = quantise_rows(x, bits)
    wide, weights = whole.double(), w.double().t()  # exact: sums stay below 2^53
    if bits == 8:
        total = (wide @ weights).float()
    else:
        low = (wide + 128).remainder(256) - 128
        total = (((wide - low) / 256) @ weights).float() * 256 + (low @ weights).float()
    return total * scale * w_scale


def _product(x: Tensor, w: PackedMatrix, index: int) -> Tensor:
    """Rows times one matrix: in the rows' dtype, or float32 where whole numbers are multiplied."""
    if w.row_bits and w.scale is not None:
        return integer_product(x, w.data[index], w.scale[index], w.row_bits)
    return F.linear(x, _unpacked(w, index, x.dtype))


def linear(x: Tensor, w: PackedMatrix) -> Tensor:
    """`x` [T, k] times the transposed matrix; returns [T, n]."""
    return _product(x, w, 0).to(x.dtype)


def packed_moe(x: Tensor, experts: PackedExperts, ids: Tensor, weights: Tensor) -> Tensor:
    """`fused_moe` over packed weights, plus the shared expert's MLP of every row.

    Where whole numbers are multiplied all between the two roundings of rows, and the sum, is float32.
    """
    rows = x.float() if experts.w13.row_bits else x
    out = torch.zeros_like(rows)
    for expert in sorted(set(ids.flatten().tolist()) - {-1}):
        row, slot = (ids == expert).nonzero(as_tuple=True)
        hidden = silu_and_mul(_product(rows[row], experts.w13, expert))
        y = _product(hidden, experts.w2, expert)
        out.index_add_(0, row, y * weights[row, slot].to(rows.dtype).unsqueeze(1))
    if experts.shared13 is not None and experts.shared2 is not None:
        out += linear(silu_and_mul(linear(rows, experts.shared13)), experts.shared2)
    return out.to(x.dtype)


def mla_attention(q: Tensor, cache: Tensor, batch: AttentionBatch, scale: float, latent: int) -> Tensor:
    """Causal attention in the latent space of DeepSeek's MLA, its projections absorbed into query and output.

    `q` [T, heads, C] and `cache` [blocks, block_size, C]: one key for all heads, whose first `latent` columns are
    the value as well (the rest is the rotated part). Returns [T, heads, latent].
    """
    wide = cache.unsqueeze(2)
    return paged_attention(q, torch.stack((wide, wide)), batch, scale)[..., :latent].contiguous()


def mla_write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Put latent rows [T, C] into one layer `cache` [blocks, block_size, C] at `slots` [T]."""
    cache.flatten(0, 1).index_copy_(0, slots, rows)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token id for each row of `logits` [n, V]; returns [n] int64.

    Temperature 0 takes the largest. Else the distribution is cut to the `top_k` largest (0: all), then to the fewest
    whose share reaches `top_p` (the first always stays), and walked in the order of token ids to `uniform` [n] in
    [0, 1) of its mass. Computed in float64.
    """
    greedy = logits.argmax(-1)
    hot = temperature > 0
    if not hot.any():
        return greedy
    wide = logits.double() / torch.where(hot, temperature.double(), 1.0).unsqueeze(1)
    probs = wide.softmax(-1)
    vocab = probs.shape[1]
    largest, order = torch.sort(probs, stable=True, dim=-1, descending=True)
    wanted = torch.where(top_k > 0, top_k, vocab).unsqueeze(1)
    largest = largest.masked_fill(torch.arange(vocab, device=logits.device) >= wanted, 0.0)
    before = largest.cumsum(-1) - largest
    enough = (before >= top_p.double().unsqueeze(1) * largest.sum(-1, keepdim=True)) & (top_p < 1).unsqueeze(1)
    enough[:, 0] = False
    cut = torch.empty_like(probs).scatter_(-1, order, largest.masked_fill(enough, 0.0))
    total = cut.cumsum(-1)
    picks = torch.searchsorted(total, uniform.double().unsqueeze(1) * total[:, -1:], right=True)
    last = (cut > 0).long().mul_(torch.arange(1, vocab + 1, device=logits.device)).argmax(-1, keepdim=True)
    return torch.where(hot, torch.minimum(picks, last)[:, 0], greedy)


def kv_write(kv: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Put keys and values [T, Hkv, D] into one cache layer `kv` at `slots` [T] (block * block_size + offset)."""
    flat = kv.flatten(1, 2)
    flat[0].index_copy_(0, slots, k)
    flat[1].index_copy_(0, slots, v)


def kv_gather(kv: Tensor, blocks: Tensor) -> Tensor:
    """Copy blocks out of `kv` [layers, 2, blocks, ...]; returns [n, layers, 2, ...]: each block contiguous."""
    return kv.index_select(2, blocks).movedim(2, 0).contiguous()


def kv_scatter(kv: Tensor, blocks: Tensor, data: Tensor) -> None:
    """Put `data`, as `kv_gather` returned it, into the blocks named (other ids may be named than on the way out)."""
    kv.index_copy_(2, blocks, data.movedim(0, 2))
