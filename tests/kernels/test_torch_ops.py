"""The operators of torch: each passes torch's own check of operators, and a compiled function keeps them whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, library

import omni_kernels as ops
from omni_kernels import torch_ops

OURS: Any = torch.ops.omni_kernels


def packed(dtype: torch.dtype, row_bits: int = 0) -> ops.PackedExperts:
    w13, w2, shared = torch.randn(4, 16, 12) / 3, torch.randn(4, 12, 8) / 3, torch.randn(10, 12)
    return ops.pack_experts(w13, w2, dtype, shared, torch.randn(12, 5), row_bits=row_bits)


def chosen(rows: int) -> tuple[Tensor, Tensor]:
    ids, weights, _ = ops.moe_route(torch.randn(rows, 4), 2, True)
    return ids, weights


CALLS: dict[str, Any] = {
    "rms_norm": lambda: (torch.randn(3, 8), torch.rand(8), 1e-6),
    "add_rms_norm": lambda: (torch.randn(3, 8), torch.rand(8), 1e-6, torch.randn(3, 8)),
    "rope": lambda: (torch.randn(3, 2, 8), torch.rand(3, 8), torch.rand(3, 8)),
    "silu_and_mul": lambda: (torch.randn(2, 3, 8),),
    "moe_route": lambda: (torch.randn(3, 8), 2, True, "sigmoid", torch.rand(8), 4, 2),
    "packed_moe": lambda: (torch.randn(3, 12), *torch_ops.experts_arguments(packed(torch.float32)), *chosen(3)),
    "kv_write": lambda: (torch.zeros(2, 3, 4, 2, 8), torch.tensor([5, 0]), torch.randn(2, 2, 8), torch.randn(2, 2, 8)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("compiled")
def test_torch_accepts_each(name: str) -> None:
    library.opcheck(getattr(OURS, name).default, CALLS[name]())


@pytest.mark.parametrize(
    ("dtype", "row_bits"), [(torch.float32, 0), (torch.bfloat16, 0), (torch.int8, 0), (torch.int8, 8)]
)
def test_experts_go_through_as_they_are(compiled: str, dtype: torch.dtype, row_bits: int) -> None:
    experts = packed(dtype, row_bits)
    x, (ids, weights) = torch.randn(6, 12), chosen(6)
    got = OURS.packed_moe(x, *torch_ops.experts_arguments(experts), ids, weights)
    assert got.equal(ops.packed_moe(x, experts, ids, weights))


def test_a_compiled_layer_keeps_them_whole() -> None:
    experts = torch_ops.experts_arguments(packed(torch.float32))
    gate, norm = torch.randn(4, 12), torch.rand(12)

    def layer(x: Tensor) -> Tensor:
        normed = OURS.rms_norm(x, norm, 1e-6)
        ids, weights, _ = OURS.moe_route(normed @ gate.t(), 2, True)
        y: Tensor = x + OURS.packed_moe(normed, *experts, ids, weights)
        return y

    nodes: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    x = torch.randn(5, 12)
    compiled_layer: Any = torch.compile(layer, backend=keep, fullgraph=True)
    torch.testing.assert_close(compiled_layer(x), layer(x))
    ours = [name for name in nodes if name.startswith("omni_kernels.")]
    assert ours == [f"omni_kernels.{name}" for name in ("rms_norm", "moe_route", "packed_moe")]


def test_a_wrong_argument_is_named_here_too() -> None:
    with pytest.raises(ValueError, match=r"^silu_and_mul: x must have an even last axis"):
        OURS.silu_and_mul(torch.zeros(2, 3))
