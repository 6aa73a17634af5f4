"""Which backend serves which op on which device. Backends are looked for when the first op is called, not on import.

The first backend of a device that has an op serves it, so a backend may cover as few ops as it likes; `torch`, the
definition, covers all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from omni_kernels import reference

Op = Callable[..., Any]

OPS: Final = (
    "rms_norm",
    "rope",
    "silu_and_mul",
    "moe_route",
    "fused_moe",
    "fused_moe_fp8",
    "dequantise_fp8",
    "pack",
    "linear",
    "packed_moe",
    "paged_attention",
    "mla_attention",
    "mla_write",
    "kv_write",
    "kv_gather",
    "kv_scatter",
    "sample",
)
DEVICES: Final = ("cpu", "cuda", "npu")
TORCH: Final[Mapping[str, Op]] = {name: getattr(reference, name) for name in OPS}


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend that was looked for: its ops, none if it is not to be had, and then why."""

    name: str
    device: str
    ops: Mapping[str, Op]
    reason: str = ""


@cache
def cpu_library() -> ctypes.CDLL | None:
    """The compiled CPU kernels, if there are any here."""
    return _cpu()[0]


@cache
def _cpu() -> tuple[ctypes.CDLL | None, str]:
    from omni_kernels.cpu.native import find_library

    return find_library()


def _compiled() -> Backend:
    from omni_kernels.cpu.ops import CpuOps

    library, reason = _cpu()
    return Backend("cpu", "cpu", {} if library is None else CpuOps(library).table(), reason)


def _triton() -> Backend:
    if not torch.cuda.is_available():
        return Backend("triton", "cuda", {}, "no NVIDIA device")
    try:
        from omni_kernels.triton.ops import table
    except ImportError as exc:
        return Backend("triton", "cuda", {}, str(exc))
    return Backend("triton", "cuda", table())


def _npu() -> Backend:
    try:
        import torch_npu
    except ImportError as exc:
        return Backend("npu", "npu", {}, str(exc))
    from omni_kernels.npu.ops import NpuOps

    if not torch_npu.npu.is_available():
        return Backend("npu", "npu", {}, "no Ascend device")
    return Backend("npu", "npu", NpuOps(torch_npu).table())


@cache
def _found() -> tuple[Backend, ...]:
    return (_compiled(), _triton(), _npu(), *(Backend("torch", device, TORCH) for device in DEVICES))


@cache
def _table() -> Mapping[tuple[str, str], Backend]:
    table: dict[tuple[str, str], Backend] = {}
    for backend in _found():
        for op in backend.ops:
            table.setdefault((backend.device, op), backend)
    return table


def backends() -> dict[str, str]:
    """Each backend's name and state: `ok`, or why it is not to be had."""
    return {backend.name: "ok" if backend.ops else backend.reason for backend in _found()}


def backend_of(op: str, device: str) -> str:
    """Name of the backend that serves `op` on a device type; KeyError if there is none."""
    return _table()[device, op].name


def find(op: str, device: str) -> Op | None:
    """The function that serves `op` on a device type, if there is one."""
    backend = _table().get((device, op))
    return None if backend is None else backend.ops[op]


def backend(name: str) -> Backend:
    """The backend `name`; KeyError if it is not to be had."""
    for found in _found():
        if found.name == name and found.ops:
            return found
    raise KeyError(name)


def ops_of(name: str) -> Mapping[str, Op]:
    """All ops of the backend `name`; KeyError if it is not to be had."""
    return TORCH if name == "torch" else backend(name).ops
