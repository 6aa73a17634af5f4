"""What another pair needs to go on with a stream: the prompt's tokens, the answer's, and how much text is out.

    tokens   |---- prompt ----|---- kept ----|- made again -|
    text                      |==== shown to the client ====|
                                             |- skipped ----|  of what the next worker sends

Tokens whose text is not out whole (an unfinished character, what may become a stop string) are made again, and what
the client has of their text is skipped, after a look that it is the same: text is never doubled, lost or changed. This
knows no sockets and no workers; the scans of the streams feed it, the edge asks it for the call that goes on.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from omni_proxy.api.resumable import continuation, includes_stop, stops_of
from omni_proxy.call import COMPLETIONS, Call
from omni_proxy.workers.connectors.token_reports import TokenReports

MAX_ANCHORS: Final = 256
"""Places that are remembered from which an answer may be continued; before the oldest there is its beginning."""


class Resumption:
    """The state of one stream that can be continued. `reports`: how its engine tells its tokens."""

    __slots__ = (
        "_anchors",
        "_call",
        "_cap",
        "_held",
        "_stops",
        "_text",
        "_total",
        "base_tokens",
        "cached_tokens",
        "call",
        "finished",
        "head",
        "hindrance",
        "ids_shown",
        "prompt",
        "reasoned",
        "resumed",
        "shown_chars",
        "skip",
        "tokens",
        "wants_ids",
    )

    def __init__(self, call: Call, reports: TokenReports) -> None:
        self._call = call
        self._stops = stops_of(call)
        self._held = reports.held(self._stops, includes_stop(call))
        unlimited = call.max_tokens is None and call.path == COMPLETIONS
        self._cap = reports.completion_tokens if unlimited else call.max_tokens
        """Tokens of the whole answer; None: as many as the context holds."""
        self._anchors: deque[tuple[int, int]] = deque(maxlen=MAX_ANCHORS)
        """Events with text: tokens by then, and characters that came by then."""
        self._text: list[str] = []
        self._total = 0
        """Characters of the answer that have come from its workers, counted from its beginning."""
        self.shown_chars = 0
        self.skip = ""
        """Text that the client has and that will come once more."""
        self.prompt: list[int] | None = None
        self.tokens: list[int] = []
        self.ids_shown = 0
        self.wants_ids = bytes(call.fields.get("return_token_ids", b"")) == b"true"
        self.head: tuple[bytes, bytes, bytes] | None = None
        """`id`, `object` and `created` of the client's chunks, as JSON."""
        self.cached_tokens: int | None = None
        self.reasoned = False
        self.finished = False
        """The client has been told why the answer ended."""
        self.hindrance = ""
        """Why the stream cannot be continued."""
        self.base_tokens = 0
        """Tokens of the answer that were in the prompt of the worker that makes it now."""
        self.call: Call | None = None
        self.resumed = False
        """The answer has lost a worker at least once."""

    @property
    def chat(self) -> bool:
        """Does the client read chunks of a chat?"""
        return self._call.path != COMPLETIONS

    @property
    def wants_usage(self) -> bool:
        return self._call.wants_usage

    def hinder(self, why: str) -> None:
        """From here on nobody else can go on with it."""
        self.hindrance = self.hindrance or why

    def add(self, token_ids: list[int], text: str) -> str | None:
        """Take what a worker made; returns what the client has not seen of it, or None where it is not the same."""
        self.tokens += token_ids
        if not text:
            return text
        self._total += len(text)
        if self.skip:
            again = min(len(self.skip), len(text))
            if self.skip[:again] != text[:again]:
                return None
            self.skip = self.skip[again:]
            text = text[again:]
        self._text.append(text)
        self.shown_chars += len(text)
        self._anchors.append((len(self.tokens), self._total))
        return text

    def rewind(self) -> int | None:
        """Go back to the last token from which the answer can be continued; how many that leaves, or None.

        Called again before anything has come, it changes nothing.
        """
        if self.hindrance or self.finished or self.prompt is None:
            return None
        shown = "".join(self._text)
        while self._anchors:
            count, total = self._anchors[-1]
            covered = total + self._held
            if covered <= len(shown) and self._goes_on_after(count) and not self._may_stop(shown[:covered]):
                return self._cut(count, shown, covered)
            self._anchors.pop()
        # From the beginning: what was thought cannot be told from what was said there.
        return None if self.reasoned else self._cut(0, shown, 0)

    def _goes_on_after(self, count: int) -> bool:
        return self._cap is None or count < self._cap

    def _may_stop(self, text: str) -> bool:
        """Might a stop string begin in this text and end in what follows? Nobody would see it then."""
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:length]):
                    return True
        return False

    def _cut(self, count: int, shown: str, covered: int) -> int:
        self.resumed = True
        self.tokens = self.tokens[:count]
        self.base_tokens = count
        self._text = [shown]
        self._total = covered
        self.skip = shown[covered:]
        return count

    def continuation(self) -> Call:
        """The call that goes on from where the answer is; to be asked before a prompt is computed."""
        assert self.prompt is not None
        self.rewind()
        rest = None if self._cap is None else self._cap - len(self.tokens)
        self.call = continuation(self._call, self.prompt + self.tokens, len(self.tokens), rest)
        return self.call
