"""Prompts of a worker without a model: words are tokens, blocks of them have chained keys. Pure.

The word `w17` is token 17 and any other word the checksum of its letters, so a word-level tokenizer over `w0 w1 ...`
counts and numbers exactly as this worker does.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final
from zlib import crc32

_KEY_BYTES: Final = 8
_NUMBERED: Final = b"w0123456789 "
_MOST_DIGITS: Final = 8


def word_token(word: str) -> int:
    """The token of one word."""
    digits = word[1:]
    if word[0] == "w" and digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS:
        return int(digits)
    return crc32(word.encode("utf-8", "surrogatepass"))


def tokens_of_text(text: str) -> array[int]:
    """Token ids of a text."""
    found = _all_numbered(text)
    return array("I", map(word_token, text.split())) if found is None else found


def _all_numbered(text: str) -> array[int] | None:
    """Where all words are `w` and a number, which load clients send, much faster. None for any other text."""
    data = text.encode("utf-8", "surrogatepass")
    if not data.startswith(b"w") or data.translate(None, _NUMBERED) or b"w " in data or data.endswith(b"w"):
        return None
    numbers = text[1:].split(" w")
    if len(max(numbers, key=len)) > _MOST_DIGITS:
        return None
    try:
        return array("I", map(int, numbers))
    except ValueError:
        return None


def text_of_chat(messages: Sequence[Mapping[str, Any]]) -> str:
    """The contents of messages, one after another; parts that are no text count as one word each."""
    words: list[str] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            words.append(content)
        elif isinstance(content, list):
            words += [str(part.get("text", part.get("type"))) for part in content if isinstance(part, dict)]
    return " ".join(words)


def block_keys(tokens: array[int], block_size: int, salt: str | None = None) -> tuple[int, ...]:
    """Keys of the blocks that the tokens fill; each depends on everything before it, and on the salt."""
    view = memoryview(tokens).cast("B")
    width = block_size * tokens.itemsize
    before = b"" if salt is None else salt.encode()
    keys: list[int] = []
    for begin in range(0, len(view) - width + 1, width):
        before = blake2b(view[begin : begin + width], digest_size=_KEY_BYTES, key=before[:64]).digest()
        keys.append(int.from_bytes(before, "big"))
    return tuple(keys)
