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
"""Longer heads are rare: the parser's business, as is their bound."""
_ROUTES: Final = {f"POST {path} HTTP/1.1".encode(): path.encode() for path in HOT_PATHS}
_LEFT_TO_PARSER: Final = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"http2-settings", b"trailer"})
_KEPT_ALIVE: Final = frozenset({b"keep-alive", b"Keep-Alive"})


class WholeRequest:
    """A request as it was read. Header names are in lower case."""

    __slots__ = ("body", "headers", "path", "request_id")

    def __init__(self, path: bytes, headers: list[tuple[bytes, bytes]], request_id: bytes, body: bytes) -> None:
        self.path = path
        self.headers = headers
        self.request_id = request_id
        self.body = body


def read_whole(data: bytes) -> WholeRequest | None:
    """The hot request that `data` is, the whole of it and nothing else; None: ask the parser."""
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD)
    if end < 0:
        return None
    lines = data[:end].split(b"\r\n")
    path = _ROUTES.get(lines[0])
    if path is None:
        return None
    headers: list[tuple[bytes, bytes]] = []
    request_id, length = b"", -1
    for line in lines[1:]:
        header = read_line(line)
        if header is None:
            return None
        name, value = header
        if name == b"content-length":
            if length >= 0 or not value.isdigit() or len(value) > 12:
                return None
            length = int(value)
        elif name == b"x-request-id":
            request_id = request_id or value
        elif name in _LEFT_TO_PARSER or (name == b"connection" and value not in _KEPT_ALIVE):
            return None
        headers.append(header)
    if length != len(data) - end - 4:
        return None
    return WholeRequest(path, headers, request_id, data[end + 4 :])
