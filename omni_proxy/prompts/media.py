"""Images and sound in chat messages: which they are, and how large. Pure.

An item is named by a hash of where it comes from (a URL, or the data itself), so that the same image has the same name
in every request and in every process.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

from omni_proxy.call import CHAT, Call, MediaItem

_KINDS: Final = frozenset({"image_url", "audio_url", "video_url", "input_audio"})


class _Source(Struct):
    url: str = ""
    data: str = ""


class _Part(Struct):
    type: str = ""
    image_url: _Source | str | None = None
    audio_url: _Source | str | None = None
    video_url: _Source | str | None = None
    input_audio: _Source | None = None


class _Message(Struct):
    content: Raw = Raw(b"null")


_MESSAGES: Final = msgspec.json.Decoder(list[_Message])
_PARTS: Final = msgspec.json.Decoder(list[Raw])
_PART: Final = msgspec.json.Decoder(_Part)


def media_of(call: Call) -> tuple[MediaItem, ...]:
    """The media in a chat's messages, in their order. What is malformed is for a worker to refuse."""
    if call.path != CHAT or not call.has_parts:
        return ()
    found: list[MediaItem] = []
    for message in _MESSAGES.decode(call.fields["messages"]):
        if bytes(message.content)[:1] == b"[":
            for raw in _PARTS.decode(message.content):
                item = _item(bytes(raw))
                if item is not None:
                    found.append(item)
    return tuple(found)


def _item(raw: bytes) -> MediaItem | None:
    try:
        part = _PART.decode(raw)
    except msgspec.DecodeError:
        return None
    source = _source(part)
    return None if source is None else MediaItem(raw, name_of(part.type, source))


def _source(part: _Part) -> str | None:
    if part.type not in _KINDS:
        return None
    for value in (part.image_url, part.audio_url, part.video_url, part.input_audio):
        if isinstance(value, str):
            return value
        if value is not None:
            return value.url or value.data
    return None


def name_of(kind: str, source: str) -> str:
    """A name of 16 hexadecimal digits."""
    return blake2b(f"{kind}\0{source}".encode(), digest_size=8).hexdigest()


def without_media(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with each item's name in its place: prompts with the same images before the same text begin alike."""
    return [_without(message) for message in messages]


def _without(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts: list[Any] = []
    for part in content:
        item = _item(msgspec.json.encode(part))
        parts.append(part if item is None else {"type": "text", "text": f"<{item.name}>"})
    return {**message, "content": parts}
