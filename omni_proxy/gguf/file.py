"""One GGUF file, opened: its metadata by key, its tensors by name. Faults name the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class GgufError(ValueError):
    """The file cannot be served; the text is one line for the operator."""


class GgufFile:
    """The file is mapped, not read: tensors cost memory when they are looked at."""

    def __init__(self, path: Path) -> None:
        """Raises GgufError."""
        if not path.is_file():
            raise GgufError(f"{path}: no such file")
        try:
            from omni_proxy.gguf.reader import PlainReader
        except ImportError as exc:
            raise GgufError(f"{path}: GGUF files need the extra [gguf]: pip install 'omni-proxy[gguf]'") from exc
        self.path = path
        try:
            reader: Any = PlainReader(path)
            self.fields: dict[str, Any] = dict(reader.fields)
            self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        except (ValueError, IndexError, KeyError, OSError, OverflowError) as exc:
            raise GgufError(f"{path}: not a whole GGUF file: {' '.join(str(exc).split())}") from exc

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata."""
        field = self.fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        """A value that must be there. Raises GgufError."""
        value = self.get(key)
        if value is None:
            raise GgufError(f"{self.path}: {key} is missing")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first (the file says columns first). Raises GgufError."""
        if name not in self.tensors:
            raise GgufError(f"{self.path}: tensor {name} is missing")
        return tuple(int(n) for n in reversed(self.tensors[name].shape))

    def array(self, name: str) -> Any:
        """A tensor as a float32 array, dequantised. Raises GgufError."""
        from gguf.quants import dequantize

        shape = self.shape(name)
        tensor = self.tensors[name]
        try:
            return dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        except (ValueError, NotImplementedError) as exc:
            raise GgufError(f"{self.path}: tensor {name}: {' '.join(str(exc).split())}") from exc
