"""What this machine has to compute with: its CPU, NVIDIA and Ascend devices, their memory and who reaches whom.

Only looks; picks nothing. The files read lie under `root`, so that a test can give its own.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

FEATURES: Final = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve")
"""CPU flags that matter to the kernels, by Linux's names."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device; the CPU counts as one, with all cores this process may use."""

    kind: str
    """cpu, cuda or npu."""
    index: int
    name: str
    cores: int
    """CPU cores, streaming multiprocessors or AI cores."""
    memory_bytes: int
    free_bytes: int
    features: tuple[str, ...] = ()
    peers: tuple[int, ...] = ()
    """Devices of the same kind whose memory this one reads directly."""


def detect(root: Path = Path("/")) -> tuple[Device, ...]:
    """All devices, the CPU first."""
    return (cpu(root), *accelerators("cuda", torch.cuda), *accelerators("npu", getattr(torch, "npu", None)))


def cpu(root: Path = Path("/")) -> Device:
    """The CPU as this process sees it: its affinity and its control group's memory limit count."""
    info = _cpu_info(root)
    memory = _memory(root)
    flags = (info.get("flags") or info.get("Features") or "").split()
    total, free = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
    limit, used = (_number(root / "sys/fs/cgroup" / name) for name in ("memory.max", "memory.current"))
    if limit is not None:
        total, free = min(total, limit), min(free, max(0, limit - (used or 0)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = info.get("model name") or platform.processor() or platform.machine()
    return Device("cpu", 0, name, cores, total, free, tuple(flag for flag in FEATURES if flag in flags))


def accelerators(kind: str, module: Any) -> tuple[Device, ...]:
    """Devices of `torch.cuda`, or of `torch.npu`, which torch_npu adds with the same functions."""
    if module is None or not module.is_available():
        return ()
    count = module.device_count()
    return tuple(_accelerator(kind, module, index, count) for index in range(count))


def _accelerator(kind: str, module: Any, index: int, count: int) -> Device:
    properties = module.get_device_properties(index)
    free, total = module.mem_get_info(index)
    cores: Any = getattr(properties, "multi_processor_count", None) or getattr(properties, "cube_core_num", 0)
    features = (f"sm_{properties.major}{properties.minor}",) if kind == "cuda" else ()
    peers = tuple(i for i in range(count) if i != index and module.can_device_access_peer(index, i))
    return Device(kind, index, properties.name, int(cores), int(total), int(free), features, peers)


def _cpu_info(root: Path) -> Mapping[str, str]:
    """Fields of the first processor in /proc/cpuinfo; empty where there is no such file."""
    fields: dict[str, str] = {}
    for line in _text(root / "proc/cpuinfo").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    return fields


def _memory(root: Path) -> Mapping[str, int]:
    """Bytes by name from /proc/meminfo."""
    sizes: dict[str, int] = {}
    for line in _text(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        number = value.split()
        if number and number[0].isdigit():
            sizes[key] = int(number[0]) * (1024 if number[-1] == "kB" else 1)
    return sizes


def _number(path: Path) -> int | None:
    """The number in a file; None if it is missing or says `max`."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
