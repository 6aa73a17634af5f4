"""Header lines of HTTP/1.1 (RFC 9112, section 5), for both sides of the relay. Pure."""

from __future__ import annotations

from typing import Final

_TEXT: Final = bytes([9, *range(0x20, 0x7F), *range(0x80, 0x100)])
_TOKEN: Final = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MAX_NAMES: Final = 512
_names: Final[dict[bytes, bytes]] = {}
"""Spellings of names that were found to be tokens, and their lower case. Bounded, and names only."""


def read_line(line: bytes) -> tuple[bytes, bytes] | None:
    """Name in lower case and value of a header line; None where it is none, or continues the one before it."""
    at = line.find(b":")
    if at <= 0 or line.translate(None, _TEXT):
        return None
    spelt = line[:at]
    name = _names.get(spelt)
    if name is None:
        if spelt.translate(None, _TOKEN):
            return None
        if len(_names) >= _MAX_NAMES:
            _names.clear()
        name = spelt.lower()
        _names[spelt] = name
    return name, line[at + 1 :].strip(b" \t")
