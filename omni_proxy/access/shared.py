"""Where the counts of tenants lie: in memory of this process, or in a file that all fronts of a gateway map.

The file lies in the folder through which the processes of one gateway find each other; its name says for which tenants
it is, so that fronts that load a config again at different instants never take one row for another.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from omni_proxy.access.windows import FIELDS, Windows


class Counts:
    """Makes tables. `folder` None: there is one front only."""

    def __init__(self, folder: Path | None = None, fronts: int = 1, me: int = 0) -> None:
        assert 0 <= me < fronts, "one of the fronts"
        self._folder = folder
        self._fronts = fronts
        self._me = me

    def open(self, tenants: Sequence[str]) -> Windows:
        """The table of some tenants, a row for each. Counts of the last minute that other fronts made are in it."""
        size = max(1, len(tenants)) * self._fronts * FIELDS * 8
        if self._folder is None:
            return Windows(memoryview(bytearray(size)).cast("q"), self._fronts, self._me)
        name = hashlib.blake2b("\n".join(tenants).encode(), digest_size=8).hexdigest()
        handle = os.open(self._folder / f"limits-{name}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(handle, size)
            cells = memoryview(mmap.mmap(handle, size)).cast("q")
        finally:
            os.close(handle)
        return Windows(cells, self._fronts, self._me)
