"""How far a running step has come, for a thread that works beside it: layers whose keys and values are in the cache."""

from __future__ import annotations

import ctypes
import os
from typing import Final


class StepProgress:
    """A counter that the step raises and a pipe that says so. The step writes from one thread, another reads."""

    def __init__(self) -> None:
        self.counter: Final = ctypes.c_int64(0)
        """Layers of the running step whose keys and values are written."""
        self.fd, self._write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write_fd, False)

    @property
    def layers(self) -> int:
        return self.counter.value

    @property
    def write_fd(self) -> int:
        """Gets a byte for each layer; full is as good as written."""
        return self._write_fd

    @property
    def address(self) -> int:
        return ctypes.addressof(self.counter)

    def restart(self) -> None:
        """A step begins. Before it does, from its thread."""
        self.counter.value = 0

    def layer_done(self, layers: int) -> None:
        """The first `layers` layers are written; what a compiled step does by itself."""
        self.counter.value = layers
        self.wake()

    def wake(self) -> None:
        """Have the reader look, from any thread."""
        try:
            os.write(self._write_fd, b"\0")
        except BlockingIOError:
            return

    def drain(self) -> None:
        """Take what the pipe holds, from the reader's thread."""
        try:
            while os.read(self.fd, 4096):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._write_fd)
