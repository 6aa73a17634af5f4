"""Encodes prompts piece by piece, so that a piece that came before costs nothing. Blocking; safe in several threads.

A text is cut where the tokenizer itself never looks across: at special tokens, and inside long texts at places that
byte-level pre-tokenizers always cut (before the space of a new word, after a line's end). Each piece is encoded once
and kept; what is new is encoded in parallel. The next turn of a conversation costs its new text.

    <|im_start|>user\\n ... long text ...<|im_end|>\\n<|im_start|>assistant\\n
    └──────────┘└───────┴─────┴─────────┘└────────┘└─┘...                     cut, not joined: ids are concatenated

Tokenizers for which that would not be exact (SentencePiece, that joins across spaces; special tokens that swallow
spaces) are found out when they are loaded: they encode whole texts.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from threading import Lock
from typing import Any, Final

from tokenizers import Tokenizer

from omni_proxy.prompts.text_tokenizer import encode

CHUNK_CHARS: Final = 4096
"""Longer texts are cut at the first safe place after so many characters."""
CACHE_BYTES: Final = 64 << 20
_ENTRY_BYTES: Final = 250
"""What an entry costs besides its text and its tokens."""
_SAFE_CUT: Final = re.compile(r"(?<=[a-z0-9,.])(?= [A-Za-z])|(?<=[a-z.]\n)(?=[A-Za-z])")
_LOCAL_STEPS: Final = frozenset({"NFC", "NFKC", "Lowercase", "Split", "ByteLevel", "Digits", "Punctuation"})
"""Steps of a tokenizer that look at nothing outside a piece."""
_FAR: Final = 4 * CHUNK_CHARS
"""Where no safe place comes within this many characters, none is looked for any more."""
_PROBES: Final = (
    "The quick brown fox, it's 12345 years old.\nJumps over  the lazy dog's back; naïve café — ok?\n\n  Yes it does.\n",
    "def f(x):\n    return x + 1\nclass A:\n\tpass\n# don't stop Now you'll see TheEnd of it all\r\nnext line here",
    "日本語のテキスト and English words mixed 你好 world again. Zahlen 1 2 3 und Wörter über alles hinaus",
)


class TokenCache:
    """Tokens of pieces of text, the least recently used forgotten first. Bounded in bytes."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max = max_bytes
        self._bytes = 0
        self._entries: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = Lock()
        self.hits = 0
        self.misses = 0

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def get(self, text: str) -> array[int] | None:
        with self._lock:
            found = self._entries.get(text)
            if found is None:
                self.misses += 1
                return None
            self.hits += 1
            self._entries.move_to_end(text)
            return found

    def put(self, text: str, ids: array[int]) -> None:
        with self._lock:
            if text in self._entries:
                return
            self._entries[text] = ids
            self._bytes += _cost(text, ids)
            while self._bytes > self._max:
                self._bytes -= _cost(*self._entries.popitem(last=False))


class SegmentEncoder:
    """One tokenizer with its cache."""

    def __init__(self, tokenizer: Tokenizer, cache: TokenCache | None = None) -> None:
        self._tokenizer = tokenizer
        self.cache = TokenCache() if cache is None else cache
        added = tokenizer.get_added_tokens_decoder()
        self._marks = [_Marks({t.content: id for id, t in added.items() if not t.normalized})]
        if not _parts(tokenizer.normalizer):  # these are looked for in the normalized text, which is the text itself
            self._marks.append(_Marks({t.content: id for id, t in added.items() if t.normalized}))
        plain = all(not (token.lstrip or token.rstrip or token.single_word) for token in added.values())
        self.cuts_at_marks: Final = plain and _keeps_beginnings(tokenizer)
        self.cuts_inside: Final = (
            self.cuts_at_marks
            and not any(_SAFE_CUT.search(token.content) for token in added.values())
            and self._probes_agree()
        )
        self._before, self._after = _template(tokenizer)

    def encode(self, text: str, add_special_tokens: bool = False) -> array[int]:
        """Token ids of a text, equal to those of encoding it whole. Raises what the tokenizer raises."""
        if not self.cuts_at_marks or (add_special_tokens and self._before is None):
            return array("I", encode(self._tokenizer, text, add_special_tokens))
        ids = self._encode_pieces(self._pieces(text))
        if add_special_tokens and self._before is not None:
            return self._before + ids + self._after
        return ids

    def _encode_pieces(self, pieces: list[str | int]) -> array[int]:
        known: dict[str, array[int]] = {}
        new: dict[str, None] = {}
        for piece in pieces:
            if isinstance(piece, str) and piece not in known and piece not in new:
                found = self.cache.get(piece)
                if found is None:
                    new[piece] = None
                else:
                    known[piece] = found
        for piece, ids in self._encode_new(list(new)):
            known[piece] = ids
            self.cache.put(piece, ids)
        whole = array("I")
        for piece in pieces:
            if isinstance(piece, str):
                whole.extend(known[piece])
            else:
                whole.append(piece)
        return whole

    def _encode_new(self, pieces: list[str]) -> Iterable[tuple[str, array[int]]]:
        """The tokenizer's own threads share the work out; the interpreter is free meanwhile."""
        if not pieces:
            return []
        batch = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        return [(piece, array("I", encoding.ids)) for piece, encoding in zip(pieces, batch, strict=True)]

    # ---------------------------------------------------------------------- cutting

    def _pieces(self, text: str) -> list[str | int]:
        """The text's pieces in order: special tokens as ids, the rest as text."""
        pieces: list[str | int] = [text]
        for marks in self._marks:
            pieces = [part for piece in pieces for part in ([piece] if isinstance(piece, int) else marks.split(piece))]
        return [part for piece in pieces for part in ([piece] if isinstance(piece, int) else self._chunks(piece))]

    def _chunks(self, text: str) -> Iterator[str]:
        """A long text in parts whose borders depend on the text before them only: text that grows keeps its parts."""
        start = 0
        while self.cuts_inside and len(text) - start > CHUNK_CHARS:
            cut = _SAFE_CUT.search(text, start + CHUNK_CHARS, start + CHUNK_CHARS + _FAR)
            if cut is None:
                break
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:] if start else text

    def _probes_agree(self) -> bool:
        """Does cutting at every safe place change nothing?"""
        for probe in _PROBES:
            borders = [0, *(cut.start() for cut in _SAFE_CUT.finditer(probe)), len(probe)]
            parts = [probe[a:b] for a, b in pairwise(borders)]
            joined = [id for part in parts for id in encode(self._tokenizer, part, False)]
            if joined != encode(self._tokenizer, probe, False):
                return False
        return True


class _Marks:
    """Some special tokens, to be found as the tokenizer finds them: leftmost first, at one place the longest."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._lengths = sorted({len(text) for text in ids}, reverse=True)
        firsts = "".join(sorted({text[0] for text in ids if text}))
        self._first = re.compile(f"[{re.escape(firsts)}]") if firsts else None

    def split(self, text: str) -> Iterator[str | int]:
        """Marks as ids, what is between them as text."""
        start = 0
        for at, mark in self._found(text):
            if at > start:
                yield text[start:at]
            yield self._ids[mark]
            start = at + len(mark)
        if start < len(text):
            yield text[start:] if start else text

    def _found(self, text: str) -> Iterator[tuple[int, str]]:
        end = 0
        for found in self._first.finditer(text) if self._first is not None else ():
            at = found.start()
            if at < end:
                continue
            for length in self._lengths:
                if (mark := text[at : at + length]) in self._ids:
                    end = at + len(mark)
                    yield at, mark
                    break


def _cost(text: str, ids: array[int]) -> int:
    return len(text) * (1 if text.isascii() else 4) + len(ids) * ids.itemsize + _ENTRY_BYTES


def _keeps_beginnings(tokenizer: Tokenizer) -> bool:
    """Is a text the same at the beginning of a prompt and behind a special token? Not where a space is put in front."""
    for step in (*_parts(tokenizer.normalizer), *_parts(tokenizer.pre_tokenizer)):
        prefixed = step.get("add_prefix_space") or step.get("prepend_scheme") in ("first", "always")
        if prefixed or step.get("type") not in _LOCAL_STEPS:
            return False
    whole = tokenizer.truncation is None and tokenizer.padding is None
    return whole and tokenizer.pre_tokenizer is not None and type(tokenizer.model).__name__ == "BPE"


def _parts(component: Any) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer; none if there is none."""
    # The component's own JSON: that of the whole tokenizer holds the vocabulary and takes seconds.
    return [] if component is None else list(_steps(json.loads(component.__getstate__())))


def _steps(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if part.get("type") != "Sequence":
        yield part
        return
    for inner in (*part.get("normalizers", ()), *part.get("pretokenizers", ())):
        yield from _steps(inner)


def _template(tokenizer: Tokenizer) -> tuple[array[int] | None, array[int]]:
    """What the tokenizer puts before and after a prompt; (None, ...) when that cannot be told."""
    bare, dressed = encode(tokenizer, "a", False), encode(tokenizer, "a", True)
    for at in range(len(dressed) - len(bare) + 1):
        if dressed[at : at + len(bare)] == bare:
            return array("I", dressed[:at]), array("I", dressed[at + len(bare) :])
    return None, array("I")
