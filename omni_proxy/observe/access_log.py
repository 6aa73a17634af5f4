"""One line for each request, in JSON or in the combined format. Never a prompt, never an address of a worker.

Lines are collected and written together: at the latest after `FLUSH_S`, at once when many have come. The file is
opened again on demand, for log rotation.
"""

from __future__ import annotations

import sys
import time
from typing import BinaryIO, Final

import msgspec

from omni_proxy.lifecycle.timeline import stage_seconds
from omni_proxy.messages import RequestRecord, Stage

FLUSH_S: Final = 0.5
_FLUSH_LINES: Final = 256
_STAGE_FIELDS: Final = {stage: f"{stage.name.lower()}_s" for stage in Stage}


class Ending(msgspec.Struct, frozen=True):
    """What the edge knows of an ended exchange."""

    request_id: str
    client: str
    method: str
    path: str
    status: int
    bytes_out: int
    user_agent: str
    error: str | None = None


class AccessLog:
    """Writes to a file, or to standard output for `-`."""

    def __init__(self, path: str, combined: bool) -> None:
        self._path = path
        self._combined = combined
        self._lines: list[bytes] = []
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
        wall = time.time()
        if self._combined:
            self._lines.append(_combined_line(ending, wall))
        else:
            self._lines.append(msgspec.json.encode(json_fields(ending, record, now, wall)))
        if len(self._lines) >= _FLUSH_LINES:
            self.flush()

    def flush(self) -> None:
        """Write what has been collected."""
        if self._lines and self._file is not None:
            lines, self._lines = self._lines, []
            self._file.write(b"\n".join(lines) + b"\n")
            self._file.flush()

    def close(self) -> None:
        self.flush()
        if self._file is not None and self._path != "-":
            self._file.close()
        self._file = None


def json_fields(ending: Ending, record: RequestRecord | None, now: float, wall: float) -> dict[str, object]:
    """The fields of a JSON line; docs/access-log.md lists them. Absent stages are absent."""
    fields: dict[str, object] = {
        "time": round(wall, 3),
        "id": ending.request_id,
        "client": ending.client,
        "request": f"{ending.method} {ending.path}",
        "status": ending.status,
        "bytes": ending.bytes_out,
        "error": ending.error,
    }
    if record is None:
        return {**fields, "outcome": "rejected"}
    begin = record.arrived_at
    first = record.first_token_at
    fields |= {
        "outcome": record.outcome,
        "model": record.model,
        "mode": record.mode,
        "stream": record.stream,
        "workers": [f"{p.leg.value}:{p.worker}" for p in record.placements],
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "predicted_tokens": record.predicted_tokens,
        "generated_tokens": record.completion_tokens,
        "resumes": len(record.resumes),
        "ttft_s": None if first is None else round(first - begin, 6),
        "e2e_s": round((record.ended_at or now) - begin, 6),
    }
    for stage, seconds in stage_seconds(record, now).items():
        fields[_STAGE_FIELDS[stage]] = round(seconds, 6)
    return fields


def _combined_line(ending: Ending, wall: float) -> bytes:
    stamp = time.strftime("%d/%b/%Y:%H:%M:%S %z", time.localtime(wall))
    agent = ending.user_agent.replace('"', "'") or "-"
    line = (
        f'{ending.client or "-"} - - [{stamp}] "{ending.method} {ending.path} HTTP/1.1" '
        f'{ending.status} {ending.bytes_out} "-" "{agent}"'
    )
    return line.encode("utf-8", "replace")
