"""The side copy of a stream: reads as little of it as needed, changes nothing but usage.

Bytes pass as they come, in whole events; the half of an event that a read may end with waits for its other half. Only
events that show a marker are parsed: the first ones until content appears, those with usage, those with an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec

from omni_proxy.api.shapes import (
    DETAILS,
    ENDED,
    ERROR,
    ERROR_CODE,
    ERROR_TYPE,
    EVENT,
    FINISHED,
    STATUS,
    Choice,
)
from omni_proxy.call import encode_fields
from omni_proxy.json_fields import count_of, json_of, pick
from omni_proxy.messages import Failure, FailureKind, Usage

MAX_EVENT_BYTES: Final = 4 << 20
"""A longer event is passed on unread."""

_BOUNDARIES: Final = (b"\n\n", b"\n\r\n", b"\r\r")
BOUNDARY: Final = re.compile(rb"(\r?\n\r\n|\n\n|\r\r)")
_DATA: Final = re.compile(rb"(?:\A|(?<=[\r\n]))data: ?([^\r\n]*)")
_USAGE_MARKS: Final = (b'"usage":{', b'"usage": {')
_WITH_USAGE: Final[tuple[str, ...]] = ("usage", "choices")
_USAGE: Final[tuple[str, ...]] = (
    "prompt_tokens",
    "completion_tokens",
    "prompt_tokens_details",
    "input_tokens",
    "output_tokens",
    "input_tokens_details",
)
"""In the words of chat and completions, and of responses and messages."""
_DETAILS: Final[tuple[str, ...]] = ("cached_tokens",)
_GAVE_UP: Final = b'"recomputed"'
_ABANDONED: Final = b'"abandoned"'
_ERROR_MARK: Final = b'"error"'
DONE: Final = b"[DONE]"
MARKS: Final = (*_USAGE_MARKS, _GAVE_UP, _ERROR_MARK, DONE)
"""What `StreamScan` looks for once content has begun."""
NOTHING: Final = frozenset({b'""', b"null", b"[]", b"{}"})
"""Values of a delta's field that say nothing."""


class StreamScan:
    """What passes through one stream. `strip_usage`: the client did not ask for usage, we did.

    `cached_tokens` is P's count; D's own says that the whole prompt was cached, because it was pulled. `own_stop`: the
    client's own stop strings may be taken for a worker's word that it gave up.
    """

    __slots__ = (
        "_counted",
        "_own_stop",
        "_strip_usage",
        "_tail",
        "broke",
        "cached_tokens",
        "done",
        "failed",
        "first_content",
        "mid_event",
        "opening",
        "usage",
    )

    def __init__(self, strip_usage: bool, cached_tokens: int | None, own_stop: bool = False) -> None:
        self._strip_usage = strip_usage
        self._own_stop = own_stop
        self.broke: Failure | None = None
        """Why nothing more is to be expected, though the worker has not closed the stream."""
        self.cached_tokens = cached_tokens
        self._tail = b""
        self._counted = b""
        """The last event with usage."""
        self.opening = True
        """Nothing has come but roles and empty deltas: no client misses them yet."""
        self.first_content = False
        self.done = False
        """`[DONE]` has come; or, once the stream has ended in good order, what some engines end with instead."""
        self.failed = 0
        """The status that an error event speaks of; 0: there was none."""
        self.mid_event = False
        """What has been passed on ends within an event."""
        self.usage = Usage()

    def feed(self, data: bytes) -> bytes:
        """Take what was read; return what the client gets now."""
        if self._tail:
            data = self._tail + data
            self._tail = b""
        if data[-2:] != b"\n\n":
            data = self._hold_back(data)
            if not data:
                return data
        if _has(data, _GAVE_UP) and not self._own_stop:
            data = self._until(data, gives_up, "recomputed")
        if not self.first_content:
            opening = self.opening
            self._look_for_content(data)
            if opening and not self.first_content and _has(data, _ABANDONED):
                data = self._until(data, abandons, "abandoned")
                self.opening = self.broke is not None or self.opening
        if _has(data, _ERROR_MARK):
            self._look_for_error(data)
        if _has(data, DONE) and any(payload == DONE for payload in payloads(data)):
            self.done = True
        if _has(data, b'"usage"') and (_has(data, _USAGE_MARKS[0]) or _has(data, _USAGE_MARKS[1])):
            return self._read_usage(data)
        return data

    @property
    def only_tokens(self) -> bool:
        """Would it let whole events without one of `MARKS` pass unread, from here on?"""
        return self.first_content and not (self._tail or self.mid_event or self.done or self.failed or self.broke)

    def flush(self) -> bytes:
        """The stream has ended: what is left of it, also without a final blank line."""
        data, self._tail = self._tail, b""
        if data and any(payload == DONE for payload in payloads(data)):
            self.done = True
        self.done = self.done or (len(self._counted) > 0 and _ends_with_usage(self._counted))
        return data

    def _hold_back(self, data: bytes) -> bytes:
        cut = 0
        for boundary in _BOUNDARIES:
            at = data.rfind(boundary)
            if at >= 0:
                cut = max(cut, at + len(boundary))
        self.mid_event = len(data) - cut > MAX_EVENT_BYTES
        if self.mid_event:
            return data
        self._tail = data[cut:]
        return data[:cut]

    def _until(self, data: bytes, gives_up: Callable[[bytes], bool], word: str) -> bytes:
        """What stands before the event with which a worker gives an answer up; that one is not for the client."""
        parts = BOUNDARY.split(data)
        for number in range(0, len(parts), 2):
            if any(map(gives_up, payloads(parts[number]))):
                self.broke = Failure(FailureKind.GAVE_UP, word, answered=True)
                return b"".join(parts[:number])
        return data

    def _look_for_content(self, data: bytes) -> None:
        found = payloads(data)
        # Comments alone keep a connection alive: whoever needs them gets them.
        self.opening = self.opening and bool(found)
        for payload in found:
            try:
                event = EVENT.decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self.opening = False
                continue
            if any(map(_has_content, event.choices)):
                self.first_content = True
                self.opening = False
                return
            self.opening = self.opening and bool(event.choices)

    def _look_for_error(self, data: bytes) -> None:
        for payload in payloads(data):
            try:
                error = bytes(ERROR.decode(payload).error)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if error != b"null":
                self.failed = status_of(error)

    def _read_usage(self, data: bytes) -> bytes:
        parts = BOUNDARY.split(data)
        out: list[bytes] = []
        for event, boundary in zip(parts[::2], [*parts[1::2], b""], strict=True):
            rewritten = self._usage_event(event)
            if rewritten is not None:
                out += [rewritten, boundary]
        return b"".join(out)

    def _usage_event(self, event: bytes) -> bytes | None:
        """An event after its usage was read and P's cached tokens were put in; None: not for the client."""
        found = payloads(event)
        if len(found) != 1:
            return event
        try:
            value, choices = pick(found[0], _WITH_USAGE)
            usage = json_of(value)
            if usage is None:
                return event
            self.usage, patched = read_usage(usage, self.cached_tokens)
            self._counted = found[0]
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return event
        if self._strip_usage and choices == b"[]":
            return None
        return event if patched is None else splice(event, usage, patched)


def gives_up(payload: bytes) -> bool:
    """Does an answer or a chunk end because the worker needs the room (vLLM-Ascend)?"""
    try:
        ended = ENDED.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return any(bytes(choice.stop_reason) == _GAVE_UP for choice in ended.choices)


def _ends_with_usage(payload: bytes) -> bool:
    """Is this event with usage the last of its stream (`transformers serve` sends no `[DONE]` after it)?"""
    try:
        return all(bytes(choice.finish_reason) != b"null" for choice in FINISHED.decode(payload).choices)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def abandons(body: bytes) -> bool:
    """Does an error say that the worker had begun and could not go on (the embedded engine)?"""
    if body.find(_ABANDONED) < 0:
        return False
    try:
        return bytes(ERROR_TYPE.decode(ERROR.decode(body).error).type) == _ABANDONED
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


def _has(data: bytes, mark: bytes) -> bool:
    """Is the mark in it? `in` and `find` cost three to five times as much: the one tries the mark as a number first,
    the other reads its arguments from a tuple."""
    return len(data.partition(mark)[1]) > 0


def payloads(data: bytes) -> list[bytes]:
    """The `data:` payloads in some events; comment lines and other fields are passed over."""
    return _DATA.findall(data)


def _has_content(choice: Choice) -> bool:
    if choice.delta is None:
        return bool(choice.text)
    return any(name != "role" and bytes(raw) not in NOTHING for name, raw in choice.delta.items())


def status_of(error: bytes) -> int:
    """The HTTP status that an error event carries as its code; 500 where it carries none."""
    try:
        code = STATUS.decode(ERROR_CODE.decode(error).code)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 500
    return code if 400 <= code <= 599 else 500


def read_usage(raw: bytes, cached_tokens: int | None) -> tuple[Usage, bytes | None]:
    """D's counts, and the usage object with P's cached tokens in it (None: it stays as it is).

    Engines that report no details at all are left alone: they were told not to. Raises msgspec.MsgspecError.
    """
    prompt, made, prompt_details, input_tokens, output_tokens, input_details = pick(raw, _USAGE)
    asked = count_of(input_tokens if prompt is None else prompt)
    answered = count_of(output_tokens if made is None else made)
    details = json_of(input_details if prompt_details is None else prompt_details)
    if details is None:
        return Usage(asked, answered), None
    if cached_tokens is None:
        return Usage(asked, answered, count_of(pick(details, _DETAILS)[0])), None
    patched = encode_fields({**DETAILS.decode(details), "cached_tokens": b"%d" % cached_tokens})
    return Usage(asked, answered), splice(raw, details, patched)


def splice(body: bytes, old: bytes, new: bytes) -> bytes:
    """`body` with the last occurrence of `old` replaced.

    Safe for a JSON object inside JSON text: quotes inside strings are escaped, so text can never look like it.
    """
    at = body.rindex(old)
    return body[:at] + new + body[at + len(old) :]
