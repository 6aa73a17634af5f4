"""Plain torch operations that define what every backend must compute.

Each function is the meaning of one op of `api.py`: a faster backend is right when it agrees with the function here.
Nothing checks its arguments: `api.py` does, once, for all backends. Knows nothing of models, requests or schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Normalise rows of `x` [..., H] by their root mean square, in float32, and scale by `weight`.

    With `residual` the input is `x + residual`. Returns the normalised rows and the (summed) input,
    which is the next residual. `weight` may be [H] or anything that broadcasts against `x`.
    """
    total = x if residual is None else x + residual
    wide = total.float()
    inverse = wide.square().sum(-1, keepdim=True).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return (wide * inverse).to(x.dtype).mul_(weight), total


def rope_table(head_dim: int, length: int, theta: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Cosines and sines [length, head_dim] of the rotary embedding (Su et al. 2021), halves repeated.

    The sines of the first half are negated, so that applying them needs a roll and no sign change.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    angle = torch.outer(torch.arange(length).float(), 1.0 / theta**exponent)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `x` [T, heads, D] by rows of `rope_table`, `cos` and `sin` [T, D] (half-split layout)."""
    turned = x.roll(x.shape[-1] // 2, -1).mul_(sin.unsqueeze(1))
    return turned.addcmul_(x, cos.unsqueeze(1))


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up for `x` [..., 2I] with the gate columns first; returns [..., I]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def moe_route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts: softmax over `logits` [T, E] in float32, then the `top_k` largest.

    Returns ids [T, K] int64 (best first), weights [T, K] float32 (summing to 1 if `renormalise`)
    and how many of the T*K choices fell on each expert, [E] int64.
    """
    weights, ids = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids, weights, torch.bincount(ids.flatten(), minlength=logits.shape[-1])


def fused_moe(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Sum over each row's chosen experts of weight * expert(row).

    `x` [T, H]; `w13` [E, 2I, H] gate rows first; `w2` [E, H, I]; `ids`, `weights` [T, K] and
    `counts` [E] as `moe_route` returns them. Rows are sorted by expert, so that each expert
    that is used costs two matrix products whatever the number of its rows. Returns [T, H].
    """
    if x.shape[0] == 1:
        return _moe_one_row(x, w13, w2, ids, weights)
    order = ids.flatten().argsort(stable=True)
    rows = x.index_select(0, order // ids.shape[1])
    partial = torch.empty_like(rows)
    start = 0
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
        hidden = silu_and_mul(torch.mm(x, w13[expert].t()))
        out.addmm_(hidden, w2[expert].t(), alpha=weight)
    return out


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which rows of a ragged batch belong to which sequence, and where its keys lie.

    The first `num_single` sequences have one query row each (decode); the others have a chunk each.
    A query row at place j of a chunk of `query_lens[s]` rows sees the first
    `kv_lens[s] - query_lens[s] + j + 1` keys of its sequence. Masks are additive, 0 or -inf.
    """

    query_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    block_tables: tuple[Tensor, ...]
    """Block ids [blocks] of each chunk, after the ids of the single rows, padded, as one flat tensor."""
    num_single: int
    single_kv_len: int
    masks: tuple[Tensor | None, ...]


def attention_batch(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    block_size: int,
    dtype: torch.dtype = torch.float32,
) -> AttentionBatch:
    """Describe a batch whose sequences with one query row come first. Made once per step, used by all layers."""
    single = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
    tables: list[Tensor] = []
    masks: list[Tensor | None] = []
    longest = max(kv_lens[:single], default=0)
    if single:
        width = -(-longest // block_size)
        padded = [[*t[:width], *([0] * (width - len(t)))] for t in block_tables[:single]]
        tables.append(torch.tensor(padded).flatten())
        masks.append(_single_mask(kv_lens[:single], longest, dtype))
    for queries, keys, table in zip(query_lens[single:], kv_lens[single:], block_tables[single:], strict=True):
        tables.append(torch.tensor(table[: -(-keys // block_size)]))
        masks.append(_chunk_mask(queries, keys, dtype))
    return AttentionBatch(tuple(query_lens), tuple(kv_lens), tuple(tables), single, longest, tuple(masks))


def _single_mask(kv_lens: Sequence[int], longest: int, dtype: torch.dtype) -> Tensor | None:
    if all(n == longest for n in kv_lens):
        return None
    hidden = torch.arange(longest) >= torch.tensor(kv_lens).unsqueeze(1)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None, None]


def _chunk_mask(queries: int, keys: int, dtype: torch.dtype) -> Tensor | None:
    """None when the chunk is the whole sequence: then the mask is the plain causal one."""
    if queries == keys:
        return None
    last_seen = torch.arange(keys - queries, keys).unsqueeze(1)
    hidden = torch.arange(keys) > last_seen
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)


def paged_attention(q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """Causal attention of ragged queries over paged keys and values.

    `q` [T, Hq, D] holds the sequences' rows one after the other; `kv` [2, blocks, block_size,
    Hkv, D] is one layer of the cache, in which the keys of the new rows are written already.
    Query head h reads key head h // (Hq // Hkv). Returns [T, Hq, D].
    """
    parts: list[Tensor] = []
    if batch.num_single:
        parts.append(_attend_single(q[: batch.num_single], kv, batch, scale))
    row = batch.num_single
    shift = 1 if batch.num_single else 0
    for i in range(batch.num_single, len(batch.query_lens)):
        place = i - batch.num_single + shift
        rows = q[row : row + batch.query_lens[i]]
        row += batch.query_lens[i]
        keys = kv.index_select(1, batch.block_tables[place]).flatten(1, 2)[:, : batch.kv_lens[i]]
        parts.append(_attend_chunk(rows, keys, batch.masks[place], scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_single(q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """One query row a sequence; the query heads of one key head take the place of query positions."""
    num, heads, dim = q.shape
    pages = kv.index_select(1, batch.block_tables[0]).view(2, num, -1, *kv.shape[3:])
    keys, values = pages[:, :, : batch.single_kv_len].transpose(2, 3)
    grouped = q.reshape(num, kv.shape[3], -1, dim)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=batch.masks[0], scale=scale)
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
