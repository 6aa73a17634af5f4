"""Reads an event stream as a client does: when the first token came, when the last, what was counted. Pure.

Only the first events, and those that can be more than a token, are decoded; the rest costs a few comparisons. Knows
nothing of the gateway's own reader of streams, so that each can find the other's faults.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Struct

_DATA: Final = b"data:"


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(Struct):
    text: str | None = None
    delta: _Delta | None = None
    message: _Delta | None = None

    def has_content(self) -> bool:
        shown = self.delta or self.message
        if shown is None:
            return bool(self.text)
        return bool(shown.content or shown.reasoning_content or shown.reasoning)


class _Event(Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


_EVENT: Final = msgspec.json.Decoder(_Event)


class StreamReader:
    """One answer. Instants are those at which bytes arrived, in seconds."""

    __slots__ = ("_rest", "cached_tokens", "chunks", "completion_tokens", "done", "error", "first_at", "last_at")

    def __init__(self) -> None:
        self.first_at: float | None = None
        """The first content token; roles and empty pieces are none."""
        self.last_at: float | None = None
        """The last content token."""
        self.chunks = 0
        """Events with content; an engine may put several tokens into one."""
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.done = False
        self.error: str | None = None
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Take in bytes as they come."""
        lines = (self._rest + data).split(b"\n") if self._rest else data.split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(_DATA):
                self._event(line[len(_DATA) :].strip(), now)

    def whole(self, body: bytes, now: float) -> None:
        """An answer that was not streamed."""
        self._decode(body, now)
        self.done = self.error is None

    def _event(self, payload: bytes, now: float) -> None:
        plain = b'"finish_reason":null' in payload and (b'"usage"' not in payload or b'"usage":null' in payload)
        if plain and self.first_at is not None:
            self.chunks += 1
            self.last_at = now
        elif payload == b"[DONE]":
            self.done = True
        else:
            self._decode(payload, now)

    def _decode(self, payload: bytes, now: float) -> None:
        try:
            event = _EVENT.decode(payload)
        except msgspec.MsgspecError as exc:
            self.error = f"an event that is no answer ({exc})"
            return
        if event.error is not None and bytes(event.error) != b"null":
            self.error = bytes(event.error).decode("utf-8", "replace")[:200]
        if any(choice.has_content() for choice in event.choices):
            self.chunks += 1
            self.last_at = now
            if self.first_at is None:
                self.first_at = now
        if event.usage is not None:
            self._count(event.usage)

    def _count(self, usage: _Usage) -> None:
        self.completion_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.cached_tokens = usage.prompt_tokens_details.cached_tokens
