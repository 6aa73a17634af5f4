"""Header lines of HTTP/1.1 (RFC 9112, section 5), for both sides of the relay. Pure."""

from __future__ import annotations

import re
from typing import Final

Header = tuple[bytes, bytes]

_LINE: Final = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*+([\t\x20-\x7e\x80-\xff]*+)")
LENGTH: Final[tuple[bytes, ...]] = (b"content-length: ", b"Content-Length: ")
"""How nearly everybody writes it."""
_MAX_LINES: Final = 1024
_MAX_LINE: Final = 160
HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_OURS: Final = HOP_BY_HOP | {b"content-length", b"date", b"server", b"x-request-id", b"x-accel-buffering"}
SECRETS: Final = frozenset({b"authorization", b"cookie", b"set-cookie"})
DIFFER: Final = frozenset({b"content-length", b"x-request-id", b"traceparent"}) | SECRETS
"""Differ from request to request, or are secrets: not worth remembering, or better forgotten."""
_lines: Final[dict[bytes, Header]] = {}
"""Lines that were read before: most headers are the same in every message. Bounded."""


def read_line(line: bytes) -> Header | None:
    """Name in lower case and value of a header line; None where it is none, or continues the one before it."""
    known = _lines.get(line)
    if known is not None:
        return known
    value = line[16:]
    if line[:16] in LENGTH and value.isdigit():
        return b"content-length", value
    found = _LINE.fullmatch(line)
    if found is None:
        return None
    name, text = found.groups()
    header = (name.lower(), text.rstrip(b" \t"))
    if len(line) <= _MAX_LINE and header[0] not in DIFFER:
        if len(_lines) >= _MAX_LINES:
            _lines.clear()
        _lines[line] = header
    return header


def passed_on(headers: list[Header]) -> list[Header]:
    """The headers of a worker's answer that a client gets; those about one connection stay here.

    What a `connection` header lists is hop-by-hop too (RFC 9110, 7.6.1).
    """
    kept = [(name, value) for name, value in headers if name not in _OURS]
    listed = {t.strip().lower() for name, value in headers if name == b"connection" for t in value.split(b",")}
    return kept if listed <= HOP_BY_HOP | {b"close", b""} else [(n, v) for n, v in kept if n not in listed]
