"""The ops of `reference` on the compiled library. Arguments have passed `api`'s checks; what the kernels do not cover
(other dtypes than float32 and bfloat16, gradients, odd layouts) goes to the definition.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from omni_kernels import reference
from omni_kernels.cpu.arena import Arena
from omni_kernels.cpu.native import Cache, Experts, Matrix, Ragged, Routing, check
from omni_kernels.packing import PackedExperts, PackedMatrix, plain
from omni_kernels.ragged import AttentionBatch

DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_BY_ROW_BITS: Final = {8: 3, 16: 4}
_FLOATS: Final = (torch.float32, torch.bfloat16)


def matrix(w: PackedMatrix | None) -> Matrix:
    """The C structure of a packed matrix, which must outlive it; all zero for None."""
    if w is None:
        return Matrix()
    scale = 0 if w.scale is None else w.scale.data_ptr()
    return Matrix(w.data.data_ptr(), scale, w.n, w.k, _code(w.dtype, w.row_bits), w.gated)


def _code(dtype: torch.dtype, row_bits: int) -> int:
    """The C interface's name of a weight's form."""
    return _BY_ROW_BITS[row_bits] if row_bits else DTYPES[dtype]


def experts(w: PackedExperts) -> Experts:
    """The C structure of a layer's experts."""
    return Experts(matrix(w.w13), matrix(w.w2), matrix(w.shared13), matrix(w.shared2), w.w13.count)


def ragged(batch: AttentionBatch) -> Ragged:
    """The C structure of a batch, which must outlive it."""
    count, index = len(batch.kv_lens), batch.index
    at, entries = index.buffer_info()
    lens, tables, table_starts = count + 1, 2 * count + 1, entries - count - 1
    return Ragged(count, at, at + 8 * lens, at + 8 * tables, at + 8 * table_starts)


def cache(kv: Tensor) -> Cache:
    """The C structure of one cache layer `kv` [2, blocks, block_size, heads, dim], contiguous."""
    _, blocks, size, heads, dim = kv.shape
    keys, plane = kv.data_ptr(), blocks * size * heads * dim * kv.element_size()
    return Cache(keys, keys + plane, blocks, size, heads, dim, dim, heads * dim, dim, DTYPES[kv.dtype])


class CpuOps:
    """The ops bound to one library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.native = library
        self._arena = Arena(library)
        self._experts: dict[int, tuple[weakref.ref[PackedExperts], Experts]] = {}

    def _experts_of(self, w: PackedExperts) -> Experts:
        """Its C structure, made once: a fifth of a call for one row of a small model."""
        key = id(w)
        found = self._experts.get(key)
        if found is not None and found[0]() is w:
            return found[1]
        made = experts(w)
        self._experts[key] = weakref.ref(w, lambda _: self._experts.pop(key, None)), made
        return made

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `reference.rms_norm`."""
        width = x.shape[-1]
        fits = weight.dtype == x.dtype and x.shape[x.dim() - weight.dim() :] == weight.shape
        if x.dtype not in _FLOATS or not fits or (residual is not None and residual.dtype != x.dtype):
            return reference.rms_norm(x, weight, eps, residual)
        x, weight = x.contiguous(), weight.contiguous()
        out = torch.empty_like(x)
        total = x if residual is None else torch.empty_like(x)
        if x.numel():
            other = None if residual is None else residual.contiguous()
            status = self.native.omni_rms_norm(
                x.data_ptr(), None if other is None else other.data_ptr(), weight.data_ptr(), x.numel() // width,
                width, weight.numel() // width, eps, DTYPES[x.dtype], out.data_ptr(), total.data_ptr(),
                torch.get_num_threads(),
            )  # fmt: skip
            check(status, "rms_norm")
        return out, total

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """See `reference.rope`."""
        if x.dtype not in _FLOATS or cos.dtype != x.dtype or sin.dtype != x.dtype:
            return reference.rope(x, cos, sin)
        rows, heads, dim = x.shape
        if x.stride(2) != 1 or x.stride(1) != dim:
            x = x.contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        status = self.native.omni_rope(
            x.data_ptr(), cos.data_ptr(), sin.data_ptr(), rows, heads, dim, x.stride(0), DTYPES[x.dtype],
            out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        check(status, "rope")
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """See `reference.silu_and_mul`."""
        if x.dtype not in _FLOATS:
            return reference.silu_and_mul(x)
        x = x.contiguous()
        shape = x.shape
        width = shape[-1] // 2
        out = x.new_empty((*shape[:-1], width))
        if numel := out.numel():
            status = self.native.omni_silu_and_mul(
                x.data_ptr(), numel // width, width, DTYPES[x.dtype], out.data_ptr(), torch.get_num_threads()
            )
            check(status, "silu_and_mul")
        return out

    def moe_route(
        self, logits: Tensor, top_k: int, renormalise: bool, scoring: str = "softmax", bias: Tensor | None = None,
        groups: int = 1, top_groups: int | None = None, per_group: bool = False, scale: float = 1.0,
        group_best: int = 2,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """See `reference.moe_route`."""
        rows, count = logits.shape
        logits = logits.float().contiguous()
        wide = None if bias is None else bias.float().contiguous()
        how = Routing(
            count, top_k, groups, top_groups or groups, scoring == "sigmoid", renormalise, per_group, scale,
            None if wide is None else wide.data_ptr(), group_best,
        )  # fmt: skip
        ids = torch.empty((rows, top_k), dtype=torch.int64)
        weights = torch.empty((rows, top_k))
        counts = torch.zeros(count, dtype=torch.int64)
        status = self.native.omni_route(
            logits.data_ptr(), rows, how, ids.data_ptr(), weights.data_ptr(), counts.data_ptr(), torch.get_num_threads()
        )
        check(status, "moe_route")
        return ids, weights, counts

    def pack(self, w: Tensor, dtype: torch.dtype | None = None, gated: bool = False, row_bits: int = 0) -> PackedMatrix:
        """Panels of 16 outputs; see `src/omni_cpu.h`."""
        stack = w.detach() if w.dim() == 3 else w.detach().unsqueeze(0)
        count, n, k = stack.shape
        rows, scale = plain(stack, dtype)
        code = _code(rows.dtype, row_bits)
        size = self.native.omni_packed_bytes(n, k, code, gated)
        data = self._arena.take(count * size).view(count, size)
        for i in range(count):
            self.native.omni_pack(rows[i].data_ptr(), n, k, code, gated, data[i].data_ptr())
        if scale is not None:
            scale = _panel_order(scale, gated)
        return PackedMatrix("cpu", data, scale, count, n, k, rows.dtype, gated, row_bits)

    def linear(self, x: Tensor, w: PackedMatrix) -> Tensor:
        """See `reference.linear`."""
        x = x.contiguous()
        out = torch.empty((x.shape[0], w.n), dtype=x.dtype)
        code = DTYPES[x.dtype]
        status = self.native.omni_linear(
            x.data_ptr(), code, x.shape[0], matrix(w), out.data_ptr(), code, torch.get_num_threads()
        )
        check(status, "linear")
        return out

    def packed_moe(self, x: Tensor, experts_: PackedExperts, ids: Tensor, weights: Tensor) -> Tensor:
        """See `reference.packed_moe`."""
        x, ids, weights = x.contiguous(), ids.long().contiguous(), weights.float().contiguous()
        out = torch.empty_like(x)
        status = self.native.omni_fused_moe(
            x.data_ptr(), DTYPES[x.dtype], x.shape[0], self._experts_of(experts_), ids.data_ptr(), weights.data_ptr(),
            ids.shape[1], out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        check(status, "packed_moe")
        return out

    def paged_attention(self, q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float) -> Tensor:
        """See `reference.paged_attention`."""
        if q.dtype not in _FLOATS or kv.dtype not in _FLOATS or not kv.is_contiguous():
            return reference.paged_attention(q, kv, batch, scale)
        return self._attend(q, cache(kv), batch, scale)

    def mla_attention(self, q: Tensor, kv: Tensor, batch: AttentionBatch, scale: float, latent: int) -> Tensor:
        """See `reference.mla_attention`."""
        if q.dtype not in _FLOATS or kv.dtype not in _FLOATS or not kv.is_contiguous():
            return reference.mla_attention(q, kv, batch, scale, latent)
        blocks, size, dim = kv.shape
        at = kv.data_ptr()
        return self._attend(q, Cache(at, at, blocks, size, 1, dim, latent, dim, dim, DTYPES[kv.dtype]), batch, scale)

    def _attend(self, q: Tensor, where: Cache, batch: AttentionBatch, scale: float) -> Tensor:
        if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
            q = q.contiguous()
        out = torch.empty((q.shape[0], q.shape[1], where.value_dim), dtype=q.dtype)
        status = self.native.omni_attention(
            q.data_ptr(), DTYPES[q.dtype], q.shape[1], q.stride(0), ragged(batch), where, scale, out.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        check(status, "paged_attention")
        return out

    def kv_write(self, kv: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """See `reference.kv_write`."""
        if kv.dtype not in _FLOATS or k.dtype != kv.dtype or v.dtype != kv.dtype or not kv.is_contiguous():
            return reference.kv_write(kv, slots, k, v)
        k, v = _row_major(k), _row_major(v)
        slots = slots.long().contiguous()
        status = self.native.omni_kv_write(
            cache(kv), slots.data_ptr(), slots.shape[0], k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0)
        )
        check(status, "kv_write")
        return None

    def kv_gather(self, kv: Tensor, blocks: Tensor) -> Tensor:
        """See `reference.kv_gather`."""
        if not kv.is_contiguous():
            return reference.kv_gather(kv, blocks)
        out = torch.empty((blocks.shape[0], *kv.shape[:2], *kv.shape[3:]), dtype=kv.dtype)
        self._copy(kv, blocks, out, to_cache=False)
        return out

    def kv_scatter(self, kv: Tensor, blocks: Tensor, data: Tensor) -> None:
        """See `reference.kv_scatter`."""
        if not kv.is_contiguous() or data.dtype != kv.dtype:
            return reference.kv_scatter(kv, blocks, data)
        return self._copy(kv, blocks, data.contiguous(), to_cache=True)

    def _copy(self, kv: Tensor, blocks: Tensor, data: Tensor, *, to_cache: bool) -> None:
        planes, count = kv.shape[0] * kv.shape[1], kv.shape[2]
        block_bytes = kv.nbytes // (planes * count) if kv.numel() else 0
        blocks = blocks.long().contiguous()
        status = self.native.omni_kv_copy(
            kv.data_ptr(), planes, count, block_bytes, blocks.data_ptr(), blocks.shape[0], data.data_ptr(), to_cache
        )
        check(status, "kv_scatter" if to_cache else "kv_gather")

    def sample(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
        """See `reference.sample`."""
        rows, vocab = logits.shape
        logits, temperature = logits.float().contiguous(), temperature.double().contiguous()
        top_k, top_p = top_k.long().contiguous(), top_p.double().contiguous()
        uniform = uniform.double().contiguous()
        tokens = torch.empty(rows, dtype=torch.int64)
        status = self.native.omni_sample(
            logits.data_ptr(), rows, vocab, temperature.data_ptr(), top_k.data_ptr(), top_p.data_ptr(),
            uniform.data_ptr(), tokens.data_ptr(),
        )  # fmt: skip
        check(status, "sample")
        return tokens

    def table(self) -> Mapping[str, Callable[..., Any]]:
        """The ops by name."""
        names = (
            "rms_norm", "rope", "silu_and_mul", "moe_route", "pack", "linear", "packed_moe", "paged_attention",
            "mla_attention", "kv_write", "kv_gather", "kv_scatter", "sample",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


def _row_major(x: Tensor) -> Tensor:
    """`x` [T, heads, D] whose rows are contiguous inside."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _panel_order(scale: Tensor, gated: bool) -> Tensor:
    """Scales [count, n] -> [count, panels * 16], padded with zeros, gate and up panels in turn if `gated`."""
    count = scale.shape[0]
    halves = scale.view(count, 2 if gated else 1, -1)
    width = -(-halves.shape[2] // 16) * 16
    padded = torch.nn.functional.pad(halves, (0, width - halves.shape[2]))
    return padded.view(count, halves.shape[1], -1, 16).transpose(1, 2).flatten(1).contiguous()
