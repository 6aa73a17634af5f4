"""Reads one HTTP/1.1 answer of a worker, in whatever pieces it comes (RFC 9112).

Own code because it is in every token's way: a stream comes as one chunk in one read, and then taking it apart is one
comparison and one slice, without a callback. Strict: what a worker must not send is `BadAnswer`.
"""

from __future__ import annotations

import re
from typing import Final

from omni_proxy.workers.head import DIFFER, LENGTH, Header, passed_on, read_line

MAX_HEAD_BYTES: Final = 64 << 10
"""Largest answer head that is read; more is garbage. The same goes for a line of chunk size, and for trailers."""
_START: Final = b"HTTP/1."
_HEX: Final = b"0123456789abcdefABCDEF"
_MAX_DIGITS: Final = 15
_MAX_FRAMED_DIGITS: Final = 7
_MAX_HEADS: Final = 256
_MAX_REMEMBERED: Final = 1 << 10
_TOKEN: Final = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_EXTENSION: Final = rf'{_TOKEN}(?:=(?:{_TOKEN}|"[^"\\\x00-\x1f\x7f]*"))?'
_EXTENSIONS: Final = re.compile(f"{_EXTENSION}(?:;{_EXTENSION})*".encode())
_REASON: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_BODYLESS: Final[tuple[int, ...]] = (204, 304)
_STREAM_HEADERS: Final = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]

# Where the reader is.
_HEAD: Final = 0
_LENGTH: Final = 1
_UNTIL_EOF: Final = 2
_CHUNK_SIZE: Final = 3
_CHUNK_DATA: Final = 4
_CHUNK_END: Final = 5
_TRAILERS: Final = 6
_COMPLETE: Final = 7


class BadAnswer(Exception):
    """It is not HTTP/1.1, or says two things at once."""


class Head:
    """What the head of an answer says. Shared by all answers with this head, whatever their length."""

    __slots__ = (
        "_lines",
        "_stream_lines",
        "begin",
        "content_type",
        "end",
        "headers",
        "keep",
        "left",
        "state",
        "status",
    )

    def __init__(
        self, status: int, headers: list[Header], keep: bool, length: int, chunked: bool, begin: bytes, end: bytes
    ) -> None:
        self.status: Final = status
        self.headers: Final = headers
        """All but the length."""
        self.begin: Final = begin
        """Its bytes up to the digits of the length, where there is one; empty: it is not to be remembered."""
        self.end: Final = end
        """Its bytes behind these digits; empty where there are none."""
        self.left = 0
        self.state = _UNTIL_EOF
        if status in _BODYLESS or length == 0:
            self.state = _COMPLETE
        elif chunked:
            self.state = _CHUNK_SIZE
        elif length > 0:
            self.state, self.left = _LENGTH, length
        self.keep = keep and self.state != _UNTIL_EOF
        self.content_type = b""
        for name, value in reversed(headers):
            if name == b"content-type":
                self.content_type = value
        self._lines: bytes | None = None
        self._stream_lines: bytes | None = None

    @property
    def lines(self) -> bytes:
        """What a client gets of it, as header lines."""
        if self._lines is None:
            self._lines = b"".join([b"%b: %b\r\n" % header for header in passed_on(self.headers)])
        return self._lines

    @property
    def stream_lines(self) -> bytes:
        """The same for a stream: nobody keeps a copy of one, and nobody waits for more of it to pass it on."""
        if self._stream_lines is None:
            kept = [header for header in passed_on(self.headers) if header[0] != b"cache-control"]
            self._stream_lines = b"".join([b"%b: %b\r\n" % header for header in [*kept, *_STREAM_HEADERS]])
        return self._stream_lines


_heads: Final[dict[bytes, Head]] = {}
"""Heads that were read before, by their bytes. Bounded."""


class AnswerReader:
    """One answer; `reset` makes it ready for the next on the same connection."""

    __slots__ = ("_left", "_rest", "_state", "excess", "framed", "head", "keep", "status")

    def __init__(self) -> None:
        self.head: Head | None = None
        """Of this answer, where there is a status; else of the one before, which it is likely to repeat."""
        self.reset()

    def reset(self) -> None:
        """Forget the answer before."""
        self._state = _HEAD
        self._rest = b""
        """What was read and cannot be understood without what follows."""
        self._left = 0
        self.status = 0
        """0 until the head of the final answer has come."""
        self.keep = False
        """May the connection carry another request?"""
        self.framed = b""
        """What was read last where it was one whole chunk: whoever relays the chunk's data can send these bytes."""
        self.excess = False
        """More has come than belongs to the answer."""

    @property
    def complete(self) -> bool:
        return self._state == _COMPLETE

    @property
    def between_chunks(self) -> bool:
        """Does the next byte begin a chunk?"""
        return self._state == _CHUNK_SIZE and not self._rest

    @property
    def until_eof(self) -> bool:
        """Does only the end of the connection end the body?"""
        return self._state == _UNTIL_EOF

    def feed(self, data: bytes, body: list[bytes]) -> None:
        """Take what was read; append what is body. Raises BadAnswer, with what came before in `body`."""
        self.framed = b""
        if self._state == _CHUNK_SIZE and not self._rest and _is_one_chunk(data):
            self.framed = data
            body.append(data[data.find(b"\r") + 2 : -2])
            return
        if self._rest:
            data, self._rest = self._rest + data, b""
        if self._state == _HEAD:
            data = self._read_head(data)
        if data:
            self._read_body(data, body)

    # ------------------------------------------------------------------------ head

    def _read_head(self, data: bytes) -> bytes:
        """Look for the head's end; return what is behind it."""
        at = self._like_before(data)
        if at:
            return data[at:]
        while True:
            if data[: len(_START)] != _START[: len(data)]:
                raise BadAnswer("no status line")
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > MAX_HEAD_BYTES:
                    raise BadAnswer("head too large")
                self._rest = data
                return b""
            if end > MAX_HEAD_BYTES:
                raise BadAnswer("head too large")
            whole, data = data[:end], data[end + 4 :]
            head = _heads.get(whole) or _understand(whole)
            if head.status >= 200:
                self.status, self.keep, self.head = head.status, head.keep, head
                self._state, self._left = head.state, head.left
                return data
            if head.status == 101:
                raise BadAnswer("switches to another protocol")
            if not data:
                return data

    def _like_before(self, data: bytes) -> int:
        """Where the body begins behind a head that differs from the one before in its length only; 0: it does not."""
        head = self.head
        if head is None or not head.begin:
            return 0
        at = len(head.begin)
        if data[:at] != head.begin:
            return 0
        state, length = head.state, 0
        if head.end:
            first = at
            while at < len(data) and 48 <= data[at] <= 57 and at - first < _MAX_DIGITS:
                length = length * 10 + data[at] - 48
                at += 1
            end = at + len(head.end)
            if at == first or data[at:end] != head.end:
                return 0
            at, state = end, _LENGTH if length else _COMPLETE
        self.status, self.keep = head.status, head.keep
        self._state, self._left = state, length
        return at

    # ------------------------------------------------------------------------ body

    def _read_body(self, data: bytes, body: list[bytes]) -> None:
        state = self._state
        if state == _LENGTH:
            size = len(data)
            if size > self._left:
                self.excess = True
                data = data[: self._left]
            body.append(data)
            self._left -= len(data)
            if self._left == 0:
                self._state = _COMPLETE
        elif state == _UNTIL_EOF:
            body.append(data)
        elif state == _COMPLETE:
            self.excess = True
        else:
            self._read_chunks(data, body)

    def _read_chunks(self, data: bytes, body: list[bytes]) -> None:
        at, end = 0, len(data)
        while at < end:
            state = self._state
            if state == _CHUNK_DATA:
                piece = data[at : at + self._left]
                body.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left == 0:
                    self._state = _CHUNK_END
            elif state == _COMPLETE:
                self.excess = True
                return
            else:
                line_end = data.find(b"\r\n", at)
                if line_end < 0:
                    if end - at > MAX_HEAD_BYTES:
                        raise BadAnswer("a line too long in the body")
                    self._rest = data[at:]
                    self._check_rest(state)
                    return
                self._chunk_line(state, data[at:line_end])
                at = line_end + 2

    def _check_rest(self, state: int) -> None:
        """What cannot become good need not be waited for."""
        if state == _CHUNK_END and self._rest != b"\r":
            raise BadAnswer("a chunk does not end where it said")

    def _chunk_line(self, state: int, line: bytes) -> None:
        if state == _CHUNK_END:
            if line:
                raise BadAnswer("a chunk does not end where it said")
            self._state = _CHUNK_SIZE
        elif state == _CHUNK_SIZE:
            digits, _, extensions = line.partition(b";")
            digits = digits.rstrip(b" \t")
            if not digits or len(digits) > _MAX_DIGITS or digits.translate(None, _HEX):
                raise BadAnswer("chunk size")
            if extensions and _EXTENSIONS.fullmatch(extensions) is None:
                raise BadAnswer("chunk extensions")
            self._left = int(digits, 16)
            self._state = _CHUNK_DATA if self._left else _TRAILERS
        elif line:
            self._left += len(line)
            if self._left > MAX_HEAD_BYTES:
                raise BadAnswer("trailers too large")
        else:
            self._state = _COMPLETE


def _understand(whole: bytes) -> Head:
    """What a head says. Raises BadAnswer."""
    lines = whole.split(b"\r\n")
    status = _status(lines[0])
    if status < 200:
        return Head(status, [], True, 0, False, b"", b"")
    headers: list[Header] = []
    length, chunked, repeats = -1, False, len(whole) <= _MAX_REMEMBERED
    keep = lines[0][7:8] == b"1"
    begin, end, at = whole + b"\r\n\r\n", b"", len(lines[0]) + 2
    for line in lines[1:]:
        header = read_line(line)
        if header is None:
            raise BadAnswer("a line of the head is no header")
        name, value = header
        if name == b"content-length":
            if length >= 0 or not value.isdigit() or len(value) > _MAX_DIGITS:
                raise BadAnswer("content-length")
            length = int(value)
            repeats = repeats and line[:16] in LENGTH and line[16:] == value and status not in _BODYLESS
            begin, end = begin[: at + 16], begin[at + len(line) :]
        elif name == b"transfer-encoding":
            if chunked or value.lower() != b"chunked":
                raise BadAnswer("transfer-encoding")
            chunked = True
        elif name == b"connection":
            options = [option.strip() for option in value.lower().split(b",")]
            keep = b"close" not in options and (keep or b"keep-alive" in options)
        elif name in DIFFER:
            repeats = False
        if name != b"content-length":
            headers.append(header)
        at += len(line) + 2
    if chunked and length >= 0:
        raise BadAnswer("both content-length and transfer-encoding")
    if not repeats:
        begin = b""
    head = Head(status, headers, keep, length, chunked, begin, end)
    if repeats:
        if len(_heads) >= _MAX_HEADS:
            _heads.clear()
        _heads[whole] = head
    return head


def _status(line: bytes) -> int:
    """The status of `HTTP/1.1 200 OK`."""
    digits = line[9:12]
    if line[7:9] not in (b"1 ", b"0 ") or not digits.isdigit() or len(digits) < 3 or line[12:13] not in (b"", b" "):
        raise BadAnswer("status line")
    status = int(digits)
    if status < 100 or _REASON.fullmatch(line, 12) is None:
        raise BadAnswer("status line")
    return status


def _is_one_chunk(data: bytes) -> bool:
    """Is it one whole chunk with data in it, and nothing else? Digit by digit: compiled, that costs next to nothing."""
    length, size, at = len(data), 0, 0
    while at < length and at <= _MAX_FRAMED_DIGITS:
        digit = data[at]
        if 48 <= digit <= 57:
            size = size * 16 + digit - 48
        elif 97 <= digit <= 102:
            size = size * 16 + digit - 87
        elif 65 <= digit <= 70:
            size = size * 16 + digit - 55
        else:
            break
        at += 1
    return (
        size > 0
        and at + size + 4 == length
        and data[at] == 13
        and data[at + 1] == 10
        and data[length - 2] == 13
        and data[length - 1] == 10
    )
