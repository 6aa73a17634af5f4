"""Recognises a whole hot request in one read: most come so, and need neither a parser's callbacks nor its state.

A strict subset of HTTP/1.1 (RFC 9112): one request line of a hot route, plain header lines, one content-length that is
met exactly by what was read. Whatever else comes (chunks, expectations, upgrades, folded lines, a second request behind
the first, a byte that has no business in a head) is left to the parser, which knows the rest of the protocol and what
to refuse. So this never accepts what the parser would not.
"""

from __future__ import annotations

from typing import Final

from omni_proxy.call import HOT_PATHS
from omni_proxy.workers.head import read_line

MAX_HEAD: Final = 16 << 10
_MAX_DIGITS: Final = 12
_DIGITS: Final = b"0123456789"
_END: Final = b"\r\n\r\n"
"""Longer heads are rare: the parser's business, as is their bound."""
_ROUTES: Final = {f"POST {path} HTTP/1.1".encode(): path.encode() for path in HOT_PATHS}
_LEFT_TO_PARSER: Final = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"http2-settings", b"trailer"})
_KEPT_ALIVE: Final = frozenset({b"keep-alive", b"Keep-Alive"})


class WholeHead:
    """The head of a request. Header names are in lower case; the length of the body is not among them."""

    __slots__ = ("after", "before", "headers", "path", "request_id")

    def __init__(
        self, path: bytes, headers: list[tuple[bytes, bytes]], request_id: bytes, before: bytes, after: bytes
    ) -> None:
        self.path = path
        self.headers = headers
        self.request_id = request_id
        self.before = before
        """Its bytes in front of the length's digits."""
        self.after = after
        """Its bytes behind them."""


class WholeRequest:
    """A request as it was read."""

    __slots__ = ("body", "head")

    def __init__(self, head: WholeHead, body: bytes) -> None:
        self.head = head
        self.body = body


def read_whole(data: bytes, last: WholeHead | None = None) -> WholeRequest | None:
    """The hot request that `data` is, the whole of it and nothing else; None: ask the parser.

    `last`: the head before it on its connection. Clients repeat all of it but the length.
    """
    return (None if last is None else _again(data, last)) or _read(data)


def _again(data: bytes, last: WholeHead) -> WholeRequest | None:
    """The request that `data` is if it has the same head as the one before."""
    at = len(last.before)
    if data[:at] != last.before:
        return None
    size, digits = 0, at
    while at < len(data) and 48 <= data[at] <= 57 and at - digits <= _MAX_DIGITS:
        size = size * 10 + data[at] - 48
        at += 1
    begin = at + len(last.after)
    if at == digits or at - digits > _MAX_DIGITS or size != len(data) - begin or data[at:begin] != last.after:
        return None
    return WholeRequest(last, data[begin:])


def _read(data: bytes) -> WholeRequest | None:
    end = data.find(_END, 0, MAX_HEAD)
    if end < 0:
        return None
    lines = data[:end].split(b"\r\n")
    path = _ROUTES.get(lines[0])
    if path is None:
        return None
    headers: list[tuple[bytes, bytes]] = []
    request_id, length = b"", -1
    at = before = len(lines[0]) + 2
    for line in lines[1:]:
        at += len(line) + 2
        header = read_line(line)
        if header is None:
            return None
        name, value = header
        if name == b"content-length":
            if length >= 0 or not value.isdigit() or len(value) > _MAX_DIGITS:
                return None
            length, before = int(value), at - 2 - len(line) + line.rindex(value)
            continue
        if name == b"x-request-id":
            request_id = request_id or value
        elif name in _LEFT_TO_PARSER or (name == b"connection" and value not in _KEPT_ALIVE):
            return None
        headers.append(header)
    if length != len(data) - end - 4:
        return None
    after = data[before:end].lstrip(_DIGITS) + _END
    return WholeRequest(WholeHead(path, headers, request_id, data[:before], after), data[end + 4 :])
