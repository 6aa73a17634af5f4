"""`/tokenize` and `/detokenize` answered by the gateway, in vLLM's words, where no worker can be asked. Blocking."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

import msgspec
from msgspec import Raw

from omni_proxy.call import CHAT, COMPLETIONS, Call
from omni_proxy.errors import ErrorCode, Rejected
from omni_proxy.prompts.chat_messages import BadMessage
from omni_proxy.prompts.chat_template import ChatTemplateError
from omni_proxy.tokenizer import PromptTokenizer, TokenCounters

logger = logging.getLogger(__name__)

DETOKENIZE: Final = "/detokenize"


class _Tokenized(msgspec.Struct):
    count: int
    tokens: list[int]
    token_strs: list[str] | None
    max_model_len: int | None = None


class _Text(msgspec.Struct):
    prompt: str


Done = Callable[[bytes | Rejected], None]


class LocalAnswers:
    """Answers in the tokenizers' threads and tells them in the event loop in which it was made."""

    def __init__(self, counters: TokenCounters) -> None:
        self._counters = counters
        self._loop = asyncio.get_running_loop()

    def __call__(self, call: Call, done: Done) -> bool:
        """Begin to answer; False where the model has no tokenizer here."""
        return self._counters.work(call.model, partial(self._answer, call, done))

    def _answer(self, call: Call, done: Done, tokenizer: PromptTokenizer) -> None:
        try:
            result: bytes | Rejected = answer(tokenizer, call)
        except Rejected as exc:
            result = exc
        except Exception:  # a foreign tokenizer may raise anything
            logger.exception("the tokenizer failed")
            result = Rejected(ErrorCode.INTERNAL, "The tokenizer failed on this request.")
        self._loop.call_soon_threadsafe(done, result)


def answer(tokenizer: PromptTokenizer, call: Call) -> bytes:
    """The answer's body. Raises Rejected."""
    if call.path == DETOKENIZE:
        return msgspec.json.encode(_Text(tokenizer.text_of(_ids(call))))
    path = CHAT if "messages" in call.fields else COMPLETIONS
    if path == COMPLETIONS and "prompt" not in call.fields:
        raise Rejected(ErrorCode.INVALID_VALUE, "'prompt' or 'messages' is required.", "prompt")
    prompt = call.copy()
    prompt.path = path
    try:
        read = tokenizer.read(prompt)
    except (BadMessage, ChatTemplateError, ValueError, TypeError, AttributeError, OverflowError, KeyError) as exc:
        raise Rejected(ErrorCode.INVALID_VALUE, f"The prompt cannot be tokenised: {exc}.", None) from exc
    if read is None or read.ids is None:
        raise Rejected(ErrorCode.INVALID_VALUE, "The prompt cannot be tokenised here.", None)
    ids = read.ids.tolist()
    shown = bytes(call.fields.get("return_token_strs", Raw(b"null"))) == b"true"
    strings = [tokenizer.text_of([token]) for token in ids] if shown else None
    return msgspec.json.encode(_Tokenized(len(ids), ids, strings))


def _ids(call: Call) -> list[int]:
    try:
        ids: list[int] = msgspec.json.decode(call.fields["tokens"], type=list[int])
    except KeyError as exc:
        raise Rejected(ErrorCode.INVALID_VALUE, "'tokens' is required.", "tokens") from exc
    except msgspec.MsgspecError as exc:
        raise Rejected(ErrorCode.INVALID_VALUE, f"'tokens' is not valid: {exc}.", "tokens") from exc
    if any(not 0 <= token < 2**32 for token in ids):
        raise Rejected(ErrorCode.INVALID_VALUE, "'tokens' has a number that is no token id.", "tokens")
    return ids
