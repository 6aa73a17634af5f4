"""Lowers the Triton kernels for an Ascend 910B, without CANN and without an NPU, and prints what came out as JSON.

Runs where triton-ascend is installed (not together with triton: both own the import name). The last stage, machine
code, needs CANN's compiler; the one before it is linalg, which is looked at here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("TRITON_ASCEND_ARCH", "Ascend910B3")

TRITON = Path(__file__).resolve().parents[1] / "omni_kernels" / "triton"
HIDDEN, WIDE, TOP_K = 2048, 768, 8


def load(name: str) -> ModuleType:
    """A module of the package by file: the package itself imports torch, which need not be here."""
    spec = importlib.util.spec_from_file_location(name, TRITON / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def requests() -> dict[str, tuple[str, dict[str, str], dict[str, Any]]]:
    """Kernel -> (function, types of the arguments that are not constants, constants)."""
    tile = {"H": HIDDEN, "I": WIDE, "BM": 64, "BN": 64, "BK": 128, "WIDE_DOT": False}
    work = {"tile_expert": "*i32", "tile_row": "*i32", "expert_end": "*i32", "num_tiles": "i32"}
    rows = {"x": "*bf16", "w13": "*bf16", "hidden": "*bf16", "source": "*i32", **work}
    down = {"hidden": "*bf16", "w2": "*bf16", "y": "*bf16", "slot": "*i32", "share": "*fp32", **work}
    combine = {"y": "*bf16", "ids": "*i32", "out": "*bf16", "num_rows": "i32"}
    return {
        "gate_up": ("gate_up_kernel", rows, {**tile, "GATHERED": True}),
        "down": ("down_kernel", down, tile),
        "combine": ("combine_kernel", combine, {"H": HIDDEN, "K": TOP_K, "BH": 1024}),
    }


def lower(function: Any, types: dict[str, str], constants: dict[str, Any]) -> str:
    """The linalg form of a kernel."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource, make_backend

    backend = make_backend(GPUTarget("npu", os.environ["TRITON_ASCEND_ARCH"], 0))
    source = ASTSource(function, signature=types, constants=constants)
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options)
    module = source.make_ir(options, backend.get_codegen_implementation(), backend.get_module_map(), context)
    metadata: dict[str, Any] = {"hash": "", **options.__dict__}
    for stage in ("ttir", "ttadapter"):
        module = stages[stage](module, metadata)
    return str(module)


def main() -> None:
    """Print {kernel: {"matmul": products, "discrete": accesses row by row}}."""
    kernels = load("moe_kernels")
    found = {}
    for name, (function, types, constants) in requests().items():
        text = lower(getattr(kernels, function), types, constants)
        found[name] = {"matmul": text.count("linalg.matmul"), "discrete": text.count("DiscreteMemAccess")}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
