"""Text in, text out: the model's tokenizer, the incremental detokeniser, and stop strings. No IO after loading.

A streamed answer must equal the whole answer: no replacement character for a character whose bytes are still on
their way, and no text that a stop string would have cut.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol

from tokenizers import Tokenizer

from omni_proxy.prompts.text_tokenizer import encode, load_tokenizer

_REPLACEMENT: Final = "\ufffd"
_CONTEXT_TOKENS: Final = 5
"""So many tokens before a token decide its text, at most."""


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE for the 256 bytes, as GPT-2 defined them."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(plain)]
    alphabet = {chr(byte): byte for byte in plain}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(rest)})
    return alphabet


_BYTE_OF: Final = _byte_alphabet()


class Detokenizer(Protocol):
    """Turns tokens into text as they come; what it returned so far plus `finish()` is the whole text."""

    def push(self, token_id: int) -> str:
        """The text that this token completes, often empty."""
        ...

    def finish(self) -> str:
        """What is left at the end: replacement characters for bytes that never became a character."""
        ...

    @property
    def holds(self) -> bool:
        """Has a token come whose text has not been returned whole?"""
        ...


class ModelTokenizer:
    """The tokenizer of one model folder. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids: Final = frozenset(i for i, token in added.items() if token.special)
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        self._byte_level: Final = decoder.get("type") == "ByteLevel"
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path) -> ModelTokenizer:
        """Read `tokenizer.json`; raises `TokenizerError` that names the file."""
        return cls(load_tokenizer(folder))

    def to_json(self) -> str:
        """The whole tokenizer, in the form of `tokenizer.json`."""
        return str(self._tokenizer.to_str())

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Lets go of the interpreter lock while it works."""
        return encode(self._tokenizer, text, add_special_tokens)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The whole text of some tokens at once."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    @cached_property
    def max_token_chars(self) -> int:
        """Length of the longest token: a text of n characters has at least n / this many tokens."""
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; empty for an id that the tokenizer does not know."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """One token alone as text; incomplete characters show as replacement characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def detokenizer(self, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> Detokenizer:
        """A detokeniser for one answer; the end of its prompt decides whether it begins with a space."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        if self._byte_level:
            return _ByteDetokenizer(self, skip)
        return _WindowDetokenizer(self, skip, prompt[-_CONTEXT_TOKENS:])

    def _find_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if not self._byte_level:
            return self.decode([token_id], skip_special_tokens=False).encode("utf-8", "replace")
        try:
            return bytes(_BYTE_OF[char] for char in token)
        except KeyError:  # an added token that holds a character outside the alphabet stands for itself
            return str(token).encode("utf-8", "replace")


class _ByteDetokenizer:
    """Exact and constant time per token: byte-level tokens are bytes, so only UTF-8 has to be taken apart."""

    def __init__(self, tokenizer: ModelTokenizer, skip: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)

    @property
    def holds(self) -> bool:
        return self._utf8.getstate()[0] != b""


class _WindowDetokenizer:
    """For tokenizers whose text depends on neighbours (SentencePiece): decode a short window, take what is new.

    ids   ... | context | new ...
              ^from     ^seen
    """

    def __init__(self, tokenizer: ModelTokenizer, skip: frozenset[int], context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._ids = [token for token in context if token not in skip]
        self._from = 0
        self._seen = len(self._ids)

    def push(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._ids.append(token_id)
        return self._take(final=False)

    def finish(self) -> str:
        return self._take(final=True)

    @property
    def holds(self) -> bool:
        return self._seen < len(self._ids)

    def _take(self, final: bool) -> str:
        old = self._text(self._from, self._seen)
        new = self._text(self._from, len(self._ids))
        if len(new) <= len(old) or (new.endswith(_REPLACEMENT) and not final):
            return ""
        self._from, self._seen = self._seen, len(self._ids)
        return new[len(old) :]

    def _text(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._ids[start:end], skip_special_tokens=False)


class StopStrings:
    """Cuts a text at the first stop string and holds back only what may still become one."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text; the caller feeds nothing after it."""

    def feed(self, text: str) -> str:
        """The part of the text so far that is safe to show and was not shown before."""
        if not self._stops:
            return text
        held = self._held + text
        found = min(((held.find(s), -len(s), s) for s in self._stops if s in held), default=None)
        if found is not None:
            position, _, self.matched = found
            self._held = ""
            return held[: position + (len(self.matched) if self._include else 0)]
        keep = self._longest_start(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    @property
    def holds(self) -> bool:
        """Is there text that may still become a stop string?"""
        return self._held != ""

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _longest_start(self, text: str) -> int:
        """Length of the longest end of `text` that is the start of a stop string, not all of it."""
        most = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(most, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
