"""Function calls inside an answer's text, taken out while it streams. Pure.

Three notations: calls between `<tool_call>` tags amid other text (Hermes, Qwen, SmolLM2), a JSON list of calls (forced
by `tool_choice: required`), and bare arguments (forced by a named function). Pieces joined are the whole calls.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

_OPEN: Final = "<tool_call>"
_CLOSE: Final = "</tool_call>"
_BEFORE_TAG: Final = re.compile(r"\s*(?:<(?:t(?:o(?:o(?:l(?:_(?:c(?:a(?:l(?:l)?)?)?)?)?)?)?)?)?)?$")
"""The end of a text that may belong to an opening tag."""
_ARGUMENTS: Final = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class CallPiece:
    """More of one call: `name` once, at its beginning, then its arguments as JSON text in pieces."""

    index: int
    name: str | None = None
    arguments: str = ""


class ToolText(Protocol):
    """Reads an answer's text."""

    def fresh(self) -> ToolText:
        """One for another answer."""
        ...

    def feed(self, text: str, final: bool) -> tuple[str, list[CallPiece]]:
        """What `text` adds to the content and to the calls; `final` when no more follows."""
        ...


@dataclass(slots=True)
class _Call:
    """One JSON object with a name and arguments, read character by character.

    ```
    {"name": "f", "arguments": {"a": [1]} }
     ^key    ^value             ^ depth 2..  ^ depth 0: complete
    ```
    """

    text: str = ""
    depth: int = 0
    complete: bool = False
    name: str | None = None
    told_name: bool = False
    told: int = 0
    """Characters of the arguments that were passed on; counts from their beginning."""
    _quoted: bool = False
    _escaped: bool = False
    _string_at: int = 0
    _key: str | None = None
    _value_at: int | None = None
    _arguments: tuple[int, int | None] | None = None

    def feed(self, text: str) -> int:
        """Read on; returns how many characters belong to the object."""
        for count, char in enumerate(text, 1):
            self.text += char
            self._read(char, len(self.text) - 1)
            if self.complete:
                return count
        return len(text)

    def news(self, index: int) -> CallPiece | None:
        """What can be told since the last time."""
        if self.name is None:
            return None
        name = None if self.told_name else self.name
        self.told_name = True
        arguments = self._untold()
        return CallPiece(index, name, arguments) if name is not None or arguments else None

    def _untold(self) -> str:
        if self._arguments is None:
            if not self.complete or self.told:
                return ""
            self.told = 2
            return "{}"
        start, end = self._arguments
        value = self.text[start:end].lstrip()
        if value.startswith('"'):  # arguments as a text that holds JSON: only when it is whole
            if end is None or self.told:
                return ""
            self.told = len(value)
            return str(_decoded(value))
        new = value[self.told :] if end is None else value.rstrip()[self.told :]
        self.told += len(new)
        return new

    def _read(self, char: str, at: int) -> None:
        if self._quoted:
            self._in_string(char, at)
        elif char == '"':
            self._quoted, self._string_at = True, at
        elif char in "{[":
            self.depth += 1
        elif char in "}]":
            self.depth -= 1
            if self.depth == 0:
                self._end_value(at)
                self.complete = True
        elif self.depth == 1 and char == ":":
            self._value_at = at + 1
            if self._key in _ARGUMENTS:
                self._arguments = (at + 1, None)
        elif self.depth == 1 and char == ",":
            self._end_value(at)

    def _in_string(self, char: str, at: int) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._quoted = False
            if self.depth == 1 and self._value_at is None:
                self._key = str(_decoded(self.text[self._string_at : at + 1]))

    def _end_value(self, at: int) -> None:
        if self._value_at is None:
            return
        if self._key == "name":
            name = _decoded(self.text[self._value_at : at])
            self.name = name if isinstance(name, str) else None
        elif self._key in _ARGUMENTS:
            self._arguments = (self._value_at, at)
        self._key = self._value_at = None


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(slots=True)
class HermesCalls:
    """Calls between tags; everything else is content, without the white space around calls."""

    _held: str = ""
    _call: _Call | None = None
    _index: int = 0
    _inside: bool = False
    _after_call: bool = False
    """Nothing but white space has come since a call: it is not content."""

    def fresh(self) -> HermesCalls:
        return HermesCalls()

    def feed(self, text: str, final: bool) -> tuple[str, list[CallPiece]]:
        self._held += text
        content: list[str] = []
        pieces: list[CallPiece] = []
        while self._step(content, pieces):
            pass
        if final:
            content.append(self._rest())
        return "".join(content), pieces

    def _step(self, content: list[str], pieces: list[CallPiece]) -> bool:
        """Take what is clear; whether there may be more of it."""
        if self._call is not None:
            return self._in_call(self._call, pieces)
        if self._inside:
            return self._to_close()
        before, tag, after = self._held.partition(_OPEN)
        if tag:
            content.append(self._content(before.rstrip()))
            self._held, self._call, self._inside = after, _Call(), True
            return True
        held = _BEFORE_TAG.search(before)
        keep = len(before) if held is None else held.start()
        content.append(self._content(before[:keep]))
        self._held = before[keep:]
        return False

    def _content(self, text: str) -> str:
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return text

    def _in_call(self, call: _Call, pieces: list[CallPiece]) -> bool:
        if not call.text:
            self._held = self._held.lstrip()
        if not self._held:
            return False
        taken = call.feed(self._held)
        self._held = self._held[taken:]
        news = call.news(self._index)
        if news is not None:
            pieces.append(news)
        if not call.complete:
            return False
        self._index += call.name is not None
        self._call = None
        return True

    def _to_close(self) -> bool:
        _, tag, after = self._held.partition(_CLOSE)
        if tag:
            self._held, self._inside, self._after_call = after, False, True
        return bool(tag)

    def _rest(self) -> str:
        """What was held back at the end: a call that never got a name is text after all."""
        call, held = self._call, self._held
        self._call, self._held = None, ""
        if call is not None:
            return "" if call.told_name else _OPEN + call.text + held
        return "" if self._inside else self._content(held)


@dataclass(slots=True)
class ListedCalls:
    """A JSON list of calls."""

    _call: _Call = field(default_factory=_Call)
    _index: int = 0

    def fresh(self) -> ListedCalls:
        return ListedCalls()

    def feed(self, text: str, final: bool) -> tuple[str, list[CallPiece]]:
        pieces: list[CallPiece] = []
        while text:
            if not self._call.text:
                text = text[text.find("{") :] if "{" in text else ""
            text = text[self._call.feed(text) :]
            news = self._call.news(self._index)
            if news is not None:
                pieces.append(news)
            if self._call.complete:
                self._call, self._index = _Call(), self._index + 1
        return "", pieces


@dataclass(slots=True)
class NamedCall:
    """The whole text is the arguments of one function."""

    name: str
    _begun: bool = False

    def fresh(self) -> NamedCall:
        return NamedCall(self.name)

    def feed(self, text: str, final: bool) -> tuple[str, list[CallPiece]]:
        if not text and self._begun:
            return "", []
        name = None if self._begun else self.name
        self._begun = True
        return "", [CallPiece(0, name, text)]
