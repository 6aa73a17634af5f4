"""Memory for weights: many matrices share large pages, which none of them fills.

A step reads all weights once. In pages of 4 KiB their places need more entries than a CPU's table of places (TLB) has.
"""

from __future__ import annotations

import ctypes
from threading import Lock
from typing import Final

import torch
from torch import Tensor

PAGE: Final = 2 << 20
CHUNK: Final = 16 * PAGE
_LINE: Final = 64


class Arena:
    """Gives out memory of chunks; a chunk goes when the last of what lies in it goes. Nothing of it is used twice."""

    def __init__(self, native: ctypes.CDLL) -> None:
        self._native = native
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._at = 0
        self._lock = Lock()
        """Several engines of a process may load at once."""

    def take(self, size: int) -> Tensor:
        """`size` bytes [size], uint8, of any content, at the start of a cache line."""
        if size > CHUNK // 2:
            return self._new(size)
        with self._lock:
            at = -(-self._at // _LINE) * _LINE
            if at + size > len(self._chunk):
                at, self._chunk = 0, self._new(CHUNK)
            self._at = at + size
            return self._chunk[at : at + size]

    def _new(self, size: int) -> Tensor:
        """Memory from the start of a page on. What is never written to is never there."""
        data = torch.empty(size + PAGE, dtype=torch.uint8)
        begin = -data.data_ptr() % PAGE
        self._native.omni_large_pages(data.data_ptr() + begin, size)
        return data[begin : begin + size]
