"""Work beside the main stream, to hide copies behind compute: a stream on a device, a thread on the CPU.

What is submitted runs in order, after what the main stream had been given before; the main stream goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch


class Ticket(Protocol):
    """Work that was submitted."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def wait(self) -> None:
        """Return when it has ended; raise what it raised."""
        ...


class SideStream(Protocol):
    """Takes work; see the module."""

    def submit(self, work: Callable[[], object]) -> Ticket:
        """Run `work` beside the main stream. Tensors that it uses must be kept until it has ended."""
        ...

    def close(self) -> None:
        """Wait for all that was submitted."""
        ...


def side_stream(device: torch.device | str) -> SideStream:
    """A side stream of a device; ValueError for a kind that has none."""
    device = torch.device(device)
    if device.type == "cpu":
        return CpuSide()
    module = getattr(torch, device.type, None)
    if module is None or not hasattr(module, "Stream"):
        raise ValueError(f"side_stream: no streams on device {device.type}")
    return DeviceSide(module, device)


class CpuTicket:
    """A thread's work."""

    def __init__(self, future: Future[object]) -> None:
        self._future = future

    def done(self) -> bool:
        """See `Ticket`."""
        return self._future.done()

    def wait(self) -> None:
        """See `Ticket`."""
        self._future.result()


class CpuSide:
    """One thread: kernels and copies let go of the interpreter's lock, so it runs beside the caller."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="omni-side")

    def submit(self, work: Callable[[], object]) -> CpuTicket:
        """See `SideStream`."""
        return CpuTicket(self._pool.submit(work))

    def close(self) -> None:
        """See `SideStream`."""
        self._pool.shutdown(wait=True)


class DeviceTicket:
    """An event behind the work."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def done(self) -> bool:
        """See `Ticket`."""
        return bool(self._event.query())

    def wait(self) -> None:
        """See `Ticket`; waits on the host."""
        self._event.synchronize()


class DeviceSide:
    """A stream of `torch.cuda`, or of `torch.npu`, which has the same functions."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._stream = module.Stream(device=device)

    def submit(self, work: Callable[[], object]) -> DeviceTicket:
        """See `SideStream`."""
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            work()
            event = self._module.Event()
            event.record(self._stream)
        return DeviceTicket(event)

    def close(self) -> None:
        """See `SideStream`."""
        self._stream.synchronize()
