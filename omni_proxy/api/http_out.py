"""Response heads and error bodies as bytes. Pure functions; the protocol writes what they return."""

from __future__ import annotations

import http
from typing import Final

import msgspec

from omni_proxy.errors import ErrorCode, error_body

STATUS_LINES: Final = {s.value: b"HTTP/1.1 %d %b\r\n" % (s.value, s.phrase.encode()) for s in http.HTTPStatus}

JSON_LINE: Final = b"content-type: application/json\r\n"


def status_line(status: int) -> bytes:
    """The first line of a response, also for a status without a name."""
    return STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


def head(status: int, lines: bytes, request_id: bytes, framing: bytes, close: bool, more: bytes = b"") -> bytes:
    """A whole response head. `framing` is the content-length or transfer-encoding line, or empty (until close).

    `lines`, and `more`: further header lines.
    """
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
