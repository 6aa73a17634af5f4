"""Who did what on the admin port, when, and what came of it: one line of JSON for each.

Knows no routes. No token is written: it is named as the config does, or by the first digits of its SHA-256.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import msgspec
from msgspec import Struct

logger = logging.getLogger(__name__)


class Line(Struct, omit_defaults=True):
    """One line. `time` is UTC."""

    time: str
    who: str
    peer: str
    action: str
    worker: str | None = None
    details: Any = None
    outcome: str = ""
    shared: bool | None = None


class Audit:
    """Appends lines to a file, or logs them where there is none. Raises OSError when the file cannot be opened."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        self._file: IO[bytes] | None = None if path is None else path.open("ab", buffering=0)
        """Unbuffered: a line that was written is on its way to the disk."""

    def write(
        self,
        who: str,
        peer: str,
        action: str,
        outcome: str,
        worker: str | None = None,
        details: Any = None,
        shared: bool | None = None,
    ) -> None:
        """Leave a line. A disk that is full stops nobody from working; it is said in the gateway's log."""
        now = self._clock()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        line = msgspec.json.encode(Line(stamp, who, peer, action, worker, details, outcome, shared))
        if self._file is None:
            logger.info("%s", line.decode())
            return
        try:
            self._file.write(line + b"\n")
        except OSError as exc:
            logger.error("the audit log cannot be written (%s): %s", exc.strerror, line.decode())

    def reopen(self) -> None:
        """Open the file again under its name: it was moved away. Raises OSError; then the old one stays."""
        if self._path is not None:
            opened = self._path.open("ab", buffering=0)
            old, self._file = self._file, opened
            if old is not None:
                old.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def digest(token: str) -> str:
    """By what a token without a name is known."""
    return "token:" + hashlib.sha256(token.encode()).hexdigest()[:12]
