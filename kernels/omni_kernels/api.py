"""The ops that the engine calls: arguments checked, then handed to the best backend of the tensor's device.

Each op is defined by the function of its name in `reference.py`. A wrong argument is a ValueError that names it.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from omni_kernels import registry
from omni_kernels.checks import beside, check_choice, check_ids, floats, integers, op_of, require, shares
from omni_kernels.packing import ROW_MOST, WEIGHT_DTYPES, PackedExperts, PackedMatrix
from omni_kernels.ragged import AttentionBatch
from omni_kernels.registry import TORCH, Op

MAX_GROUPS: Final = 256
MAX_SUMMED: Final = 65536
"""Products of two int8 that fit into 32 bits, and of an unsigned one."""


# The small ops are called often: their messages are put together only when needed.


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `reference.rms_norm`."""
    shape = x.shape
    if not shape:
        require(False, "rms_norm", "x", "must be [..., H]", shape)
    floats("rms_norm", "x", x)
    if weight.shape[-1:] != shape[-1:]:
        require(False, "rms_norm", "weight", f"must end in {shape[-1]}", weight.shape)
    floats("rms_norm", "weight", weight, x)
    if residual is not None:
        if residual.shape != shape:
            require(False, "rms_norm", "residual", f"must be {tuple(shape)}", residual.shape)
        floats("rms_norm", "residual", residual, x)
    result: tuple[Tensor, Tensor] = op_of("rms_norm", x, weight, residual)(x, weight, eps, residual)
    return result


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `reference.rope`."""
    if x.dim() != 3 or x.shape[2] % 2:
        require(False, "rope", "x", "must be [T, heads, even]", x.shape)
    floats("rope", "x", x)
    table = (x.shape[0], x.shape[2])
    for name, part in (("cos", cos), ("sin", sin)):
        if part.shape != table:
            require(False, "rope", name, f"must be {table}", part.shape)
        floats("rope", name, part, x)
    result: Tensor = op_of("rope", x, cos, sin)(x, cos, sin)
    return result


def silu_and_mul(x: Tensor) -> Tensor:
    """See `reference.silu_and_mul`."""
    if x.dim() == 0 or x.shape[-1] % 2:
        require(False, "silu_and_mul", "x", "must have an even last axis", x.shape)
    floats("silu_and_mul", "x", x)
    result: Tensor = op_of("silu_and_mul", x)(x)
    return result


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
    """See `reference.moe_route`."""
    name = "moe_route"
    require(logits.dim() == 2, name, "logits", "must be [T, E]", logits.shape)
    floats(name, "logits", logits)
    experts = logits.shape[1]
    require(scoring in ("softmax", "sigmoid"), name, "scoring", "must be softmax or sigmoid", scoring)
    require(1 <= top_k <= experts, name, "top_k", f"must be in 1..{experts}", top_k)
    if bias is not None:
        require(bias.shape == (experts,), name, "bias", f"must be [{experts}]", bias.shape)
        shares(name, "bias", bias, logits)
    even = 1 <= groups <= MAX_GROUPS and experts % groups == 0
    require(even, name, "groups", f"must divide {experts} and be at most {MAX_GROUPS}", groups)
    kept = groups if top_groups is None else top_groups
    require(1 <= kept <= groups, name, "top_groups", f"must be in 1..{groups}", top_groups)
    require(group_best in (1, 2), name, "group_best", "must be 1 or 2", group_best)
    if per_group:
        require(top_k % groups == 0, name, "top_k", f"must be a multiple of {groups}", top_k)
    else:
        most = experts // groups * kept
        require(top_k <= most, name, "top_k", f"must be at most the {most} experts kept", top_k)
    result: tuple[Tensor, Tensor, Tensor] = op_of(name, logits, bias)(
        logits, top_k, renormalise, scoring, bias, groups, top_groups, per_group, scale, group_best
    )
    return result


def fused_moe(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """See `reference.fused_moe`. Weights as a checkpoint holds them; the fast way is `packed_moe`."""
    name = "fused_moe"
    require(x.dim() == 2, name, "x", "must be [T, H]", x.shape)
    floats(name, "x", x)
    require(w2.dim() == 3, name, "w2", "must be [E, H, I]", w2.shape)
    experts, width, hidden = w2.shape[0], w2.shape[2], x.shape[1]
    want13, want2 = (experts, 2 * width, hidden), (experts, hidden, width)
    require(w13.shape == want13, name, "w13", f"must be {want13}", w13.shape)
    require(w2.shape == want2, name, "w2", f"must be {want2}", w2.shape)
    floats(name, "w13", w13, x)
    floats(name, "w2", w2, x)
    require(counts.shape == (experts,), name, "counts", f"must be [{experts}]", counts.shape)
    check_choice(name, x, ids, weights)
    integers(name, "counts", counts, x)
    check_ids(name, experts, ids)
    result: Tensor = op_of(name, x, w13, w2, weights)(x, w13, w2, ids, weights, counts)
    return result


def pack(
    w: Tensor,
    dtype: torch.dtype | None = None,
    gated: bool = False,
    backend: str | None = None,
    row_bits: int = 0,
) -> PackedMatrix:
    """Bring matrices `w` [n, k] or [count, n, k] into the form of the device's best backend, or of the one named.

    `dtype` float32, bfloat16 or int8 (weight-only, one scale an output); None keeps what `w` holds, and float32
    whose values are all exact in bfloat16 as that. `gated`: the n outputs are n/2 gates, then n/2 ups.
    `row_bits` 8 (W8A8) or 16, with int8: rows are made whole numbers too, see `reference.integer_product`.
    """
    require(w.dim() in (2, 3) and w.numel() > 0, "pack", "w", "must be [n, k] or [count, n, k]", w.shape)
    floats("pack", "w", w)
    require(dtype is None or dtype in WEIGHT_DTYPES, "pack", "dtype", f"must be one of {WEIGHT_DTYPES}", dtype)
    require(not gated or w.shape[-2] % 2 == 0, "pack", "w", "must have an even number of outputs", w.shape)
    require(row_bits in (0, *ROW_MOST), "pack", "row_bits", f"must be 0 or one of {tuple(ROW_MOST)}", row_bits)
    if row_bits:
        require(dtype == torch.int8, "pack", "dtype", "must be int8 with row_bits", dtype)
        require(backend in (None, "cpu", "torch"), "pack", "row_bits", "is for backends cpu and torch", backend)
        # Sums of 32 bits.
        require(w.shape[-1] <= MAX_SUMMED, "pack", "w", f"must have at most {MAX_SUMMED} columns", w.shape)
    elsewhere = row_bits and w.device.type != "cpu"  # the definition alone
    if backend is None and (elsewhere or (dtype is None and w.dtype not in WEIGHT_DTYPES)):
        backend = "torch"
    function = op_of("pack", w.detach()) if backend is None else registry.ops_of(backend)["pack"]
    result: PackedMatrix = function(w, dtype, gated, row_bits) if row_bits else function(w, dtype, gated)
    return result


def pack_experts(
    w13: Tensor,
    w2: Tensor,
    dtype: torch.dtype | None = None,
    shared13: Tensor | None = None,
    shared2: Tensor | None = None,
    backend: str | None = None,
    row_bits: int = 0,
) -> PackedExperts:
    """Pack the MLPs of a layer: `w13` [E, 2I, H] gate rows first, `w2` [E, H, I], `shared13` [2J, H], `shared2` [H, J].
    `dtype` and `row_bits` as in `pack`.

    Made once, at loading; needs as much memory again as the weights until those are dropped.
    """
    name = "pack_experts"
    require(w13.dim() == 3 and w13.shape[1] % 2 == 0, name, "w13", "must be [E, 2I, H]", w13.shape)
    experts, twice, hidden = w13.shape
    want = (experts, hidden, twice // 2)
    require(w2.shape == want, name, "w2", f"must be {want}", w2.shape)
    floats(name, "w2", w2, w13)
    shared: list[PackedMatrix | None] = [None, None]
    if shared13 is not None or shared2 is not None:
        good13 = shared13 is not None and shared13.dim() == 2 and shared13.shape[1] == hidden
        if shared13 is None or not good13 or shared13.shape[0] % 2:
            raise ValueError(
                f"{name}: shared13 must be [2J, {hidden}], got {None if shared13 is None else shared13.shape}"
            )
        want2 = (hidden, shared13.shape[0] // 2)
        if shared2 is None or shared2.shape != want2:
            raise ValueError(f"{name}: shared2 must be {want2}, got {None if shared2 is None else shared2.shape}")
        shared = [pack(shared13, dtype, True, backend, row_bits), pack(shared2, dtype, False, backend, row_bits)]
    return PackedExperts(pack(w13, dtype, True, backend, row_bits), pack(w2, dtype, False, backend, row_bits), *shared)


def _packed_op(name: str, packer: str, x: Tensor) -> Op:
    """The op of the backend that packed the weights; `x` must be what that takes."""
    if packer == "torch":
        return TORCH[name]
    backend = registry.backend(packer)
    if x.device.type != backend.device:
        require(False, name, "x", f"must be on {backend.device}", x.device)
    require(x.dtype in (torch.float32, torch.bfloat16), name, "x", "must be float32 or bfloat16", x.dtype)
    if torch.is_grad_enabled() and x.requires_grad:
        require(False, name, "x", f"must not want a gradient with weights packed by {packer}", "requires_grad")
    return backend.ops[name]


def linear(x: Tensor, w: PackedMatrix) -> Tensor:
    """See `reference.linear`."""
    require(x.dim() == 2 and x.shape[1] == w.k, "linear", "x", f"must be [T, {w.k}]", x.shape)
    floats("linear", "x", x)
    single = w.count == 1 and not w.gated
    require(single or w.backend == "torch", "linear", "w", "must be one matrix, not gated", (w.count, w.gated))
    result: Tensor = _packed_op("linear", w.backend, x)(x, w)
    return result


def packed_moe(x: Tensor, experts: PackedExperts, ids: Tensor, weights: Tensor) -> Tensor:
    """See `reference.packed_moe`."""
    name, hidden = "packed_moe", experts.w13.k
    if x.dim() != 2 or x.shape[1] != hidden:
        require(False, name, "x", f"must be [T, {hidden}]", x.shape)
    floats(name, "x", x)
    check_choice(name, x, ids, weights)
    run = _packed_op(name, experts.backend, x)
    if experts.backend != "cpu":  # that one looks itself, on its way
        check_ids(name, experts.w13.count, ids)
    try:
        result: Tensor = run(x, experts, ids, weights)
    except ValueError:
        check_ids(name, experts.w13.count, ids)
        raise
    return result


def paged_attention(q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
    """See `reference.paged_attention`."""
    name, rows = "paged_attention", batch.rows
    require(q.dim() == 3 and q.shape[0] == rows, name, "q", f"needs {rows} rows", q.shape)
    floats(name, "q", q)
    layout = kv.dim() == 5 and kv.shape[0] == 2 and kv.shape[4] == q.shape[2]
    require(layout, name, "kv", "must be [2, blocks, size, heads, D]", kv.shape)
    floats(name, "kv", kv, q)
    _check_blocks(name, "kv", kv.shape[2], batch)
    grouped = q.shape[1] % kv.shape[3] == 0
    require(grouped, name, "q", f"heads must divide by {kv.shape[3]}", q.shape)
    result: Tensor = op_of(name, q, kv)(q, kv, batch, scale)
    return result


def _check_blocks(op: str, argument: str, size: int, batch: AttentionBatch) -> None:
    require(size == batch.block_size, op, argument, f"must have blocks of {batch.block_size}", size)


def mla_attention(q: Tensor, cache: Tensor, batch: AttentionBatch, scale: float, latent: int) -> Tensor:
    """See `reference.mla_attention`."""
    name, rows = "mla_attention", batch.rows
    require(q.dim() == 3 and q.shape[0] == rows, name, "q", f"needs {rows} rows", q.shape)
    floats(name, "q", q)
    layout = cache.dim() == 3 and cache.shape[2] == q.shape[2]
    require(layout, name, "cache", f"must be [blocks, size, {q.shape[2]}]", cache.shape)
    floats(name, "cache", cache, q)
    _check_blocks(name, "cache", cache.shape[1], batch)
    require(1 <= latent <= q.shape[2], name, "latent", f"must be in 1..{q.shape[2]}", latent)
    result: Tensor = op_of(name, q, cache)(q, cache, batch, scale, latent)
    return result


def mla_write(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """See `reference.mla_write`."""
    name = "mla_write"
    require(cache.dim() == 3, name, "cache", "must be [blocks, size, C]", cache.shape)
    require(slots.dim() == 1, name, "slots", "must be [T]", slots.shape)
    want = (slots.shape[0], cache.shape[2])
    require(rows.shape == want, name, "rows", f"must be {want}", rows.shape)
    floats(name, "rows", rows, cache)
    integers(name, "slots", slots)
    op_of(name, cache, rows)(cache, slots, rows)


def kv_write(kv: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """See `reference.kv_write`."""
    require(kv.dim() == 5 and kv.shape[0] == 2, "kv_write", "kv", "must be [2, blocks, size, heads, D]", kv.shape)
    require(slots.dim() == 1, "kv_write", "slots", "must be [T]", slots.shape)
    want = (slots.shape[0], *kv.shape[3:])
    require(k.shape == want, "kv_write", "k", f"must be {want}", k.shape)
    require(v.shape == want, "kv_write", "v", f"must be {want}", v.shape)
    floats("kv_write", "kv", kv)
    integers("kv_write", "slots", slots, kv)
    floats("kv_write", "k", k, kv)
    floats("kv_write", "v", v, kv)
    op_of("kv_write", kv, k, v)(kv, slots, k, v)


def kv_gather(kv: Tensor, blocks: Tensor) -> Tensor:
    """See `reference.kv_gather`."""
    require(kv.dim() == 6, "kv_gather", "kv", "must be [layers, 2, blocks, ...]", kv.shape)
    require(blocks.dim() == 1, "kv_gather", "blocks", "must be [n]", blocks.shape)
    integers("kv_gather", "blocks", blocks, kv)
    result: Tensor = op_of("kv_gather", kv)(kv, blocks)
    return result


def kv_scatter(kv: Tensor, blocks: Tensor, data: Tensor) -> None:
    """See `reference.kv_scatter`."""
    require(kv.dim() == 6, "kv_scatter", "kv", "must be [layers, 2, blocks, ...]", kv.shape)
    require(blocks.dim() == 1, "kv_scatter", "blocks", "must be [n]", blocks.shape)
    want = (blocks.shape[0], *kv.shape[:2], *kv.shape[3:])
    require(data.shape == want, "kv_scatter", "data", f"must be {want}", data.shape)
    require(data.dtype == kv.dtype, "kv_scatter", "data", f"must be {kv.dtype}", data.dtype)
    beside("kv_scatter", "data", data, kv)
    integers("kv_scatter", "blocks", blocks, kv)
    op_of("kv_scatter", kv)(kv, blocks, data)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """See `reference.sample`."""
    require(logits.dim() == 2 and logits.shape[1] > 0, "sample", "logits", "must be [n, V]", logits.shape)
    floats("sample", "logits", logits)
    rows = (logits.shape[0],)
    named = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "uniform": uniform}
    for name, value in named.items():
        require(value.shape == rows, "sample", name, f"must be {rows}", value.shape)
        if name == "top_k":
            integers("sample", name, value, logits)
        else:
            shares("sample", name, value, logits)
    result: Tensor = op_of("sample", logits)(logits, temperature, top_k, top_p, uniform)
    return result
