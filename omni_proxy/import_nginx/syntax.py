"""An nginx config as a tree of directives, and nginx's ways to write sizes, times and addresses.

Reads files (crossplane does the parsing); knows nothing of what directives mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import crossplane

from omni_proxy.config import ConfigError

_SIZES: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SECONDS: Final = {"ms": 0.001, "": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "M": 2592000, "y": 31536000}
_TIME: Final = re.compile(r"(?:(\d+)(ms|[smhdwMy]?)\s*)")


@dataclass(frozen=True, slots=True, eq=False)
class Directive:
    """One directive; `block` is empty where it has none."""

    name: str
    args: tuple[str, ...]
    where: str
    """File and line, for people."""
    block: tuple[Directive, ...] = ()

    @property
    def text(self) -> str:
        """As it stands in the file, without its block."""
        return " ".join((self.name, *(arg or '""' for arg in self.args)))

    @property
    def value(self) -> str:
        """Its first argument, or nothing."""
        return self.args[0] if self.args else ""

    def blocks(self, name: str) -> Iterator[Directive]:
        """The directives of this name in its block."""
        return (inner for inner in self.block if inner.name == name)


@dataclass(frozen=True, slots=True)
class Parsed:
    """A whole config, includes put in their places. `missing`: included files that are not there, as sentences."""

    top: Directive
    missing: tuple[str, ...]


def read(path: Path) -> Parsed:
    """Parse a config file and what it includes. Raises ConfigError, one line for each fault."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file")
    try:
        payload = crossplane.parse(str(path))
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read ({type(exc).__name__})") from exc
    faults: list[str] = []
    missing: list[str] = []
    for error in payload["errors"]:
        text = str(error["error"])
        (missing if text.startswith("[Errno") else faults).append(_fault(path, error, text))
    if faults:
        raise ConfigError("\n".join(faults))
    return Parsed(Directive("main", (), str(path), _Tree(payload["config"], path).of_file(0)), tuple(missing))


def _fault(path: Path, error: Mapping[str, Any], text: str) -> str:
    line = "" if error.get("line") is None else f":{error['line']}"
    said = re.sub(r"^\[Errno \d+\] ", "", text)
    said = re.sub(r" in \S+:\d+$", "", said)
    return f"{_shown(error.get('file') or str(path), path)}{line}: {said}"


class _Tree:
    """Directives with includes put in their places. (crossplane can do that too, but then names the wrong files.)"""

    def __init__(self, files: Sequence[Mapping[str, Any]], main: Path) -> None:
        self._files = files
        self._main = main
        self._open: list[int] = []

    def of_file(self, number: int) -> tuple[Directive, ...]:
        if number in self._open:
            raise ConfigError(f"{self._main}: {self._files[number]['file']} includes itself")
        self._open.append(number)
        file = self._files[number]
        found = tuple(self._directives(file["parsed"], _shown(file["file"], self._main)))
        self._open.pop()
        return found

    def _directives(self, data: Sequence[Mapping[str, Any]], file: str) -> Iterator[Directive]:
        for entry in data:
            block = tuple(self._directives(entry.get("block") or (), file))
            yield Directive(entry["directive"], tuple(entry["args"]), f"{file}:{entry['line']}", block)
            for number in entry.get("includes") or ():
                yield from self.of_file(number)


def _shown(file: str, main: Path) -> str:
    """Included files as they are seen from the main one."""
    path = Path(file)
    return str(path.relative_to(main.parent)) if path.is_relative_to(main.parent) else str(path)


def size_bytes(text: str) -> int:
    """`64m` in bytes. Raises ValueError."""
    found = re.fullmatch(r"(\d+)([kKmMgG]?)", text)
    if found is None:
        raise ValueError(f"{text} is not a size")
    return int(found[1]) * _SIZES[found[2].lower()]


def seconds(text: str) -> float:
    """`1m30s` in seconds. Raises ValueError."""
    parts = _TIME.findall(text)
    if not parts or _TIME.sub("", text):
        raise ValueError(f"{text} is not a time")
    return float(sum(int(number) * _SECONDS[unit] for number, unit in parts))


def host_port(text: str, default_port: int) -> tuple[str, int]:
    """`10.0.0.1:80`, `name`, `[::1]:80` apart. Raises ValueError, also for Unix sockets."""
    if text.startswith("unix:"):
        raise ValueError("Unix sockets are not supported")
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/]+)(?::(\d+))?", text)
    if found is None:
        raise ValueError(f"{text} is not an address")
    port = int(found[2] or default_port)
    if port > 65535:
        raise ValueError(f"there is no port {port}")
    return found[1].strip("[]"), port


def parameters(args: Sequence[str]) -> dict[str, str]:
    """`weight=3 backup` as a mapping; flags have an empty value."""
    return {key: value for key, _, value in (arg.partition("=") for arg in args)}
