"""Real prompts for the requests of a workload: the same block key is the same text, in every run and process. Pure.

In the form `words` a token is a word `w17`, which pretending workers and a word-level tokenizer count alike; in the
form `ids` a prompt is a list of token ids below the vocabulary's size, which every engine counts alike.
"""

from __future__ import annotations

import random
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

from omni_proxy.sim.workload import SimRequest

WORDS: Final = 4096
"""How many different words there are."""
_LEAST_ID: Final = 10
"""Ids below are often special tokens."""


class PromptForm(StrEnum):
    """How prompts are written."""

    WORDS = "words"
    IDS = "ids"


class Prompts:
    """Writes prompts. `vocabulary`: one above the largest token id."""

    def __init__(self, form: PromptForm, block_tokens: int, vocabulary: int = WORDS) -> None:
        self._form = form
        self._block_tokens = block_tokens
        self._vocabulary = vocabulary
        self._block = lru_cache(maxsize=200_000)(self._make_block)

    def body(self, request: SimRequest, number: int, chat: bool) -> dict[str, Any]:
        """The field of a body that holds the prompt of the `number`-th request."""
        if self._form is PromptForm.IDS:
            return {"prompt": self._ids(request, number)}
        text = self._text(request, number)
        return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}

    def _text(self, request: SimRequest, number: int) -> str:
        tokens, size = request.prompt_tokens, self._block_tokens
        keys = self._keys(request, number)
        whole = tokens // size
        parts = [self._block(key) for key in keys[:whole]]
        if tokens % size:
            parts.append(" ".join(self._block(keys[whole]).split(" ")[: tokens % size]))
        return " ".join(parts)

    def _ids(self, request: SimRequest, number: int) -> list[int]:
        ids: list[int] = []
        for key in self._keys(request, number):
            ids += [int(word[1:]) for word in self._block(key).split(" ")]
        return ids[: request.prompt_tokens]

    def _keys(self, request: SimRequest, number: int) -> tuple[int | str, ...]:
        """The request's own keys, or names for blocks that nobody shares."""
        if request.block_keys:
            return request.block_keys
        return tuple(f"{number}/{block}" for block in range(-(-request.prompt_tokens // self._block_tokens)))

    def _make_block(self, key: int | str) -> str:
        chance = random.Random(f"block {key}")
        least = _LEAST_ID if self._form is PromptForm.IDS else 0
        return " ".join(f"w{chance.randrange(least, self._vocabulary)}" for _ in range(self._block_tokens))
