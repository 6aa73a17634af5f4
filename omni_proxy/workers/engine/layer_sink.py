"""Where pushed pieces go: into the blocks of the sequence that waits for them, until somebody else may get these."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

ImportLayer = Callable[[int, Sequence[int], memoryview], None]
"""Layer, block ids, bytes: put them into the cache."""


class LayerSink:
    """Puts pieces into `blocks`, from the side channel's thread; once `close` has returned nothing is written."""

    def __init__(self, put: ImportLayer, blocks: tuple[int, ...]) -> None:
        self._put = put
        self._blocks = blocks
        self._lock = threading.Lock()
        self._open = True

    def __call__(self, layer: int, first: int, count: int, data: memoryview) -> None:
        with self._lock:
            if self._open:
                self._put(layer, self._blocks[first : first + count], data)

    def close(self) -> None:
        """From the engine's thread, before the blocks are freed."""
        with self._lock:
            self._open = False
