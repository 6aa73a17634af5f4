"""Shapes of request bodies. A module of its own: structs do not compile."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, Raw, Struct

Fields = dict[str, Raw]

_INT64: Final = 2**63 - 1
"""Numbers that the core hears of travel between processes."""


class Message(Struct):
    role: str
    content: Raw = Raw(b"null")


class Shared(Struct):
    """The fields that the gateway itself reads or vouches for, of either endpoint; all others pass unread."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = None
    max_tokens: Annotated[int, Meta(ge=0, le=_INT64)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=_INT64)] | None = None
    n: Annotated[int, Meta(ge=1, le=_INT64)] | None = None
    best_of: Annotated[int, Meta(ge=1, le=_INT64)] | None = None
    priority: Annotated[int, Meta(ge=-_INT64, le=_INT64)] | None = None
    ttft_target_s: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0)] | None = None
    stop: str | list[str] | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    logprob_start_len: int | None = None
    """SGLang's: log-probabilities from this token of the prompt on; below 0: of the answer only."""
    use_beam_search: bool | None = None


class StreamOptions(Struct):
    include_usage: bool | None = None


class Chat(Shared, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]


class Messages(Chat, kw_only=True):
    """Anthropic's shape."""


class Responses(Shared, kw_only=True):
    input: str | Annotated[list[Raw], Meta(min_length=1)]
    max_output_tokens: Annotated[int, Meta(ge=1, le=_INT64)] | None = None
    background: bool | None = None
    previous_response_id: str | None = None


class Completion(Shared, kw_only=True):
    prompt: str | Annotated[list[int | str | list[int]], Meta(min_length=1)]


class OneStep(Struct):
    model: Annotated[str, Meta(min_length=1)] | None = None
    stream: bool | None = None


class MediaItem(Struct, frozen=True):
    """An image or a sound: the part of the message as JSON, and the name of what it shows."""

    part: bytes
    name: str

    @property
    def size(self) -> int:
        """Bytes of the body that it takes."""
        return len(self.part)
