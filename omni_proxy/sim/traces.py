"""Readers of public trace files: Mooncake's JSON lines and Azure's CSV.

A fault is one line with the file, the line number and the field. Instants may be unsorted in neither format.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Final, Protocol

import msgspec
from msgspec import Meta, Struct

from omni_proxy.config import ConfigError
from omni_proxy.sim.workload import SimRequest, Workload

MOONCAKE_BLOCK_TOKENS: Final = 512
AZURE_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_NO_SHARING_BLOCK_TOKENS: Final = 512
_FIELD: Final = re.compile(r'"(\w{1,40})"\s*:')

_Count = Annotated[int, Meta(ge=1)]
_BlockId = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class _MooncakeRow(Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    """Milliseconds since the trace's beginning."""
    input_length: _Count
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: list[_BlockId]


class _Reader(Protocol):
    """What `csv.reader` makes."""

    @property
    def line_num(self) -> int: ...

    def __next__(self) -> list[str]: ...

    def __iter__(self) -> Iterator[list[str]]: ...


_ROW: Final = msgspec.json.Decoder(_MooncakeRow)


def read_trace(path: Path, limit: int | None = None) -> Workload:
    """Read a trace by the ending of its name: `.jsonl` Mooncake, `.csv` Azure. Raises ConfigError."""
    readers: dict[str, Callable[[Path], Iterator[SimRequest]]] = {".jsonl": _mooncake, ".csv": _azure}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigError(f"{path}: is neither a Mooncake trace (.jsonl) nor an Azure trace (.csv)")
    requests: list[SimRequest] = []
    try:
        for request in reader(path):
            requests.append(request)
            if len(requests) == limit:
                break
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: is not UTF-8 text") from exc
    if not requests:
        raise ConfigError(f"{path}: holds no request")
    block_tokens = MOONCAKE_BLOCK_TOKENS if path.suffix.lower() == ".jsonl" else _NO_SHARING_BLOCK_TOKENS
    return Workload(path.stem, block_tokens, tuple(requests))


def _mooncake(path: Path) -> Iterator[SimRequest]:
    latest = 0.0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = _ROW.decode(line)
            except msgspec.DecodeError as exc:
                raise ConfigError(f"{path}:{number}: {_explain(exc, line)}") from exc
            _check_mooncake(row, f"{path}:{number}", latest)
            latest = row.timestamp
            # An answer of no tokens is an answer of one: the engine always makes a first token.
            output = max(row.output_length, 1)
            yield SimRequest(row.timestamp / 1000, row.input_length, output, tuple(row.hash_ids))


def _check_mooncake(row: _MooncakeRow, place: str, latest: float) -> None:
    if row.timestamp < latest:
        raise ConfigError(f"{place}: timestamp: {row.timestamp:g} is before {latest:g} of the line before")
    blocks = -(-row.input_length // MOONCAKE_BLOCK_TOKENS)
    if len(row.hash_ids) != blocks:
        detail = f"{row.input_length} tokens are {blocks} blocks of {MOONCAKE_BLOCK_TOKENS}"
        raise ConfigError(f"{place}: hash_ids: has {len(row.hash_ids)} ids, but {detail}")


def _explain(exc: msgspec.DecodeError, line: str) -> str:
    """msgspec's words ("Expected `int`, got `str` - at `$.input_length`") with the field in front.

    Of a line that is no JSON, cut off perhaps, it is the last field that was begun.
    """
    rule, _, place = str(exc).partition(" - at `$")
    field = place.strip("`").lstrip(".")
    if not isinstance(exc, msgspec.ValidationError):
        begun = _FIELD.findall(line)
        field = begun[-1] if begun else ""
    return f"{field}: {rule}" if field else rule


def _azure(path: Path) -> Iterator[SimRequest]:
    with path.open(encoding="utf-8", newline="") as lines:
        rows = csv.reader(lines)
        header = next(_rows(rows, path), None)
        if header is None or tuple(header) != AZURE_COLUMNS:
            raise ConfigError(f"{path}:1: the header must be {','.join(AZURE_COLUMNS)}")
        first: datetime | None = None
        latest = 0.0
        for row in _rows(rows, path):
            place = f"{path}:{rows.line_num}"
            if len(row) != len(AZURE_COLUMNS):
                raise ConfigError(f"{place}: has {len(row)} columns, not {len(AZURE_COLUMNS)}")
            instant = _instant(row[0], place)
            first = first or instant
            at = (instant - first).total_seconds()
            if at < latest:
                raise ConfigError(f"{place}: TIMESTAMP: {row[0]} is before the line before")
            latest = at
            prompt, output = (
                _count(text, column, place) for text, column in zip(row[1:], AZURE_COLUMNS[1:], strict=True)
            )
            yield SimRequest(at, prompt, output)


def _rows(rows: _Reader, path: Path) -> Iterator[list[str]]:
    """The rows. Raises ConfigError for what is no CSV."""
    while True:
        try:
            row = next(rows, None)
        except csv.Error as exc:
            raise ConfigError(f"{path}:{rows.line_num}: is no CSV ({exc})") from exc
        if row is None:
            return
        yield row


def _instant(text: str, place: str) -> datetime:
    # The trace writes 100 ns digits; datetime knows microseconds.
    try:
        found = datetime.fromisoformat(text[:26])
    except ValueError:
        raise ConfigError(f"{place}: TIMESTAMP: {text!r} is no date and time") from None
    if found.tzinfo is not None:
        raise ConfigError(f"{place}: TIMESTAMP: {text!r} has a time zone; the trace's format has none")
    return found


def _count(text: str, column: str, place: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ConfigError(f"{place}: {column}: must be a whole number above 0, got {text!r}")
    return value
