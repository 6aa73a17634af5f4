"""Compiles the kernels for a chip that need not be there: how the tests look at the machine code.

Arguments are declared as a launch would find them, pointers and strides divisible by 16: without that the compiler
neither pipelines nor uses wide copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from omni_kernels.triton.fp8_kernels import down_fp8_kernel, gate_up_fp8_kernel
from omni_kernels.triton.moe_kernels import combine_kernel, down_kernel, gate_up_kernel
from omni_kernels.triton.tuning import fp8_tiles, tiles

POINTERS: Final[Mapping[str, Mapping[str, str]]] = {
    "gate_up": {
        "x": "*{t}", "w13": "*{t}", "hidden": "*{t}", "source": "*i32", "tile_expert": "*i32", "tile_row": "*i32",
        "expert_end": "*i32", "num_tiles": "i32",
    },
    "down": {
        "hidden": "*{t}", "w2": "*{t}", "y": "*{t}", "slot": "*i32", "share": "*fp32", "tile_expert": "*i32",
        "tile_row": "*i32", "expert_end": "*i32", "num_tiles": "i32",
    },
    "gate_up_fp8": {
        "x": "*fp8e4nv", "x_scale": "*fp32", "w13": "*fp8e4nv", "w13_scale": "*fp32", "hidden": "*{t}",
        "source": "*i32", "tile_expert": "*i32", "tile_row": "*i32", "expert_end": "*i32", "num_tiles": "i32",
    },
    "down_fp8": {
        "hidden": "*fp8e4nv", "hidden_scale": "*fp32", "w2": "*fp8e4nv", "w2_scale": "*fp32", "y": "*{t}",
        "slot": "*i32", "share": "*fp32", "tile_expert": "*i32", "tile_row": "*i32", "expert_end": "*i32",
        "num_tiles": "i32",
    },
    "combine": {"y": "*{t}", "ids": "*i32", "out": "*{t}", "num_rows": "i32"},
}  # fmt: skip
KERNELS: Final[Mapping[str, Any]] = {
    "gate_up": gate_up_kernel,
    "down": down_kernel,
    "combine": combine_kernel,
    "gate_up_fp8": gate_up_fp8_kernel,
    "down_fp8": down_fp8_kernel,
}


def constants(kernel: str, chip: str, hidden: int, wide: int, rows_an_expert: float) -> tuple[dict[str, Any], int, int]:
    """(constexpr arguments, warps, stages) of a kernel for a shape, from the tuning file."""
    if kernel == "combine":
        return {"H": hidden, "K": 8, "BH": 1024}, 4, 1
    if kernel.endswith("_fp8"):
        tile = fp8_tiles(rows_an_expert)
        sizes = {"H": hidden, "I": wide, "BM": tile.bm, "BN": tile.bn, "GROUP": tile.bk, "WIDE_DOT": False}
        return sizes, tile.warps, tile.stages
    n, k = (wide, hidden) if kernel == "gate_up" else (hidden, wide)
    tile = tiles(chip, kernel, rows_an_expert, n, k)
    values: dict[str, Any] = {"H": hidden, "I": wide, "BM": tile.bm, "BN": tile.bn, "BK": tile.bk, "WIDE_DOT": False}
    if kernel == "gate_up":
        values["GATHERED"] = chip == "ascend"
    return values, tile.warps, tile.stages


def compile_for(
    kernel: str, capability: int, hidden: int, wide: int, rows_an_expert: float, dtype: str = "bf16"
) -> Any:
    """The compiled kernel for NVIDIA `capability` (90, 80): `.asm["ptx"]`, `.metadata`."""
    values, warps, stages = constants(kernel, f"sm_{capability}", hidden, wide, rows_an_expert)
    function = KERNELS[kernel]
    names = list(function.arg_names)
    types = {name: kind.format(t=dtype) for name, kind in POINTERS[kernel].items()}
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types.get(name, "").startswith("*")}
    source = ASTSource(function, signature, {(names.index(name),): value for name, value in values.items()}, aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
