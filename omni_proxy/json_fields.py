"""A few fields of a JSON object, the rest of which nobody reads: answers of workers, and the usage in them. Pure.

msgspec is the definition. A scanner in C (`body_scan.c`) does what is plain JSON at a fifth of the cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Raw

Value = int | bytes | None
"""A count as a number, other values as JSON; None: absent, or null."""

_Pick = Callable[[bytes, tuple[str, ...]], tuple[Value, ...] | None]
try:
    from omni_proxy._body_scan import pick as scanned

    _pick: _Pick | None = scanned
except ImportError:  # not built: then msgspec does all
    _pick = None

_OBJECT: Final = msgspec.json.Decoder(dict[str, Raw])
_COUNT: Final = msgspec.json.Decoder(int)
_MOST_DIGITS: Final = 18


def pick(body: bytes, names: tuple[str, ...]) -> tuple[Value, ...]:
    """The values of these fields, eight at most. Raises msgspec.DecodeError, UnicodeDecodeError or RecursionError."""
    found = None if _pick is None else _pick(body, names)
    return picked(body, names) if found is None else found


def picked(body: bytes, names: tuple[str, ...]) -> tuple[Value, ...]:
    """What `pick` says, by msgspec."""
    fields = _OBJECT.decode(body)
    return tuple([_worth(bytes(fields.get(name, b"null"))) for name in names])


def _worth(raw: bytes) -> Value:
    if raw == b"null":
        return None
    return int(raw) if raw.isdigit() and len(raw) <= _MOST_DIGITS else raw


def count_of(value: Value) -> int | None:
    """A value that should be a count. Raises msgspec.ValidationError."""
    return _COUNT.decode(value) if isinstance(value, bytes) else value


def json_of(value: Value) -> bytes | None:
    """A value that should be no count. Raises msgspec.ValidationError."""
    if isinstance(value, int):
        raise msgspec.ValidationError("a number, where there should be an object")
    return value
