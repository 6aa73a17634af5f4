"""How an engine tells the token ids of a stream, as far as continuing the stream elsewhere depends on it.

Only engines that report token ids (`return_token_ids`) and take a prompt as token ids are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct


class TokenReports(Struct, frozen=True):
    """After an event with text, the text of the tokens reported so far is longer than what was sent by `held`."""

    holds_back: bool
    """With stop strings the engine always keeps one character less than the longest of them to itself."""
    completion_tokens: int | None
    """What it generates at most for `/v1/completions` without a limit; None: as much as the context holds."""

    def held(self, stops: Sequence[str], included: bool) -> int:
        """Characters held back at each event with text. `included`: the client wants to see the stop string."""
        return max(map(len, stops)) - 1 if stops and self.holds_back and not included else 0


VLLM: Final = TokenReports(holds_back=True, completion_tokens=16)
"""Seen in vLLM's output processor: text is cut at whole characters; `stop_buffer_length`."""
OMNI: Final = TokenReports(holds_back=False, completion_tokens=None)
"""The embedded engine keeps text and tokens in step."""
