"""Every backend against the definition: usual shapes, odd shapes, edges, determinism, broken arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import omni_kernels as ops
from omni_kernels import reference, registry

F32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
TOLERANCE = {F32: 2e-5, BF16: 2e-2}


def close(got: Tensor, want: Tensor, scale: float | None = None) -> None:
    """Equal within rounding: relative to the largest value, since sums may be taken in any order."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if want.numel():
        most = float(want.float().abs().max()) if scale is None else scale
        torch.testing.assert_close(
            got.float(), want.float(), atol=TOLERANCE[want.dtype] * max(most, 1e-6), rtol=0, equal_nan=True
        )


def experts(count: int, hidden: int, wide: int, backend: str, dtype: torch.dtype | None = None, shared: int = 0) -> Any:
    """(packed by the backend, packed by the definition) of the same random weights."""
    w13 = torch.randn(count, 2 * wide, hidden) / hidden**0.5
    w2 = torch.randn(count, hidden, wide) / max(wide, 1) ** 0.5
    more = (torch.randn(2 * shared, hidden) / hidden**0.5, torch.randn(hidden, shared) / shared**0.5) if shared else ()
    return tuple(ops.pack_experts(w13, w2, dtype, *more, backend=b) for b in (backend, "torch"))


@pytest.mark.parametrize("stored", [F32, BF16, INT8])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("rows", "count", "top_k", "hidden", "wide"),
    [
        (0, 4, 2, 32, 16),
        (1, 4, 2, 32, 16),
        (3, 8, 8, 64, 32),
        (40, 1, 1, 33, 7),
        (130, 3, 2, 65, 40),
        (300, 4, 2, 64, 96),
        (7, 5, 1, 2, 1),
    ],
)
def test_packed_moe(
    backend: str, stored: torch.dtype, dtype: torch.dtype, rows: int, count: int, top_k: int, hidden: int, wide: int
) -> None:
    packed, plain = experts(count, hidden, wide, backend, stored)
    x = torch.randn(rows, hidden).to(dtype)
    ids, weights, _ = ops.moe_route(torch.randn(rows, count), top_k, True)
    want = reference.packed_moe(x.float(), plain, ids, weights).to(dtype)
    close(ops.packed_moe(x, packed, ids, weights), want)


def test_packed_moe_with_a_shared_expert(backend: str) -> None:
    packed, plain = experts(4, 48, 24, backend, shared=40)
    x = torch.randn(110, 48)
    ids, weights, _ = ops.moe_route(torch.randn(110, 4), 2, True)
    close(ops.packed_moe(x, packed, ids, weights), reference.packed_moe(x, plain, ids, weights))


def test_a_choice_of_minus_one_takes_no_part(backend: str) -> None:
    packed, _ = experts(4, 32, 16, backend)
    x = torch.randn(6, 32)
    ids, weights, _ = ops.moe_route(torch.randn(6, 4), 3, True)
    ids[0], ids[1, 1] = -1, -1
    gone = weights.clone()
    gone[0], gone[1, 1] = 0, 0
    kept = ids.clamp(min=0)
    close(ops.packed_moe(x, packed, ids, weights), ops.packed_moe(x, packed, kept, gone))
    assert ops.packed_moe(x, packed, ids, weights)[0].eq(0).all()


def test_fused_moe_of_plain_weights_skips_minus_one() -> None:
    w13, w2, x = torch.randn(3, 8, 6), torch.randn(3, 6, 4), torch.randn(5, 6)
    ids, weights = torch.tensor([[0, -1], [2, 1], [-1, -1], [2, 0], [1, -1]]), torch.rand(5, 2)
    counts = torch.bincount(ids[ids >= 0], minlength=3)
    packed = ops.pack_experts(w13, w2, F32, backend="torch")
    want = reference.packed_moe(x, packed, ids, weights)
    close(ops.fused_moe(x, w13, w2, ids, weights, counts), want)
    one = ops.fused_moe(x[:1], w13, w2, ids[:1], weights[:1], torch.tensor([1, 0, 0]))
    close(one, want[:1], scale=float(want.abs().max()))


def test_experts_whose_matrices_are_kept_in_different_dtypes(backend: str) -> None:
    w13, w2 = torch.randn(4, 48, 32).to(BF16).float(), torch.randn(4, 32, 24) / 5  # the first is exact in bfloat16
    packed = ops.pack_experts(w13, w2, backend=backend)
    assert (packed.w13.dtype, packed.w2.dtype) == (BF16, F32)
    x = torch.randn(20, 32).to(BF16)
    ids, weights, _ = ops.moe_route(torch.randn(20, 4), 2, True)
    plain = ops.pack_experts(w13, w2, F32, backend="torch")
    close(ops.packed_moe(x, packed, ids, weights), reference.packed_moe(x.float(), plain, ids, weights).to(BF16))


def test_all_rows_to_one_expert(backend: str) -> None:
    packed, plain = experts(8, 32, 48, backend)
    x, ids, weights = torch.randn(250, 32), torch.full((250, 1), 5), torch.rand(250, 1)
    close(ops.packed_moe(x, packed, ids, weights), reference.packed_moe(x, plain, ids, weights))


def test_experts_that_are_gone_leave_nothing_to_those_in_their_place(compiled: str) -> None:
    x, (ids, weights) = torch.randn(3, 8), (torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    for _ in range(20):  # Python gives the same address again
        w13, w2 = torch.randn(1, 8, 8), torch.randn(1, 8, 4)
        packed, plain = (ops.pack_experts(w13, w2, F32, backend=b) for b in (compiled, "torch"))
        for _ in range(2):
            close(ops.packed_moe(x, packed, ids, weights), reference.packed_moe(x, plain, ids, weights))


def test_a_nan_stays_in_its_row(backend: str) -> None:
    packed, _ = experts(4, 32, 16, backend)
    x = torch.randn(9, 32)
    x[3, 5] = torch.nan
    ids, weights, _ = ops.moe_route(torch.randn(9, 4), 2, True)
    got = ops.packed_moe(x, packed, ids, weights)
    assert got[3].isnan().all()
    assert got[[0, 1, 2, 4, 5, 6, 7, 8]].isfinite().all()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_number_of_threads_changes_no_bit(compiled: str, dtype: torch.dtype) -> None:
    packed, _ = experts(8, 64, 96, compiled)
    x = torch.randn(150, 64).to(dtype)
    ids, weights, _ = ops.moe_route(torch.randn(150, 8), 2, True)
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        results.append(ops.packed_moe(x, packed, ids, weights))
    assert all(result.equal(results[0]) for result in results)


@pytest.mark.parametrize("stored", [F32, BF16, INT8])
def test_a_row_does_not_depend_on_its_neighbours(compiled: str, stored: torch.dtype) -> None:
    packed, _ = experts(4, 64, 48, compiled, stored)
    x = torch.randn(120, 64)
    ids, weights, _ = ops.moe_route(torch.randn(120, 4), 2, True)
    together = ops.packed_moe(x, packed, ids, weights)
    for row in (0, 1, 77, 119):
        alone = ops.packed_moe(x[row : row + 1], packed, ids[row : row + 1], weights[row : row + 1])
        assert alone.equal(together[row : row + 1])


@pytest.mark.parametrize("stored", [BF16, INT8])
@pytest.mark.parametrize(("hidden", "wide"), [(64, 96), (33, 7), (100, 40)])
def test_amx_and_vectors_agree_and_rows_keep_to_themselves(stored: torch.dtype, hidden: int, wide: int) -> None:
    library = registry.cpu_library()
    if library is None or not library.omni_use_amx(1):
        pytest.skip("this machine has no AMX")
    packed, plain = experts(4, hidden, wide, "cpu", stored, shared=50)
    x = torch.randn(150, hidden).to(BF16)
    ids, weights, _ = ops.moe_route(torch.randn(150, 4), 2, True)
    tiles = ops.packed_moe(x, packed, ids, weights)
    for row in (0, 77, 149) if stored == BF16 else ():
        alone = ops.packed_moe(x[row : row + 1], packed, ids[row : row + 1], weights[row : row + 1])
        assert alone.equal(tiles[row : row + 1])
    torch.set_num_threads(3)
    assert ops.packed_moe(x, packed, ids, weights).equal(tiles)
    torch.set_num_threads(1)
    matrix = ops.pack(torch.randn(75, hidden), stored, backend="cpu")
    product = ops.linear(x, matrix)
    library.omni_use_amx(0)
    vectors = ops.packed_moe(x, packed, ids, weights), ops.linear(x, matrix)
    library.omni_use_amx(1)
    close(tiles, vectors[0])
    close(product, vectors[1])
    close(tiles, reference.packed_moe(x.float(), plain, ids, weights).to(BF16))
    x[5, 3] = torch.nan
    broken = ops.packed_moe(x, packed, ids, weights)
    assert broken[5].isnan().all()
    assert broken[:5].equal(tiles[:5])
    assert broken[6:].equal(tiles[6:])


@pytest.mark.parametrize("stored", [BF16, INT8])
@pytest.mark.parametrize(("hidden", "wide"), [(64, 96), (33, 7)])
def test_pairs_of_bfloat16_and_vectors_agree_and_rows_keep_to_themselves(
    stored: torch.dtype, hidden: int, wide: int
) -> None:
    library = registry.cpu_library()
    if library is None or not library.omni_use_pairs(1):
        pytest.skip("this machine multiplies no pairs of bfloat16")
    library.omni_use_amx(0)
    packed, plain = experts(4, hidden, wide, "cpu", stored, shared=10)
    x = torch.randn(150, hidden).to(BF16)
    ids, weights, _ = ops.moe_route(torch.randn(150, 4), 2, True)
    pairs = ops.packed_moe(x, packed, ids, weights)
    for row in (0, 77, 149) if stored == BF16 else ():
        alone = ops.packed_moe(x[row : row + 1], packed, ids[row : row + 1], weights[row : row + 1])
        assert alone.equal(pairs[row : row + 1])
    matrix = ops.pack(torch.randn(75, hidden), stored, backend="cpu")
    product = ops.linear(x, matrix)
    library.omni_use_pairs(0)
    close(pairs, ops.packed_moe(x, packed, ids, weights))
    close(product, ops.linear(x, matrix))
    library.omni_use_pairs(1)
    library.omni_use_amx(1)
    close(pairs, reference.packed_moe(x.float(), plain, ids, weights).to(BF16))


@pytest.mark.parametrize("rows", [1, 5, 40, 200])
@pytest.mark.parametrize("stored", [F32, BF16, INT8])
def test_linear(backend: str, rows: int, stored: torch.dtype) -> None:
    w, x = torch.randn(75, 31), torch.randn(rows, 31)
    want = reference.linear(x, ops.pack(w, stored, backend="torch"))
    close(ops.linear(x, ops.pack(w, stored, backend=backend)), want)


def test_float32_weights_exact_in_bfloat16_are_kept_as_that(backend: str) -> None:
    exact = torch.randn(20, 10).to(BF16).float()
    assert ops.pack(exact, backend=backend).dtype == BF16
    assert ops.pack(torch.randn(20, 10), backend=backend).dtype == F32
    x = torch.randn(3, 10)
    close(ops.linear(x, ops.pack(exact, backend=backend)), x @ exact.t())


ROUTES: dict[str, dict[str, Any]] = {
    "softmax": {"top_k": 3, "renormalise": True},
    "all": {"top_k": 16, "renormalise": True},
    "raw": {"top_k": 2, "renormalise": False},
    "sigmoid": {"top_k": 4, "renormalise": True, "scoring": "sigmoid", "scale": 2.5},
    "bias": {"top_k": 4, "renormalise": True, "scoring": "sigmoid", "bias": torch.linspace(-1, 1, 16)},
    "groups": {"top_k": 4, "renormalise": True, "scoring": "sigmoid", "groups": 4, "top_groups": 2},
    "best group": {"top_k": 3, "renormalise": False, "groups": 4, "top_groups": 1, "group_best": 1},
    "moge": {"top_k": 8, "renormalise": True, "groups": 8, "per_group": True},
}


@pytest.mark.parametrize("how", ROUTES)
def test_moe_route(backend: str, how: str) -> None:
    logits = torch.randn(50, 16)
    ids, weights, counts = registry.ops_of(backend)["moe_route"](logits, **ROUTES[how])
    want_ids, want_weights, want_counts = reference.moe_route(logits, **ROUTES[how])
    assert ids.equal(want_ids)
    close(weights, want_weights)
    assert counts.equal(want_counts)


def test_moge_takes_the_same_number_from_every_group(backend: str) -> None:
    ids, _, counts = registry.ops_of(backend)["moe_route"](torch.randn(64, 64), 8, True, groups=8, per_group=True)
    assert (ids // 8).sort(-1).values.equal(torch.arange(8).expand(64, 8))
    assert counts.view(8, 8).sum(-1).eq(64).all()


def test_routing_a_nan_still_names_experts(backend: str) -> None:
    logits = torch.randn(4, 8)
    logits[1] = torch.nan
    logits[2, 3] = torch.inf
    ids, _, counts = registry.ops_of(backend)["moe_route"](logits, 3, True)
    assert ids.min() >= 0
    assert ids.max() < 8
    assert all(len(set(row)) == 3 for row in ids.tolist())
    assert counts.sum() == 12


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 24), (3, 4, 40), (0, 8)])
def test_rms_norm(backend: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.randn(shape[1:]).to(dtype)
    run = registry.ops_of(backend)["rms_norm"]
    for more in (None, residual):
        for got, want in zip(run(x, weight, 1e-6, more), reference.rms_norm(x, weight, 1e-6, more), strict=True):
            close(got, want)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_rope_of_a_slice(backend: str, dtype: torch.dtype) -> None:
    cos, sin = (t[torch.tensor([0, 7, 3])] for t in ops.rope_table(16, 9, 1e4, dtype))
    x = torch.randn(3, 6, 16).to(dtype)[:, :4]
    close(registry.ops_of(backend)["rope"](x, cos, sin), reference.rope(x, cos, sin))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("width", [1, 5, 16, 100])
def test_silu_and_mul(backend: str, dtype: torch.dtype, width: int) -> None:
    x = (torch.randn(7, 2 * width) * 5).to(dtype)
    close(registry.ops_of(backend)["silu_and_mul"](x), reference.silu_and_mul(x))


def test_silu_of_extremes(backend: str) -> None:
    gate = torch.tensor([0.0, -200.0, 200.0, -88.0, 88.0, torch.inf, torch.nan])
    got = registry.ops_of(backend)["silu_and_mul"](torch.cat((gate, torch.ones(7))).unsqueeze(0))
    torch.testing.assert_close(got[0, :6], torch.tensor([0.0, 0.0, 200.0, 0.0, 88.0, torch.inf]))
    assert got[0, 6].isnan()


LENS = [
    [(1, 9)],
    [(1, 70), (1, 1), (1, 64), (1, 65)],
    [(6, 6)],
    [(3, 130), (70, 70)],
    [(1, 7), (4, 9), (8, 8), (2, 12)],
]


def paged(lens: list[tuple[int, int]], size: int = 4) -> tuple[ops.AttentionBatch, int]:
    """A batch whose blocks are scattered, and how many blocks there are."""
    total = sum(-(-keys // size) for _, keys in lens) + 3
    free = iter(torch.randperm(total).tolist())
    tables = [[next(free) for _ in range(-(-keys // size))] for _, keys in lens]
    return ops.attention_batch([n for n, _ in lens], [m for _, m in lens], tables, size), total


@pytest.mark.parametrize("lens", LENS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 8), (8, 1, 32), (3, 3, 20)])
def test_paged_attention(backend: str, lens: list[tuple[int, int]], heads: int, kv_heads: int, dim: int) -> None:
    batch, blocks = paged(lens)
    kv, q = torch.randn(2, blocks, 4, kv_heads, dim), torch.randn(batch.rows, heads, dim)
    run = registry.ops_of(backend)["paged_attention"]
    close(run(q, kv, batch, dim**-0.5), reference.paged_attention(q, kv, batch, dim**-0.5))


def test_paged_attention_in_bfloat16(compiled: str) -> None:
    batch, blocks = paged(LENS[4])
    kv, q = torch.randn(2, blocks, 4, 2, 16).to(BF16), torch.randn(batch.rows, 4, 16).to(BF16)
    want = reference.paged_attention(q.float(), kv.float(), batch, 0.25).to(BF16)
    close(ops.paged_attention(q, kv, batch, 0.25), want)


def test_attention_of_a_row_is_the_same_alone_and_in_a_chunk(compiled: str) -> None:
    kv, q = torch.randn(2, 40, 4, 2, 16), torch.randn(90, 4, 16)
    table = torch.randperm(40).tolist()
    whole = ops.paged_attention(q, kv, ops.attention_batch([90], [90], [table], 4), 0.25)
    for first, rows in ((0, 1), (5, 1), (63, 2), (64, 26), (89, 1)):
        part = ops.attention_batch([rows], [first + rows], [table], 4)
        assert ops.paged_attention(q[first : first + rows], kv, part, 0.25).equal(whole[first : first + rows])


def test_mla_attention(backend: str) -> None:
    batch, blocks = paged(LENS[4])
    cache, q = torch.randn(blocks, 4, 24), torch.randn(batch.rows, 4, 24)
    got = registry.ops_of(backend)["mla_attention"](q, cache, batch, 0.2, 16)
    close(got, reference.mla_attention(q, cache, batch, 0.2, 16))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_cache_moves(backend: str, dtype: torch.dtype) -> None:
    run = registry.ops_of(backend)
    source, target = torch.randn(3, 2, 6, 4, 2, 8).to(dtype), torch.zeros(3, 2, 5, 4, 2, 8, dtype=dtype)
    data = run["kv_gather"](source, torch.tensor([4, 0]))
    assert data.equal(reference.kv_gather(source, torch.tensor([4, 0])))
    run["kv_scatter"](target, torch.tensor([1, 3]), data)
    assert target[:, :, [1, 3]].equal(source[:, :, [4, 0]])
    k, v = torch.randn(3, 5, 8).to(dtype)[:, :2], torch.randn(3, 2, 8).to(dtype)
    run["kv_write"](target[0], torch.tensor([0, 9, 19]), k, v)
    flat = target[0].flatten(1, 2)
    assert flat[0, [0, 9, 19]].equal(k)
    assert flat[1, [0, 9, 19]].equal(v)


def draws(rows: int, temperature: float, top_k: int, top_p: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Equal options for all rows, uniforms spread over [0, 1)."""
    spread = (torch.arange(rows, dtype=torch.float64) + 0.5) / max(rows, 1)
    return torch.full((rows,), temperature), torch.full((rows,), top_k), torch.full((rows,), top_p), spread


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0, 0, 1), (1, 0, 1), (0.7, 5, 1), (1.3, 0, 0.6), (1, 7, 0.5)]
)
def test_sample(backend: str, temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(1, 50).expand(64, 50).contiguous()
    options = draws(64, temperature, top_k, top_p)
    got = registry.ops_of(backend)["sample"](logits, *options)
    assert got.equal(reference.sample(logits, *options))
    if top_k:
        assert len(got.unique()) <= top_k


def test_sample_at_the_edges_of_chance(backend: str) -> None:
    run, logits = registry.ops_of(backend)["sample"], torch.full((2, 6), -torch.inf)
    logits[:, 2], logits[:, 4] = 0.0, 0.0
    uniform = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    got = run(logits, torch.ones(2), torch.zeros(2, dtype=torch.int64), torch.ones(2), uniform)
    assert got.tolist() == [2, 4]


@pytest.mark.parametrize("vocab", [1, 7, 64, 65, 300, 1000])
def test_sample_of_any_distribution(backend: str, vocab: int) -> None:
    """Ties, masked tokens, flat and steep ones, cuts at any place."""
    rows, f64 = 120, torch.float64
    logits = (torch.randn(rows, vocab) * torch.tensor([0.1, 2.0, 9.0]).repeat(rows // 3)[:, None] * 4).round() / 4
    logits[torch.rand(rows, vocab) < 0.2] = -torch.inf
    logits[:, vocab // 2] = 1.0
    temperature, top_p = torch.rand(rows, dtype=f64) * 2 + 0.05, torch.rand(rows, dtype=f64)
    top_p[::4] = 1.0
    top_k = torch.randint(0, vocab + 3, (rows,)) * (torch.arange(rows) % 3 == 0)
    options = temperature, top_k, top_p, torch.rand(rows, dtype=f64)
    assert registry.ops_of(backend)["sample"](logits, *options).equal(reference.sample(logits, *options))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_of_moe(compiled: str, data: st.DataObject) -> None:
    rows, count = data.draw(st.integers(0, 60)), data.draw(st.integers(1, 9))
    top_k, hidden, wide = data.draw(st.integers(1, count)), data.draw(st.integers(1, 70)), data.draw(st.integers(1, 40))
    stored, threads = data.draw(st.sampled_from([F32, BF16, INT8])), data.draw(st.integers(1, 3))
    packed, plain = experts(count, hidden, wide, compiled, stored, data.draw(st.sampled_from([0, 0, 9])))
    x, weights = torch.randn(rows, hidden), torch.rand(rows, top_k)
    ids = torch.randint(-1, count, (rows, top_k))
    torch.set_num_threads(threads)
    got = ops.packed_moe(x, packed, ids, weights)
    torch.set_num_threads(1)
    close(got, reference.packed_moe(x, plain, ids, weights), scale=10.0)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_of_attention(compiled: str, data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=5))
    lens = [(data.draw(st.integers(1, n)), n) for n in keys]
    lens.sort(key=lambda pair: pair[0] != 1)
    kv_heads, dim = data.draw(st.integers(1, 3)), 2 * data.draw(st.integers(1, 20))
    heads, size = kv_heads * data.draw(st.integers(1, 4)), data.draw(st.integers(1, 20))
    batch, blocks = paged(lens, size)
    kv, q = torch.randn(2, blocks, size, kv_heads, dim), torch.randn(batch.rows, heads, dim)
    close(ops.paged_attention(q, kv, batch, 0.3), reference.paged_attention(q, kv, batch, 0.3))


ONE = ops.attention_batch([1], [1], [[0]], 4)
T = torch.zeros
IDS = torch.zeros(1, 1, dtype=torch.int64)


def moe(x: Tensor, ids: Tensor, weights: Tensor, backend: str) -> Tensor:
    return ops.packed_moe(x, ops.pack_experts(torch.ones(2, 4, 3), torch.ones(2, 3, 2), backend=backend), ids, weights)


WRONG: dict[str, Any] = {
    "packed_moe: x": lambda b: moe(T(1, 4), IDS, T(1, 1), b),
    "packed_moe: x must be floating": lambda b: moe(T(1, 3, dtype=torch.int64), IDS, T(1, 1), b),
    "packed_moe: ids must be int64": lambda b: moe(T(1, 3), T(1, 1), T(1, 1), b),
    r"packed_moe: ids must be in -1..1, got 0..2": lambda b: moe(T(2, 3), torch.tensor([[0], [2]]), T(2, 1), b),
    r"packed_moe: ids must be in -1..1, got -2..-2": lambda b: moe(T(1, 3), IDS - 2, T(1, 1), b),
    "packed_moe: weights must be floating": lambda b: moe(T(1, 3), IDS, IDS, b),
    "pack: w": lambda b: ops.pack(T(3), backend=b),
    "pack: w must be floating": lambda b: ops.pack(T(3, 3, dtype=torch.int64), backend=b),
    "pack: dtype": lambda b: ops.pack(T(3, 3), torch.float64, backend=b),
    "pack: w must have an even": lambda b: ops.pack(T(3, 3), gated=True, backend=b),
    "pack_experts: w2": lambda b: ops.pack_experts(T(2, 4, 3), T(2, 2, 3), backend=b),
    "pack_experts: shared13": lambda b: ops.pack_experts(T(2, 4, 3), T(2, 3, 2), None, T(4, 2), T(3, 2), backend=b),
    "pack_experts: shared2": lambda b: ops.pack_experts(T(2, 4, 3), T(2, 3, 2), None, T(4, 3), backend=b),
    "linear: x": lambda b: ops.linear(T(1, 4), ops.pack(T(2, 3), backend=b)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_argument_is_named(backend: str, what: str) -> None:
    with pytest.raises(ValueError, match=f"^{what}"):
        WRONG[what](backend)


ALSO_WRONG: dict[str, Any] = {
    "rms_norm: x must be floating": lambda: ops.rms_norm(T(2, 4, dtype=torch.int64), T(4), 1e-6),
    "rms_norm: weight must be torch.float32": lambda: ops.rms_norm(T(2, 4), T(4, dtype=BF16), 1e-6),
    "rope: cos must be torch.float32": lambda: ops.rope(T(1, 1, 2), T(1, 2, dtype=BF16), T(1, 2)),
    "moe_route: scoring": lambda: ops.moe_route(T(1, 4), 1, True, "tanh"),
    "moe_route: bias": lambda: ops.moe_route(T(1, 4), 1, True, bias=T(3)),
    "moe_route: groups": lambda: ops.moe_route(T(1, 4), 1, True, groups=3),
    "moe_route: top_groups": lambda: ops.moe_route(T(1, 4), 1, True, groups=2, top_groups=3),
    "moe_route: group_best": lambda: ops.moe_route(T(1, 4), 1, True, groups=2, top_groups=1, group_best=3),
    "moe_route: top_k must be a multiple": lambda: ops.moe_route(T(1, 4), 1, True, groups=2, per_group=True),
    "moe_route: top_k must be at most": lambda: ops.moe_route(T(1, 4), 3, True, groups=2, top_groups=1),
    "paged_attention: block_tables": lambda: ops.paged_attention(
        T(1, 2, 8), T(2, 2, 4, 2, 8), ops.attention_batch([1], [1], [[2]], 4), 1.0
    ),
    "paged_attention: kv must have blocks": lambda: ops.paged_attention(T(1, 2, 8), T(2, 2, 8, 2, 8), ONE, 1.0),
    "mla_write: cache": lambda: ops.mla_write(T(2, 4), IDS[0], T(1, 4)),
    "mla_write: rows": lambda: ops.mla_write(T(2, 4, 8), IDS[0], T(1, 4)),
    "mla_attention: latent": lambda: ops.mla_attention(T(1, 2, 8), T(2, 4, 8), ONE, 1.0, 9),
    "attention_batch: query_lens": lambda: ops.attention_batch([3], [2], [[0]], 4),
    "attention_batch: block_tables": lambda: ops.attention_batch([1], [5], [[0]], 4),
    "attention_batch: kv_lens": lambda: ops.attention_batch([1], [1, 2], [[0]], 4),
    "kv_write: slots": lambda: ops.kv_write(T(2, 2, 4, 2, 8), torch.tensor([8]), T(1, 2, 8), T(1, 2, 8)),
    "kv_gather: block": lambda: ops.kv_gather(T(1, 2, 2, 4, 2, 8), torch.tensor([2])),
    "kv_scatter: data must be": lambda: ops.kv_scatter(
        T(1, 2, 2, 4, 2, 8), torch.tensor([1]), T(1, 1, 2, 4, 2, 8, dtype=BF16)
    ),
    "sample: top_p": lambda: ops.sample(T(2, 4), T(2), torch.zeros(2, dtype=torch.int64), T(1), T(2)),
}


@pytest.mark.parametrize("what", ALSO_WRONG)
def test_a_wrong_argument_of_other_ops_is_named(compiled: str, what: str) -> None:
    with pytest.raises(ValueError, match=f"^{what}"):
        ALSO_WRONG[what]()


def test_strided_arguments_count_as_their_values(compiled: str) -> None:
    packed, _ = experts(4, 16, 8, compiled)
    x = torch.randn(16, 12).t()
    ids, weights, _ = ops.moe_route(torch.randn(4, 12).t(), 2, True)
    close(ops.packed_moe(x, packed, ids, weights), ops.packed_moe(x.contiguous(), packed, ids, weights))


def test_other_dtypes_and_gradients_go_to_the_definition() -> None:
    x = torch.randn(3, 8, dtype=torch.float64)
    assert ops.silu_and_mul(x).equal(reference.silu_and_mul(x))
    grown = torch.randn(3, 8, requires_grad=True)
    ops.silu_and_mul(grown).sum().backward()
    assert grown.grad is not None
