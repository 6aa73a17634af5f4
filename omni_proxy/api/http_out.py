"""Response heads and error bodies as bytes. Pure functions; the protocol writes what they return."""

from __future__ import annotations

import http
from collections.abc import Iterable
from typing import Final

import msgspec

from omni_proxy.errors import ErrorCode, error_body

Headers = Iterable[tuple[bytes, bytes]]

STATUS_LINES: Final = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in http.HTTPStatus}

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

JSON_TYPE: Final = (b"content-type", b"application/json")


def status_line(status: int) -> bytes:
    """The first line of a response, also for a status without a name."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def passed_on(headers: Headers) -> list[tuple[bytes, bytes]]:
    """The headers of a worker's answer that a client gets; those about one connection stay here.

    What a `connection` header lists is hop-by-hop too (RFC 9110, 7.6.1).
    """
    kept = [(name, value) for name, value in headers if name not in _OURS]
    listed = {t.strip().lower() for name, value in headers if name == b"connection" for t in value.split(b",")}
    return kept if listed <= HOP_BY_HOP | {b"close", b""} else [(n, v) for n, v in kept if n not in listed]


def head(status: int, headers: Headers, request_id: bytes, framing: bytes, close: bool, more: bytes = b"") -> bytes:
    """A whole response head. `framing` is the content-length or transfer-encoding line, or empty (until close).

    `more`: further header lines.
    """
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    ending = b"connection: close\r\n\r\n" if close else b"\r\n"
    return b"%bx-request-id: %b\r\n%b%b%b%b" % (status_line(status), request_id, lines, more, framing, ending)


def error_json(code: ErrorCode, message: str, param: str | None = None) -> bytes:
    """An OpenAI error body."""
    return msgspec.json.encode(error_body(code, message, param))


def named_error(code: ErrorCode, message: str, param: str | None = None) -> bytes:
    """An error for clients of messages and responses: their own fields beside those of OpenAI's error body."""
    start = b'{"type":"error","code":%b,"message":%b,"param":%b,' % (
        msgspec.json.encode(code.value),
        msgspec.json.encode(message),
        msgspec.json.encode(param),
    )
    return start + error_json(code, message, param)[1:]


def named_error_event(code: ErrorCode, message: str) -> bytes:
    """The event with which a broken stream of named events ends."""
    return b"event: error\ndata: %b\n\n" % named_error(code, message)


def error_event(code: ErrorCode, message: str) -> bytes:
    """The stream event with which a broken stream ends."""
    return b"data: %b\n\n" % error_json(code, message)
