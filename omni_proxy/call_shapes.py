"""Shapes of request bodies, and what becomes of one: `Call`. A module of its own: structs do not compile."""

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


class Call(Struct):
    """One client call as the gateway understands it. `body` and `fields` are what the client sent."""

    path: str
    body: bytes
    fields: Fields
    model: str
    stream: bool = False
    max_tokens: int | None = None
    priority: int = 0
    ttft_target_s: float | None = None
    """How soon the client wants the first token; a field of ours, which workers ignore."""
    wants_usage: bool = False
    """The client asked for usage in its stream."""
    prompts: int = 1
    samples: int = 1
    asked: str = ""
    """What the client called the model, where that was looked up."""
    thinking: bool = False
    """The model should think before it answers: such answers are long."""
    whole: bool = False
    """Must be computed by one worker: several answers, or an answer about the prompt itself."""
    whole_because: str | None = None
    """The field that asks for that."""
    parts: int = 1
    """So many answers of one prompt each would serve it as well; 1: it cannot be divided."""
    tampered: bool = False
    """The client sent internal fields; they must not reach a worker."""
    form: bool = False
    """The body is a multipart form and passes as it is, under the client's own content type."""
    content_type: bytes = b""
    """Of a form."""
    prompt_bytes: int | None = None
    """How much of the body is text to be computed; None: all of it."""
    has_parts: bool = False
    """A message's content is a list of parts, not one text."""
    media: tuple[MediaItem, ...] = ()
    """Images and sound in its messages."""
    token_ids: bytes = b""
    """The prompt's token ids as JSON, where it was text and workers are to get them."""
