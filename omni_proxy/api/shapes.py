"""What is read of workers' answers and stream events: as little as is needed, the rest stays bytes."""

from __future__ import annotations

import msgspec
from msgspec import Raw, Struct

from omni_proxy.call import Fields


class Choice(Struct):
    text: str | None = None
    delta: dict[str, Raw] | None = None


class Event(Struct):
    choices: list[Choice] = []


class ErrorCodeOnly(Struct):
    code: Raw = Raw(b"null")


class ErrorTypeOnly(Struct):
    type: Raw = Raw(b"null")


class ErrorOnly(Struct):
    error: Raw = Raw(b"null")


class _Holder(Struct):
    usage: Raw = Raw(b"null")


class NamedEvent(Struct):
    """An event of responses, messages, speech or transcripts, as far as anything is read of it."""

    type: str = ""
    error: Raw = Raw(b"null")
    choices: Raw = Raw(b"null")
    usage: Raw = Raw(b"null")
    response: _Holder | None = None
    message: _Holder | str | None = None

    def usage_bytes(self) -> bytes:
        """Its usage as JSON, wherever it stands; `null` where it has none."""
        found = bytes(self.usage)
        for holder in (self.response, self.message):
            if found == b"null" and isinstance(holder, _Holder):
                found = bytes(holder.usage)
        return found


NAMED_EVENT = msgspec.json.Decoder(NamedEvent)
EVENT = msgspec.json.Decoder(Event)
ERROR = msgspec.json.Decoder(ErrorOnly)
ERROR_CODE = msgspec.json.Decoder(ErrorCodeOnly)
ERROR_TYPE = msgspec.json.Decoder(ErrorTypeOnly)
STATUS = msgspec.json.Decoder(int)


DETAILS = msgspec.json.Decoder(Fields)
COUNT = msgspec.json.Decoder(int)


class TokenChoice(Struct):
    """The only choice of a chunk of a stream that may have to be continued."""

    index: int = 0
    delta: Fields | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: Raw = Raw(b"null")
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class TokenEvent(Struct):
    """Such a chunk. `prompt_token_ids` are here in chat, and in the choice in completions; in the first chunk only."""

    id: Raw = Raw(b"null")
    object: Raw = Raw(b"null")
    created: Raw = Raw(b"null")
    model: Raw = Raw(b"null")
    prompt_token_ids: list[int] | None = None
    choices: list[TokenChoice] = []
    usage: Raw = Raw(b"null")
    error: Raw = Raw(b"null")


TOKEN_EVENT = msgspec.json.Decoder(TokenEvent)
TEXT = msgspec.json.Decoder(str)


class EndedChoice(Struct):
    stop_reason: Raw = Raw(b"null")


class EndedEvent(Struct):
    """An answer or a chunk, as far as the reason of its end is concerned."""

    choices: list[EndedChoice] = []


ENDED = msgspec.json.Decoder(EndedEvent)


class _FinishedChoice(Struct):
    finish_reason: Raw = Raw(b"null")


class FinishedEvent(Struct):
    """A chunk, as far as it says that its choices are complete."""

    choices: list[_FinishedChoice] = []


FINISHED = msgspec.json.Decoder(FinishedEvent)


class _Part(Struct):
    type: str = "text"


class _Content(Struct):
    content: str | list[_Part | str] | None = None


MESSAGES_OF_TEXT = msgspec.json.Decoder(list[_Content])
STOPS = msgspec.json.Decoder(str | list[str] | None)
