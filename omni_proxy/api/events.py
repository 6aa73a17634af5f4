"""The side copy of a stream whose events have names: responses, messages, speech and transcripts.

As for chat and completions, bytes pass in whole events and are not changed but for P's cached tokens. Here each event
is looked at: its `type` says what it is, and there is no mark that all ends share.
"""

from __future__ import annotations

from typing import Final

import msgspec

from omni_proxy.api.shapes import NAMED_EVENT, NamedEvent
from omni_proxy.api.sse import StreamScan, payloads, read_usage, splice
from omni_proxy.messages import Usage

_ENDS: Final = frozenset(
    {
        "response.completed",
        "response.incomplete",
        "response.failed",
        "message_stop",
        "transcript.text.done",
        "speech.audio.done",
    }
)
_FAILURES: Final = frozenset({"error", "response.failed"})
_OPENINGS: Final = frozenset(
    {"", "message_start", "content_block_start", "response.created", "response.in_progress", "response.queued"}
)
"""Events that come before there is anything to see."""


class EventScan(StreamScan):
    """What passes through one stream of named events."""

    __slots__ = ()

    def feed(self, data: bytes) -> bytes:
        """Take what was read; return what the client gets now."""
        if self._tail:
            data = self._tail + data
            self._tail = b""
        data = self._hold_back(data)
        for payload in payloads(data):
            data = self._look(payload, data)
        return data

    @property
    def only_tokens(self) -> bool:
        """Every event is looked at."""
        return False

    def flush(self) -> bytes:
        """The stream has ended: what is left of it, also without a final blank line."""
        data, self._tail = self._tail, b""
        for payload in payloads(data):
            data = self._look(payload, data)
        return data

    def _look(self, payload: bytes, data: bytes) -> bytes:
        if payload == b"[DONE]":
            self.done = True
            return data
        try:
            event = NAMED_EVENT.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.opening = False
            return data
        self._take(event)
        usage = event.usage_bytes()
        return data if usage == b"null" else self._count(usage, data)

    def _take(self, event: NamedEvent) -> None:
        kind = event.type
        if kind not in _OPENINGS:
            self.opening = False
        if kind.endswith((".delta", "_delta")) and kind != "message_delta":
            self.first_content = True
        elif kind == "" and bytes(event.choices) not in (b"null", b"[]"):  # transcripts in chat's words
            self.opening, self.first_content = False, True
        if kind in _ENDS:
            self.done = True
        if kind in _FAILURES or bytes(event.error) != b"null":
            self.opening = False
            self.done = True
            self.failed = 500

    def _count(self, usage: bytes, data: bytes) -> bytes:
        """Take usage over, and put P's cached tokens in."""
        try:
            found, patched = read_usage(usage, self.cached_tokens)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return data
        before = self.usage
        self.usage = Usage(
            before.prompt_tokens if found.prompt_tokens is None else found.prompt_tokens,
            before.completion_tokens if found.completion_tokens is None else found.completion_tokens,
            before.cached_tokens if found.cached_tokens is None else found.cached_tokens,
        )
        return data if patched is None else splice(data, usage, patched)
