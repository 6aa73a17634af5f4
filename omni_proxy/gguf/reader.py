"""The package's reader on plain arrays: numpy's mapped ones cost three times as much for each piece of a vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGUFReader


class PlainReader(GGUFReader):
    """Reads a file's metadata and tells where its tensors lie."""

    @property
    def data(self) -> Any:
        """The whole file's bytes, mapped."""
        return self._plain

    @data.setter
    def data(self, mapped: Any) -> None:
        self._plain = mapped.view(np.ndarray)
