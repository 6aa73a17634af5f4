"""The devices of this machine as a plan takes them: an accelerator by its name, else the CPU's cores, measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from omni_kernels import registry
from omni_kernels.device import Device
from omni_kernels.layout.chips import Devices, cpu_chip, known_chip
from omni_kernels.layout.errors import LayoutError

READ_BYTES: Final = 96 << 20
ROUNDS: Final = 300_000
ASSUMED: Final = (8e9, 2e10)
"""Bytes and FLOP per second of a core where nothing is compiled to measure with."""


def plannable(found: Sequence[Device]) -> Devices:
    """What to plan for among the devices found: accelerators of one kind, else the CPU. Raises LayoutError."""
    accelerators = [device for device in found if device.kind != "cpu"]
    if not accelerators:
        cpu = next(device for device in found if device.kind == "cpu")
        if not cpu.free_bytes:
            raise LayoutError("devices: the free memory of this machine is unknown: give --devices")
        return Devices(cpu_chip(cpu.cores, cpu.free_bytes, *_core_rates()), cpu.cores)
    first = accelerators[0]
    chip = known_chip(first.name)
    if chip is None:
        raise LayoutError(f"devices: {first.name} is not in the catalogue: give --devices")
    same = [device for device in accelerators if known_chip(device.name) == chip]
    least = float(min(device.memory_bytes for device in same))
    # A driver lists dies, not chips: each is a rank and a device of its own.
    return Devices(replace(chip, memory_bytes=least, ranks=1), len(same))


def _core_rates() -> tuple[float, float]:
    """(bytes read, FLOP) per second of one core: the least time of three short runs."""
    library = registry.cpu_library()
    if library is None:
        return ASSUMED
    data = torch.ones(READ_BYTES, dtype=torch.uint8)
    reads, flops = [], []
    for _ in range(3):
        start = time.perf_counter()
        library.omni_bench_read(data.data_ptr(), READ_BYTES, 1)
        middle = time.perf_counter()
        flop = library.omni_bench_fma(ROUNDS, 1)
        reads.append(READ_BYTES / (middle - start))
        flops.append(flop / (time.perf_counter() - middle))
    return max(reads), max(flops)
