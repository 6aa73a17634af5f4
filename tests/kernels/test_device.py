"""What is found on given machines, and work beside the main stream."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from omni_kernels.device import Device, accelerators, cpu, detect
from omni_kernels.side import DeviceSide, side_stream

GIB = 1 << 30


def machine(root: Path, **files: str) -> Path:
    """A root with the files named, `_` for `/`."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


X86 = "processor\t: 0\nmodel name\t: Xeon\nflags\t\t: fpu avx2 fma avx512f amx_bf16\n\nmodel name\t: other\n"
MEMORY = "MemTotal:       8388608 kB\nMemAvailable:   4194304 kB\nHugePages_Total:       0\n"


def test_a_cpu_by_its_files(tmp_path: Path) -> None:
    found = cpu(machine(tmp_path, proc__cpuinfo=X86, proc__meminfo=MEMORY))
    assert (found.kind, found.name, found.memory_bytes, found.free_bytes) == ("cpu", "Xeon", 8 * GIB, 4 * GIB)
    assert found.features == ("avx2", "fma", "avx512f", "amx_bf16")
    assert found.cores >= 1


def test_a_control_group_limits_memory(tmp_path: Path) -> None:
    root = machine(tmp_path, proc__cpuinfo=X86, proc__meminfo=MEMORY)
    machine(root, **{"sys__fs__cgroup__memory.max": f"{2 * GIB}\n", "sys__fs__cgroup__memory.current": f"{GIB}\n"})
    assert (cpu(root).memory_bytes, cpu(root).free_bytes) == (2 * GIB, GIB)
    machine(root, **{"sys__fs__cgroup__memory.max": "max\n"})
    assert cpu(root).memory_bytes == 8 * GIB


def test_an_arm_cpu_and_one_without_files(tmp_path: Path) -> None:
    assert cpu(machine(tmp_path / "arm", proc__cpuinfo="Features\t: fp asimd bf16 i8mm\n")).features == (
        "asimd",
        "bf16",
        "i8mm",
    )
    assert cpu(tmp_path / "none").memory_bytes == 0


class FakeCuda:
    """Two devices, of which the first reaches the second."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def get_device_properties(self, index: int) -> Any:
        return SimpleNamespace(name=f"H200 {index}", major=9, minor=0, multi_processor_count=132)

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 100 * GIB, 141 * GIB

    def can_device_access_peer(self, a: int, b: int) -> bool:
        return (a, b) == (0, 1)

    def current_stream(self, device: torch.device) -> str:
        return "main"

    def stream(self, stream: Any) -> Any:
        self.log.append("enter")
        return nullcontext()

    def Stream(self, device: torch.device) -> Any:
        return SimpleNamespace(
            wait_stream=lambda other: self.log.append(f"after {other}"),
            synchronize=lambda: self.log.append("synchronised"),
        )

    def Event(self) -> Any:
        return SimpleNamespace(
            record=lambda stream: self.log.append("event"),
            query=lambda: True,
            synchronize=lambda: self.log.append("waited"),
        )


def test_accelerators_with_their_peers() -> None:
    first, second = accelerators("cuda", FakeCuda())
    assert first == Device("cuda", 0, "H200 0", 132, 141 * GIB, 100 * GIB, ("sm_90",), (1,))
    assert second.peers == ()
    assert accelerators("npu", None) == ()


def test_this_machine_has_a_cpu() -> None:
    found = detect()[0]
    assert found.kind == "cpu"
    assert found.cores >= 1


def test_a_side_thread_runs_beside_the_caller_in_order() -> None:
    side, gate, order = side_stream("cpu"), threading.Event(), []
    first = side.submit(lambda: (gate.wait(10), order.append(1)))
    second = side.submit(lambda: order.append(2))
    assert not first.done()
    assert order == []
    gate.set()
    second.wait()
    assert first.done()
    assert order == [1, 2]
    side.close()


def test_a_side_threads_fault_reaches_who_waits() -> None:
    side = side_stream("cpu")

    def fails() -> None:
        raise OSError("the link is down")

    with pytest.raises(OSError, match="the link is down"):
        side.submit(fails).wait()
    side.close()


def test_a_device_stream_waits_for_the_main_one_and_marks_the_end() -> None:
    cuda = FakeCuda()
    side = DeviceSide(cuda, torch.device("cuda", 0))
    ticket = side.submit(lambda: cuda.log.append("work"))
    assert cuda.log == ["after main", "enter", "work", "event"]
    assert ticket.done()
    ticket.wait()
    side.close()
    assert cuda.log[-2:] == ["waited", "synchronised"]


def test_a_device_without_streams_is_named() -> None:
    with pytest.raises(ValueError, match="side_stream: no streams on device meta"):
        side_stream("meta")
