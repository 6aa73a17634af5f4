"""One line for each request, in JSON or in the combined format. Never a prompt, never an address of a worker.

Lines are collected and written together: at the latest after `FLUSH_S`, at once when many have come. The file is
opened again on demand, for log rotation.
"""

from __future__ import annotations

import sys
import time
from typing import BinaryIO, Final

from omni_proxy.messages import RequestRecord
from omni_proxy.observe.log_lines import Ending, add_json, combined_line

FLUSH_S: Final = 0.5
_FLUSH_BYTES: Final = 64 << 10
_wall: Final = time.time


class AccessLog:
    """Writes to a file, or to standard output for `-`."""

    def __init__(self, path: str, combined: bool) -> None:
        self._path = path
        self._combined = combined
        self._lines = bytearray()
        self._file: BinaryIO | None = None
        self.reopen()

    def reopen(self) -> None:
        """Open the file again under its name. Raises OSError; then the old one stays in use."""
        if self._path == "-":
            self._file = sys.stdout.buffer
            return
        # Unbuffered append: each flush is one write, so that several processes can share the file.
        opened = open(self._path, "ab", buffering=0)  # noqa: SIM115 - kept open on purpose
        self.flush()
        if self._file is not None:
            self._file.close()
        self._file = opened

    def write(self, ending: Ending, record: RequestRecord | None, now: float) -> None:
        """Note one request. `record` is None where the core never heard of it."""
        wall = _wall()
        if self._combined:
            self._lines += combined_line(ending, wall)
        else:
            add_json(self._lines, ending, record, now, wall)
        self._lines += b"\n"
        if len(self._lines) >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what has been collected."""
        if self._lines and self._file is not None:
            lines, self._lines = self._lines, bytearray()
            self._file.write(lines)
            self._file.flush()

    def close(self) -> None:
        self.flush()
        if self._file is not None and self._path != "-":
            self._file.close()
        self._file = None
