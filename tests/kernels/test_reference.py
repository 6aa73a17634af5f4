"""The reference ops against their formulas written out the slow way, and the argument checks in front of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import omni_kernels as ops
from omni_kernels import reference


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


def close(got: Tensor, want: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(got, want, atol=atol, rtol=1e-5)


def test_float8_values_are_multiplied_by_the_scale_of_their_block() -> None:
    w, scale = torch.randn(2, 5, 7).to(torch.float8_e4m3fn), torch.rand(2, 2, 4)
    want = torch.empty(2, 5, 7)
    for i, n, k in ((i, n, k) for i in range(2) for n in range(5) for k in range(7)):
        want[i, n, k] = w[i, n, k].float() * scale[i, n // 3, k // 2]
    assert ops.dequantise_fp8(w, scale, (3, 2)).equal(want)
    assert ops.dequantise_fp8(w[0], torch.full((1, 1), 0.5)).equal(w[0].float() / 2)


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    x, weight = torch.randn(5, 24), torch.randn(24)
    normed, total = ops.rms_norm(x, weight, 1e-6)
    close(normed, x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight)
    assert total is x


def test_rms_norm_adds_the_residual_first_and_returns_the_sum() -> None:
    x, residual, weight = torch.randn(5, 24), torch.randn(5, 24), torch.randn(24)
    normed, total = ops.rms_norm(x, weight, 1e-6, residual)
    close(total, x + residual)
    close(normed, ops.rms_norm(x + residual, weight, 1e-6)[0])


def test_rope_turns_each_pair_by_its_angle() -> None:
    dim, theta = 8, 100.0
    cos, sin = ops.rope_table(dim, 16, theta)
    positions = torch.tensor([0, 3, 15])
    x = torch.randn(3, 2, dim)
    got = ops.rope(x, cos[positions], sin[positions])
    for row, position in enumerate(positions.tolist()):
        for i in range(dim // 2):
            angle = torch.tensor(position / theta ** (2 * i / dim))
            a, b = x[row, :, i], x[row, :, i + dim // 2]
            close(got[row, :, i], a * angle.cos() - b * angle.sin())
            close(got[row, :, i + dim // 2], b * angle.cos() + a * angle.sin())


def test_silu_and_mul_takes_the_gate_first() -> None:
    x = torch.randn(3, 10)
    close(ops.silu_and_mul(x), x[:, :5] * torch.sigmoid(x[:, :5]) * x[:, 5:])


@pytest.mark.parametrize("renormalise", [True, False])
def test_moe_route_takes_the_largest_probabilities(renormalise: bool) -> None:
    logits = torch.randn(7, 6)
    ids, weights, counts = ops.moe_route(logits, 3, renormalise)
    probs = logits.softmax(-1)
    for row in range(7):
        best = sorted(range(6), key=lambda e: -probs[row, e].item())[:3]
        assert ids[row].tolist() == best
        chosen = probs[row, best]
        close(weights[row], chosen / chosen.sum() if renormalise else chosen)
    assert counts.tolist() == [(ids == e).sum().item() for e in range(6)]


@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 4, 2), (5, 4, 2), (9, 3, 3), (0, 4, 2), (2, 40, 1)])
def test_fused_moe_is_the_weighted_sum_of_the_chosen_experts(rows: int, experts: int, top_k: int) -> None:
    hidden, wide = 12, 10
    x = torch.randn(rows, hidden)
    w13, w2 = torch.randn(experts, 2 * wide, hidden), torch.randn(experts, hidden, wide)
    ids, weights, counts = ops.moe_route(torch.randn(rows, experts), top_k, True)
    want = torch.zeros(rows, hidden)
    for t in range(rows):
        for k in range(top_k):
            e = ids[t, k]
            want[t] += weights[t, k] * (w2[e] @ ops.silu_and_mul(w13[e] @ x[t]))
    close(ops.fused_moe(x, w13, w2, ids, weights, counts), want, atol=1e-4)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Rows `q` [n, Hq, D] are the last of the keys' `k` [m, Hkv, D]."""
    n, m, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for row in range(n):
        seen = m - n + row + 1
        for head in range(q.shape[1]):
            scores = k[:seen, head // group] @ q[row, head] * scale
            out[row, head] = scores.softmax(-1) @ v[:seen, head // group]
    return out


@pytest.mark.parametrize(
    "lens",
    [
        [(1, 9)],
        [(1, 9), (1, 1), (1, 4)],
        [(6, 6)],
        [(3, 11), (5, 5)],
        [(1, 7), (1, 8), (4, 9), (8, 8), (2, 12)],
    ],
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_paged_attention_equals_dense(lens: list[tuple[int, int]], kv_heads: int) -> None:
    size, dim, heads = 4, 8, 4
    kv = torch.randn(2, 40, size, kv_heads, dim)
    free = iter(torch.randperm(40).tolist())
    tables = [[next(free) for _ in range(-(-keys // size))] for _, keys in lens]
    q = torch.randn(sum(n for n, _ in lens), heads, dim)
    batch = ops.attention_batch([n for n, _ in lens], [m for _, m in lens], tables, size)
    got = ops.paged_attention(q, kv, batch, dim**-0.5)
    row = 0
    for (n, m), table in zip(lens, tables, strict=True):
        k, v = kv[:, table].flatten(1, 2)[:, :m]
        close(got[row : row + n], dense_attention(q[row : row + n], k, v, dim**-0.5))
        row += n


def test_a_longer_table_than_the_keys_need_changes_nothing() -> None:
    kv, q = torch.randn(2, 6, 4, 2, 8), torch.randn(2, 2, 8)
    exact = ops.attention_batch([1, 1], [3, 6], [[0], [1, 2]], 4)
    roomy = ops.attention_batch([1, 1], [3, 6], [[0, 5], [1, 2, 3]], 4)
    close(ops.paged_attention(q, kv, roomy, 1.0), ops.paged_attention(q, kv, exact, 1.0))


def test_kv_write_puts_rows_into_their_slots_only() -> None:
    kv = torch.zeros(2, 3, 4, 2, 8)
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    ops.kv_write(kv, torch.tensor([0, 5, 11]), k, v)
    flat = kv.flatten(1, 2)
    close(flat[0, [0, 5, 11]], k)
    close(flat[1, [0, 5, 11]], v)
    assert flat[:, [1, 2, 3, 4, 6, 7, 8, 9, 10]].eq(0).all()


def test_blocks_move_between_caches_unchanged() -> None:
    source, target = torch.randn(3, 2, 6, 4, 2, 8), torch.zeros(3, 2, 5, 4, 2, 8)
    data = ops.kv_gather(source, torch.tensor([4, 0]))
    assert data.shape == (2, 3, 2, 4, 2, 8)
    assert data.is_contiguous()
    ops.kv_scatter(target, torch.tensor([1, 3]), data)
    assert target[:, :, [1, 3]].equal(source[:, :, [4, 0]])
    assert target[:, :, [0, 2, 4]].eq(0).all()


T = torch.zeros
ONE = ops.attention_batch([1], [1], [[0]], 4)
WRONG: dict[str, Callable[[], object]] = {
    "rms_norm: weight": lambda: ops.rms_norm(T(2, 4), T(3), 1e-6),
    "rms_norm: residual": lambda: ops.rms_norm(T(2, 4), T(4), 1e-6, T(1, 4)),
    "rope: x": lambda: ops.rope(T(2, 4), T(2, 4), T(2, 4)),
    "rope: cos": lambda: ops.rope(T(2, 1, 4), T(3, 4), T(2, 4)),
    "rope: sin": lambda: ops.rope(T(2, 1, 4), T(2, 4), T(2, 2)),
    "silu_and_mul: x": lambda: ops.silu_and_mul(T(2, 3)),
    "moe_route: logits": lambda: ops.moe_route(T(4), 1, True),
    "moe_route: top_k": lambda: ops.moe_route(T(2, 4), 5, True),
    "fused_moe: x": lambda: ops.fused_moe(T(4), T(3, 4, 4), T(3, 4, 2), T(1, 1), T(1, 1), T(3)),
    "fused_moe: w13": lambda: ops.fused_moe(T(1, 4), T(3, 5, 4), T(3, 4, 2), T(1, 1), T(1, 1), T(3)),
    "fused_moe: w2": lambda: ops.fused_moe(T(1, 4), T(3, 4, 4), T(3, 5, 2), T(1, 1), T(1, 1), T(3)),
    "fused_moe: ids": lambda: ops.fused_moe(T(1, 4), T(3, 4, 4), T(3, 4, 2), T(2, 1), T(1, 1), T(3)),
    "fused_moe: weights": lambda: ops.fused_moe(T(1, 4), T(3, 4, 4), T(3, 4, 2), T(1, 1), T(1, 2), T(3)),
    "fused_moe: counts": lambda: ops.fused_moe(T(1, 4), T(3, 4, 4), T(3, 4, 2), T(1, 1), T(1, 1), T(2)),
    "paged_attention: q": lambda: ops.paged_attention(T(2, 2, 8), T(2, 2, 4, 2, 8), ONE, 1.0),
    "paged_attention: kv": lambda: ops.paged_attention(T(1, 2, 8), T(2, 2, 4, 2, 4), ONE, 1.0),
    "kv_write: k": lambda: ops.kv_write(T(2, 2, 4, 2, 8), T(3), T(2, 2, 8), T(3, 2, 8)),
    "kv_write: v": lambda: ops.kv_write(T(2, 2, 4, 2, 8), T(3), T(3, 2, 8), T(3, 2, 4)),
    "kv_gather: kv": lambda: ops.kv_gather(T(2, 2, 4), T(1)),
    "kv_gather: blocks": lambda: ops.kv_gather(T(1, 2, 2, 4, 2, 8), T(1, 1)),
    "kv_scatter: data": lambda: ops.kv_scatter(T(1, 2, 2, 4, 2, 8), T(1), T(2, 1, 2, 4, 2, 8)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_argument_is_named(what: str) -> None:
    with pytest.raises(ValueError, match=f"^{what} "):
        WRONG[what]()


def test_every_op_has_a_definition_and_a_backend() -> None:
    for op in ops.OPS:
        assert getattr(reference, op)
        assert getattr(ops, op)
        assert all(ops.backend_of(op, device) for device in ops.DEVICES)


def test_a_device_without_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="no backend for device meta"):
        ops.silu_and_mul(torch.zeros(1, 2, device="meta"))
