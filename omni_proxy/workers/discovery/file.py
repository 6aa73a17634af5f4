"""A YAML file of workers, read again whenever it changes: `workers:` with entries as in the config."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from omni_proxy.workers.discovery.vetting import Candidate


class FileSource:
    """Looks at the file every `interval_s` seconds; reading it happens in a thread."""

    def __init__(self, path: Path, interval_s: float = 1.0) -> None:
        self.name = "file"
        self._path = path
        self._interval_s = interval_s

    async def run(self, found: Callable[[Sequence[Candidate]], None], failed: Callable[[str], None]) -> None:
        """Until cancelled."""
        seen: tuple[int, int, int] | None = None
        while True:
            try:
                stat = self._path.stat()
                now = stat.st_mtime_ns, stat.st_size, stat.st_ino
                if now != seen:
                    found(await asyncio.to_thread(read, self._path))
                    seen = now
            except (OSError, ValueError, yaml.YAMLError) as exc:
                failed(f"{self._path}: {getattr(exc, 'strerror', None) or str(exc).splitlines()[0]}")
            await asyncio.sleep(self._interval_s)


def read(path: Path) -> list[Candidate]:
    """The entries of a file. Raises OSError, ValueError, YAMLError."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    entries = data.get("workers") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("must hold 'workers', a list of mappings")
    return entries
