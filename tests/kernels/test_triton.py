"""The Triton kernels without a GPU: interpreted for their results, compiled for H100/H200 and A100 for their code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from omni_kernels.triton.compile import compile_for
from omni_kernels.triton.tuning import tiles

HERE = Path(__file__).parent
QWEN = (2048, 768)
DEEPSEEK = (7168, 2048)
SHARED_BYTES = {90: 227 << 10, 80: 163 << 10}


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """Of all cases, from one process in which Triton interprets."""
    done = subprocess.run(
        [sys.executable, str(HERE / "interpreted.py")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_interpreted_results_equal_the_definition(errors: dict[str, float]) -> None:
    limits = {"float16": 2e-3, "bfloat16": 2e-2, "float8": 1e-3}
    assert len(errors) == 6 + 5 + 2 + 3
    wrong = {
        name: value
        for name, value in errors.items()
        if value > next((limit for dtype, limit in limits.items() if f" {dtype} " in name), 2e-6)
    }
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "capability", "rows_an_expert"),
    [
        ("gate_up_fp8", 90, 32),
        ("down_fp8", 90, 32),
        ("gate_up", 90, 32),
        ("down", 90, 32),
        ("gate_up", 90, 1),
        ("gate_up", 80, 32),
        ("down", 80, 1),
    ],
)
def test_products_compile_to_tensor_cores_and_async_copies(kernel: str, capability: int, rows_an_expert: int) -> None:
    compiled = compile_for(kernel, capability, *QWEN, rows_an_expert)
    ptx = compiled.asm["ptx"]
    assert ptx.count("cp.async.cg") + ptx.count("cp.async.ca") >= 8
    if capability == 90 and rows_an_expert > 16:
        assert ptx.count("wgmma.mma_async") >= 4
    else:
        assert ptx.count("mma.sync") >= 8
    assert compiled.metadata.shared <= SHARED_BYTES[capability]
    assert ".local" not in ptx.split("{", 1)[1]
    assert len(compiled.asm["cubin"]) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["gate_up_fp8", "down_fp8"])
def test_float8_rows_and_weights_reach_the_float8_units(kernel: str) -> None:
    ptx = compile_for(kernel, 90, *DEEPSEEK, 32).asm["ptx"]
    assert "e4m3.e4m3" in ptx
    assert compile_for(kernel, 90, *DEEPSEEK, 1).asm["ptx"].count("mma.sync") >= 4


@pytest.mark.slow
def test_large_shapes_index_the_weights_in_64_bits() -> None:
    ptx = compile_for("gate_up", 90, *DEEPSEEK, 32).asm["ptx"]
    assert "mul.wide.s32" in ptx or "mul.lo.s64" in ptx or "mad.lo.s64" in ptx


@pytest.mark.slow
def test_combine_has_wide_loads_and_no_atomics() -> None:
    ptx = compile_for("combine", 90, *QWEN, 1).asm["ptx"]
    assert "ld.global.v4" in ptx
    assert "atom." not in ptx
    assert "red." not in ptx


@pytest.mark.parametrize("chip", ["sm_90", "sm_80", "ascend"])
@pytest.mark.parametrize("rows_an_expert", [0.1, 16, 17, 1000])
@pytest.mark.parametrize(("hidden", "wide"), [QWEN, DEEPSEEK, (48, 16)])
def test_tiles_divide_and_agree(chip: str, rows_an_expert: float, hidden: int, wide: int) -> None:
    up, down = tiles(chip, "gate_up", rows_an_expert, wide, hidden), tiles(chip, "down", rows_an_expert, hidden, wide)
    assert wide % up.bn == hidden % up.bk == hidden % down.bn == wide % down.bk == 0
    assert up.bm == down.bm


def test_sizes_that_16_does_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="gate_up needs sizes that 16 divides, got n=24 k=64"):
        tiles("sm_90", "gate_up", 1, 24, 64)
