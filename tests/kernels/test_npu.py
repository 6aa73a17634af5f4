"""The Ascend backend against a stand-in for torch_npu: which operators, with which arguments, with what result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import omni_kernels as ops
from omni_kernels import reference
from omni_kernels.npu.ops import NpuOps
from tests.kernels import fake_torch_npu

BF16 = torch.bfloat16


class Recorder:
    """Passes calls on and keeps the operators' names."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        operator = getattr(fake_torch_npu, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return operator(*args, **kwargs)

        return called


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def npu(recorder: Recorder) -> NpuOps:
    return NpuOps(recorder)


def close(got: Tensor, want: Tensor, limit: float = 2e-2) -> None:
    assert got.shape == want.shape
    assert float((got.float() - want.float()).abs().max()) <= limit * float(want.float().abs().max())


def layer(rows: int, experts: int = 4, top_k: int = 2) -> tuple[Tensor, ...]:
    """x, w13, w2, ids, weights, counts in bfloat16."""
    x, w13, w2 = torch.randn(rows, 32), torch.randn(experts, 48, 32) / 6, torch.randn(experts, 32, 24) / 5
    ids, weights, counts = reference.moe_route(torch.randn(rows, experts), top_k, True)
    return x.to(BF16), w13.to(BF16), w2.to(BF16), ids, weights, counts


@pytest.mark.parametrize("rows", [1, 9])
def test_fused_moe_takes_the_general_path(npu: NpuOps, recorder: Recorder, rows: int) -> None:
    arguments = layer(rows)
    close(npu.fused_moe(*arguments), reference.fused_moe(*arguments))
    products = ["npu_grouped_matmul", "npu_swiglu", "npu_grouped_matmul"]
    assert recorder.calls == ["npu_moe_init_routing_v2", *products, "npu_moe_finalize_routing"]


def test_a_choice_of_minus_one_takes_no_part(npu: NpuOps) -> None:
    x, w13, w2, ids, weights, _ = layer(6)
    ids[0], ids[2, 1] = -1, -1
    counts = torch.bincount(ids[ids >= 0], minlength=4)
    close(npu.fused_moe(x, w13, w2, ids, weights), reference.fused_moe(x, w13, w2, ids, weights, counts))


def test_float32_and_no_rows_go_to_the_definition(npu: NpuOps, recorder: Recorder) -> None:
    x, w13, w2, ids, weights, counts = layer(3)
    wide = (x.float(), w13.float(), w2.float(), ids, weights)
    assert npu.fused_moe(*wide).equal(reference.fused_moe(*wide, counts))
    assert npu.fused_moe(x[:0], w13, w2, ids[:0], weights[:0]).shape == (0, 32)
    assert not recorder.calls


def test_packed_experts_with_a_shared_one(npu: NpuOps) -> None:
    x, w13, w2, ids, weights, _ = layer(5)
    shared = (torch.randn(16, 32).to(BF16) / 6, torch.randn(32, 8).to(BF16) / 3)

    def experts(pack: Any) -> ops.PackedExperts:
        return ops.PackedExperts(pack(w13, None, True), pack(w2), pack(shared[0], None, True), pack(shared[1]))

    assert experts(npu.pack).backend == "npu"
    close(
        npu.packed_moe(x, experts(npu.pack), ids, weights),
        reference.packed_moe(x, experts(reference.pack), ids, weights),
    )


ROUTES: dict[str, tuple[int, dict[str, Any], list[str]]] = {
    "softmax": (8, {"top_k": 2, "renormalise": True}, ["npu_moe_gating_top_k_softmax"]),
    "raw": (8, {"top_k": 2, "renormalise": False}, ["npu_moe_gating_top_k_softmax"]),
    "sigmoid": (8, {"top_k": 2, "renormalise": True, "scoring": "sigmoid", "scale": 2.5}, ["npu_moe_gating_top_k"]),
    "deepseek": (
        256,
        {"top_k": 8, "renormalise": True, "scoring": "sigmoid", "groups": 8, "top_groups": 4, "scale": 2.5}
        | {"bias": torch.linspace(-0.1, 0.1, 256)},
        ["npu_moe_gating_top_k"],
    ),
    "other groups": (16, {"top_k": 2, "renormalise": True, "groups": 4, "top_groups": 2}, []),
    "moge": (64, {"top_k": 8, "renormalise": True, "groups": 8, "per_group": True}, []),
    "raw sigmoid": (8, {"top_k": 2, "renormalise": False, "scoring": "sigmoid"}, []),
}


@pytest.mark.parametrize("how", ROUTES)
def test_moe_route(npu: NpuOps, recorder: Recorder, how: str) -> None:
    experts, options, calls = ROUTES[how]
    logits = torch.randn(12, experts)
    ids, weights, counts = npu.moe_route(logits, **options)
    want_ids, want_weights, want_counts = reference.moe_route(logits, **options)
    assert ids.equal(want_ids)
    torch.testing.assert_close(weights, want_weights)
    assert counts.equal(want_counts)
    assert recorder.calls == calls


def test_row_ops(npu: NpuOps) -> None:
    x, residual, weight = torch.randn(3, 24), torch.randn(3, 24), torch.randn(24)
    for more in (None, residual):
        for got, want in zip(
            npu.rms_norm(x, weight, 1e-6, more), reference.rms_norm(x, weight, 1e-6, more), strict=True
        ):
            torch.testing.assert_close(got, want)
    torch.testing.assert_close(npu.silu_and_mul(x), reference.silu_and_mul(x))
    cos, sin = (t[2:5] for t in ops.rope_table(24, 9, 1e4))
    heads = torch.randn(3, 4, 24)
    torch.testing.assert_close(npu.rope(heads, cos, sin), reference.rope(heads, cos, sin))


@pytest.mark.parametrize("lens", [[(1, 9)], [(1, 9), (1, 3), (4, 4)], [(3, 11), (5, 5)]])
def test_paged_attention(npu: NpuOps, lens: list[tuple[int, int]]) -> None:
    free = iter(torch.randperm(20).tolist())
    tables = [[next(free) for _ in range(-(-keys // 4))] for _, keys in lens]
    batch = ops.attention_batch([n for n, _ in lens], [m for _, m in lens], tables, 4)
    q, kv = torch.randn(batch.rows, 4, 16).to(BF16), torch.randn(2, 20, 4, 2, 16).to(BF16)
    want = reference.paged_attention(q.float(), kv.float(), batch, 0.25)
    close(npu.paged_attention(q, kv, batch, 0.25), want)


def test_kv_write(npu: NpuOps) -> None:
    got, want = torch.zeros(2, 3, 4, 2, 8), torch.zeros(2, 3, 4, 2, 8)
    slots, k, v = torch.tensor([0, 5, 11]), torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    npu.kv_write(got, slots, k, v)
    reference.kv_write(want, slots, k, v)
    assert got.equal(want)
