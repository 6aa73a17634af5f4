"""Every op with every fault in every argument: an error that names op and argument, never a crash or a wrong result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import omni_kernels as ops
from omni_kernels.packing import quantise_fp8

Arguments = dict[str, Any]
BATCH = ops.attention_batch([1, 3], [5, 3], [[1, 0], [2]], 4)


def _ids(rows: int) -> Tensor:
    return torch.arange(rows * 2).view(rows, 2) % 4


def _moe(rows: int) -> Arguments:
    w13, w2 = torch.randn(4, 16, 12), torch.randn(4, 12, 8)
    counts = torch.bincount(_ids(rows).flatten(), minlength=4)
    chosen = {"ids": _ids(rows), "weights": torch.rand(rows, 2)}
    return {"x": torch.randn(rows, 12), "w13": w13, "w2": w2, **chosen, "counts": counts}


def _moe_fp8(rows: int) -> Arguments:
    (w13, s13), (w2, s2) = quantise_fp8(torch.randn(4, 256, 128)), quantise_fp8(torch.randn(4, 128, 128))
    weights = {"w13": w13, "w13_scale": s13, "w2": w2, "w2_scale": s2}
    return {"x": torch.randn(rows, 128), **weights, "ids": _ids(rows), "weights": torch.rand(rows, 2)}


def _blocks(rows: int) -> Arguments:
    return {"w": torch.randn(rows, 12).to(torch.float8_e4m3fn), "scale": torch.rand(rows, 3), "block": (1, 4)}


def _packed(backend: str) -> Callable[[int], Arguments]:
    def make(rows: int) -> Arguments:
        experts = ops.pack_experts(torch.randn(4, 16, 12), torch.randn(4, 12, 8), backend=backend)
        return {"x": torch.randn(rows, 12), "experts": experts, "ids": _ids(rows), "weights": torch.rand(rows, 2)}

    return make


def _sample(rows: int) -> Arguments:
    n = torch.ones(rows)
    return {
        "logits": torch.randn(rows, 9), "temperature": n, "top_k": torch.full((rows,), 3), "top_p": n * 0.9,
        "uniform": n / 2,
    }  # fmt: skip


def _write(rows: int) -> Arguments:
    kv = torch.zeros(2, 3, 4, 2, 8)
    return {"kv": kv, "slots": torch.arange(rows), "k": torch.randn(rows, 2, 8), "v": torch.randn(rows, 2, 8)}


def _scatter(rows: int) -> Arguments:
    return {"kv": torch.zeros(2, 2, 5, 4, 2, 8), "blocks": torch.arange(rows), "data": torch.randn(rows, 2, 2, 4, 2, 8)}


OPS: Mapping[str, tuple[Callable[..., Any], Callable[[int], Arguments]]] = {
    "rms_norm": (
        ops.rms_norm,
        lambda n: {"x": torch.randn(n, 12), "weight": torch.rand(12), "eps": 1e-6, "residual": torch.randn(n, 12)},
    ),
    "rope": (
        ops.rope,
        lambda n: {"x": torch.randn(n, 3, 8), "cos": torch.rand(n, 8), "sin": torch.rand(n, 8)},
    ),
    "silu_and_mul": (ops.silu_and_mul, lambda n: {"x": torch.randn(n, 12)}),
    "moe_route": (
        ops.moe_route,
        lambda n: {"logits": torch.randn(n, 8), "top_k": 2, "renormalise": True, "bias": torch.rand(8)},
    ),
    "fused_moe": (ops.fused_moe, _moe),
    "fused_moe_fp8": (ops.fused_moe_fp8, _moe_fp8),
    "dequantise_fp8": (ops.dequantise_fp8, _blocks),
    "packed_moe": (ops.packed_moe, _packed("cpu" if ops.backends()["cpu"] == "ok" else "torch")),
    "packed_moe by torch": (ops.packed_moe, _packed("torch")),
    "linear": (ops.linear, lambda n: {"x": torch.randn(n, 12), "w": ops.pack(torch.randn(5, 12))}),
    "paged_attention": (
        ops.paged_attention,
        lambda n: {"q": torch.randn(n, 4, 8), "kv": torch.randn(2, 3, 4, 2, 8), "batch": BATCH, "scale": 0.3},
    ),
    "mla_attention": (
        ops.mla_attention,
        lambda n: {"q": torch.randn(n, 4, 8), "cache": torch.randn(3, 4, 8), "batch": BATCH, "scale": 0.3, "latent": 6},
    ),
    "kv_write": (ops.kv_write, _write),
    "kv_gather": (ops.kv_gather, lambda n: {"kv": torch.randn(2, 2, 5, 4, 2, 8), "blocks": torch.arange(n)}),
    "kv_scatter": (ops.kv_scatter, _scatter),
    "sample": (ops.sample, _sample),
}
ROWS = 4  # as BATCH has


def _wrong_dtype(x: Tensor) -> Tensor:
    return x.to(torch.complex64) if x.is_floating_point() else x.double()


FAULTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "dtype": _wrong_dtype,
    "device": lambda x: x.to("meta"),
    "rank": lambda x: x.unsqueeze(0),
    "length": lambda x: torch.cat((x, x[:1])),
    "width": lambda x: x[..., : x.shape[-1] - 1],
}
HARMLESS = {
    ("kv_gather", "blocks", "length"), ("kv_gather", "blocks", "width"), ("kv_gather", "kv", "length"),
    ("kv_gather", "kv", "width"), ("moe_route", "logits", "length"), ("silu_and_mul", "x", "length"),
    ("silu_and_mul", "x", "rank"), ("linear", "x", "length"), ("mla_attention", "cache", "length"),
    ("dequantise_fp8", "w", "width"),
    ("rms_norm", "weight", "rank"), ("kv_gather", "kv", "dtype"), ("sample", "logits", "width"),
}  # fmt: skip
"""Other values, and no fault."""
BLAMED = {
    ("rms_norm", "x", "rank"): "residual", ("rms_norm", "x", "length"): "residual",
    ("rms_norm", "x", "width"): "weight",
    ("paged_attention", "q", "width"): "kv", ("mla_attention", "q", "width"): "cache",
    ("kv_scatter", "kv", "dtype"): "data", ("rope", "x", "length"): "cos", ("moe_route", "logits", "width"): "bias",
    ("fused_moe", "x", "length"): "ids", ("fused_moe", "x", "width"): "w13", ("fused_moe", "w2", "length"): "w13",
    ("fused_moe", "w2", "width"): "w13", ("fused_moe", "ids", "width"): "weights",
    ("fused_moe_fp8", "x", "length"): "ids", ("fused_moe_fp8", "w2", "length"): "w13",
    ("fused_moe_fp8", "ids", "width"): "weights", ("packed_moe", "x", "length"): "ids",
    ("packed_moe", "ids", "width"): "weights", ("kv_write", "slots", "length"): "k",
    ("kv_write", "slots", "width"): "k",
    ("kv_write", "kv", "width"): "k", ("kv_scatter", "kv", "length"): "data", ("kv_scatter", "kv", "width"): "data",
    ("kv_scatter", "blocks", "length"): "data", ("kv_scatter", "blocks", "width"): "data",
    ("sample", "logits", "length"): "temperature", ("fused_moe", "x", "device"): "w13",
    ("fused_moe_fp8", "x", "device"): "w13", ("dequantise_fp8", "w", "rank"): "scale",
    ("dequantise_fp8", "w", "length"): "scale", ("dequantise_fp8", "w", "device"): "scale",
}  # fmt: skip
"""Arguments that disagree: which of them is named."""


def _cases() -> list[Any]:
    cases = []
    for op, (_, make) in OPS.items():
        for argument, value in make(ROWS).items():
            if isinstance(value, Tensor):
                faults = [fault for fault in FAULTS if (op, argument, fault) not in HARMLESS]
                cases += [pytest.param(op, argument, fault, id=f"{op}-{argument}-{fault}") for fault in faults]
    return cases


@pytest.mark.parametrize(("op", "argument", "fault"), _cases())
def test_a_fault_is_named_with_op_and_argument(op: str, argument: str, fault: str) -> None:
    run, make = OPS[op]
    name = op.split()[0]
    arguments = make(ROWS)
    arguments[argument] = FAULTS[fault](arguments[argument])
    with pytest.raises(ValueError, match=rf"^{name}: ") as caught:
        run(**arguments)
    blamed = BLAMED.get((name, argument, fault), argument)
    said = str(caught.value)
    assert said.startswith((f"{name}: {blamed} ", f"{name}: {argument} ")) or (
        fault == "device" and said.startswith(f"{name}: ") and "meta" in said
    ), said
    assert "\n" not in said


@pytest.mark.parametrize("op", OPS)
def test_strided_arguments_give_the_same_result(op: str) -> None:
    run, make = OPS[op]
    plain = make(ROWS)
    strided = {name: _strided(v) if isinstance(v, Tensor) else v for name, v in plain.items()}
    assert any(isinstance(v, Tensor) and not v.is_contiguous() for v in strided.values())
    want, got = run(**plain), run(**strided)
    if want is None:  # written into kv
        want, got = plain["kv"], strided["kv"]
    for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (want, got)), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5)


def _strided(x: Tensor) -> Tensor:
    """The same values, every second element of a larger tensor."""
    if x.dtype == torch.float8_e4m3fn:
        return torch.stack((x.view(torch.uint8), x.view(torch.uint8)), -1)[..., 0].view(torch.float8_e4m3fn)
    return torch.stack((x, torch.full_like(x, 7)), -1)[..., 0]


@pytest.mark.parametrize("op", [op for op in OPS if "attention" not in op])
def test_no_rows_give_no_rows(op: str) -> None:
    run, make = OPS[op]
    result = run(**make(0))
    for part in result if isinstance(result, tuple) else (result,):
        assert part is None or part.shape[0] in (0, 8 if op == "moe_route" else 0)


@pytest.mark.parametrize("op", [op for op in OPS if op not in ("moe_route", "sample")])
def test_a_nan_reaches_no_other_row(op: str) -> None:
    run, make = OPS[op]
    arguments = make(ROWS)
    rows = arguments[next(name for name in ("x", "q", "k", "data", "kv", "w") if name in arguments)]
    if op == "kv_gather":
        rows[:, :, 1] = torch.nan
    else:
        rows[1] = torch.nan
    result = run(**arguments)
    first = result[0] if isinstance(result, tuple) else arguments["kv"] if result is None else result
    if result is None:
        assert first.isnan().sum() == rows.isnan().sum()
        return
    assert first[1].isnan().any()
    assert first[[0, 2, 3]].isfinite().all()


def test_a_nan_in_the_logits_still_draws_a_token() -> None:
    arguments = _sample(ROWS)
    arguments["logits"][1] = torch.nan
    tokens = ops.sample(**arguments)
    assert ((tokens >= 0) & (tokens < 9)).all()


@pytest.mark.parametrize("op", ["fused_moe", "fused_moe_fp8", "packed_moe", "packed_moe by torch"])
@pytest.mark.parametrize("bad", [4, -2, 2**40])
def test_an_expert_that_is_not_there_is_named(op: str, bad: int) -> None:
    run, make = OPS[op]
    arguments = make(ROWS)
    arguments["ids"][2, 1] = bad
    with pytest.raises(ValueError, match=rf"^{op.split()[0]}: ids must be in -1\.\.3"):
        run(**arguments)


@pytest.mark.parametrize("op", ["kv_write", "kv_gather", "kv_scatter"])
@pytest.mark.parametrize("bad", [-1, 99])
def test_a_place_outside_the_cache_is_named(op: str, bad: int) -> None:
    run, make = OPS[op]
    arguments = make(ROWS)
    name = "slots" if op == "kv_write" else "blocks"
    arguments[name][2] = bad
    with pytest.raises(ValueError, match=rf"^{op}: (slots|block)"):
        run(**arguments)


@pytest.mark.parametrize("op", ["fused_moe_fp8", "packed_moe", "packed_moe by torch", "fused_moe"])
def test_all_rows_to_one_expert_and_every_expert_chosen(op: str) -> None:
    run, make = OPS[op]
    arguments = make(ROWS)
    for ids in (torch.full((ROWS, 1), 2), torch.arange(4).expand(ROWS, 4)):
        arguments["ids"], arguments["weights"] = ids, torch.ones(ids.shape)
        if "counts" in arguments:
            arguments["counts"] = torch.bincount(ids.flatten(), minlength=4)
        assert run(**arguments).isfinite().all()
