"""Which tokens a structure allows next, by the kept library `llguidance`: a mask for the sampler, exact to the prefix.

One `Guide` follows one answer. Grammars are compiled off the event loop; a bad one is a 400 that says what is wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_proxy.workers.engine.api_error import ApiError
from omni_proxy.workers.engine.structure import Structure

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_JSON: Final = {"whitespace_pattern": r"(\n[ ]{0,32}|[ ]{0,1})"}
"""White space between the parts of JSON is bounded: a small model could go on with it for ever."""


class Guide:
    """The state of one answer; used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends

    def allowed(self) -> NDArray[np.bool_]:
        """[vocab] of the tokens that may come next; the end tokens alone once nothing can follow."""
        if self._matcher.is_stopped():  # also when it has failed, which must not outlast the answer
            return self._only_ends
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        return mask if mask.any() else self._only_ends

    def accept(self, token: int) -> None:
        """The answer goes on with this token."""
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)

    def copy(self) -> Guide:
        """The same state for another answer."""
        return Guide(self._matcher.deep_copy(), self._vocab_size, self._ends)

    @cached_property
    def _only_ends(self) -> NDArray[np.bool_]:
        mask = np.zeros(self._vocab_size, np.bool_)
        mask[sorted(self._ends)] = True
        return mask


class GuideCompiler:
    """Compiles structures for one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, ends: Iterable[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._ends = frozenset(ends)

    def compile(self, structure: Structure) -> Guide:
        """Raises ApiError: 400 for a structure that makes no sense, 501 where the library is not installed."""
        try:
            from llguidance import LLMatcher
        except ImportError as exc:
            raise ApiError(501, f"{structure.field}: this worker lacks llguidance", structure.field) from exc
        if not self._ends:
            raise ApiError(400, f"{structure.field}: this model has no end token", structure.field)
        matcher = LLMatcher(self._tokens, _grammar(LLMatcher, structure), log_level=0)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:300]
            raise ApiError(400, f"{structure.field}: {reason}", structure.field)
        return Guide(matcher, self._vocab_size, self._ends)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        return LLTokenizer(self._tokenizer_json(), n_vocab=self._vocab_size, eos_token=sorted(self._ends))


def _grammar(matcher: Any, structure: Structure) -> str:
    match structure.kind:
        case "json":
            grammar = matcher.grammar_from_json_schema(structure.text, defaults=_JSON)
        case "regex":
            grammar = matcher.grammar_from_regex(structure.text)
        case "choice":
            grammar = matcher.grammar_from_regex("|".join(map(re.escape, json.loads(structure.text))))
        case "grammar":
            grammar = matcher.grammar_from_lark(structure.text)
    return str(grammar)
