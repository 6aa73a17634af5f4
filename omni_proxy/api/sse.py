"""The side copy of a stream: reads as little of it as needed, changes nothing but usage.

Bytes pass as they come, in whole events; the half of an event that a read may end with waits for its other half. Only
events that show a marker are parsed: the first ones until content appears, those with usage, those with an error.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec import Raw, Struct

from omni_proxy.call import Fields, encode_fields
from omni_proxy.messages import Usage

MAX_EVENT_BYTES: Final = 4 << 20
"""A longer event is passed on unread."""

_BOUNDARIES: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
_BOUNDARY: Final = re.compile(rb"(\r\n\r\n|\n\n|\r\r)")
_DATA: Final = re.compile(rb"^data: ?(.*?)\r?$", re.MULTILINE)
_USAGE_MARKS: Final = (b'"usage":{', b'"usage": {')
_ERROR_MARK: Final = b'"error"'
_FINISH: Final = re.compile(rb'"finish_reason": ?"([a-z_]+)"')
_FINISH_MARK: Final = b'"finish_reason"'
_DONE: Final = b"[DONE]"


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Raw] | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Event(Struct):
    choices: list[_Choice] = []


class _Error(Struct):
    error: Raw = Raw(b"null")


_EVENT = msgspec.json.Decoder(_Event)
_ERROR = msgspec.json.Decoder(_Error)
_FIELDS = msgspec.json.Decoder(Fields)


class StreamScan:
    """What passes through one stream. `strip_usage`: the client did not ask for usage, we did.

    `cached_tokens` is P's count; D's own says that the whole prompt was cached, because it was pulled.
    """

    __slots__ = (
        "_cached_tokens",
        "_strip_usage",
        "_tail",
        "done",
        "events",
        "failed",
        "finish_reason",
        "first_content",
        "usage",
    )

    def __init__(self, strip_usage: bool, cached_tokens: int | None) -> None:
        self._strip_usage = strip_usage
        self._cached_tokens = cached_tokens
        self._tail = b""
        self.first_content = False
        self.done = False
        self.failed = False
        self.finish_reason: str | None = None
        self.events = 0
        self.usage = Usage()

    def feed(self, data: bytes) -> bytes:
        """Take what was read; return what the client gets now."""
        if self._tail:
            data = self._tail + data
            self._tail = b""
        if not data.endswith(b"\n\n"):
            data = self._hold_back(data)
            if not data:
                return data
        self.events += 1
        if not self.first_content:
            self._look_for_content(data)
        if _ERROR_MARK in data:
            self._look_for_error(data)
        if _FINISH_MARK in data and (found := _FINISH.search(data)):
            self.finish_reason = found[1].decode()
        if _DONE in data and any(payload == _DONE for payload in payloads(data)):
            self.done = True
        if _USAGE_MARKS[0] in data or _USAGE_MARKS[1] in data:
            return self._read_usage(data)
        return data

    def flush(self) -> bytes:
        """The stream has ended: what is left of it, also without a final blank line."""
        data, self._tail = self._tail, b""
        if data and any(payload == _DONE for payload in payloads(data)):
            self.done = True
        return data

    def _hold_back(self, data: bytes) -> bytes:
        cut = 0
        for boundary in _BOUNDARIES:
            at = data.rfind(boundary)
            if at >= 0:
                cut = max(cut, at + len(boundary))
        if len(data) - cut > MAX_EVENT_BYTES:
            return data
        self._tail = data[cut:]
        return data[:cut]

    def _look_for_content(self, data: bytes) -> None:
        for payload in payloads(data):
            try:
                event = _EVENT.decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if any(map(_has_content, event.choices)):
                self.first_content = True
                return

    def _look_for_error(self, data: bytes) -> None:
        for payload in payloads(data):
            try:
                event = _ERROR.decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if bytes(event.error) != b"null":
                self.failed = True

    def _read_usage(self, data: bytes) -> bytes:
        parts = _BOUNDARY.split(data)
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
            fields = _FIELDS.decode(found[0])
            usage = msgspec.json.decode(fields["usage"], type=Fields | None)
        except (msgspec.DecodeError, UnicodeDecodeError, KeyError):
            return event
        if usage is None:
            return event
        self.usage = read_usage(usage)
        if self._strip_usage and bytes(fields.get("choices", b"")).strip() == b"[]":
            return None
        patched = with_cached_tokens(usage, self._cached_tokens)
        if patched is None:
            return event
        return event.replace(found[0], encode_fields({**fields, "usage": patched}))


def payloads(data: bytes) -> list[bytes]:
    """The `data:` payloads in some events; comment lines and other fields are passed over."""
    return _DATA.findall(data)


def _has_content(choice: _Choice) -> bool:
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


def read_usage(usage: Fields) -> Usage:
    """Token counts of a usage object; what is not a count is None."""
    details = _object(usage.get("prompt_tokens_details"))
    return Usage(
        _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens")), _count(details.get("cached_tokens"))
    )


def with_cached_tokens(usage: Fields, cached_tokens: int | None) -> bytes | None:
    """A usage object with P's cached tokens in it, or None where it stays as it is.

    Engines that report no details at all are left alone: they were told not to.
    """
    if cached_tokens is None or bytes(usage.get("prompt_tokens_details", b"null")) == b"null":
        return None
    details = _object(usage["prompt_tokens_details"])
    patched = encode_fields({**details, "cached_tokens": b"%d" % cached_tokens})
    return encode_fields({**usage, "prompt_tokens_details": patched})


def _object(raw: Raw | None) -> Fields:
    try:
        return msgspec.json.decode(raw, type=Fields | None) or {} if raw is not None else {}
    except msgspec.DecodeError:
        return {}


def _count(raw: Raw | None) -> int | None:
    try:
        return msgspec.json.decode(raw, type=int | None) if raw is not None else None
    except msgspec.DecodeError:
        return None
