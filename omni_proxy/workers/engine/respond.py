"""Answers of the OpenAI API as vLLM writes them: whole bodies, stream chunks, log-probabilities, usage. Pure.

A `Format` is the difference between chat and text completions; everything else is shared. Knows nothing of sockets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

import msgspec

from omni_proxy.workers.engine.choice import Choice, Delta
from omni_proxy.workers.engine.text import ModelTokenizer
from omni_proxy.workers.engine.tool_calls import CallPiece
from omni_proxy.workers.engine.types import TokenLogprob

DONE: Final = b"data: [DONE]\n\n"
_LEAST_LOGPROB: Final = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

_encode: Final = msgspec.json.Encoder().encode


def event(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encode(body) + b"\n\n"


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every body and chunk of one answer repeats, and what the client asked to see in it."""

    id: str
    created: int
    model: str
    token_ids: bool = False
    logprobs: int | None = None
    include_usage: bool = False
    running_usage: bool = False
    prompt_logprobs: bool = False


def usage(choices: Sequence[Choice], per_prompt: int) -> dict[str, Any]:
    """Token counts over all choices; `per_prompt` choices share one prompt, which is counted once."""
    firsts = choices[::per_prompt]
    prompt = sum(len(choice.request.prompt_token_ids) for choice in firsts)
    completion = sum(len(choice.token_ids) for choice in choices)
    return _usage(prompt, completion, sum(choice.cached_tokens for choice in firsts))


def running_usage(choice: Choice, delta: Delta) -> dict[str, Any]:
    """Token counts of one choice up to a delta."""
    return _usage(len(choice.request.prompt_token_ids), delta.total_tokens, choice.cached_tokens)


def _usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def prompt_logprobs(tokenizer: ModelTokenizer, choice: Choice) -> list[dict[str, Any] | None]:
    """As vLLM writes them: for each prompt token, itself and its alternatives by id; null for the first."""
    entries: list[dict[str, Any] | None] = [None]
    for token in choice.prompt_logprobs or ():
        ranked = [(i, p, rank) for rank, (i, p) in enumerate(token.top, 1)]
        entries.append(
            {
                str(i): {
                    "logprob": max(p, _LEAST_LOGPROB),
                    "rank": rank,
                    "decoded_token": tokenizer.token_text(i),
                }
                for i, p, rank in [(token.token_id, token.logprob, token.rank), *ranked]
            }
        )
    return entries


def _call(choice: Choice, piece: CallPiece) -> dict[str, Any]:
    """A function call, or more of its arguments."""
    if piece.name is None:
        return {"function": {"arguments": piece.arguments}}
    unique = choice.request.request_id.rpartition("-")[2]
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"id": f"call_{unique}{piece.index}", "type": "function", "function": function}


class Format(ABC):
    """How one endpoint writes its choices."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer

    @abstractmethod
    def opening(self, head: ReplyHead, choice: Choice) -> dict[str, Any] | None:
        """The chunk before the first text of a choice, if the endpoint has one."""

    @abstractmethod
    def _piece(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """The text of a stream chunk."""

    @abstractmethod
    def _message(self, choice: Choice) -> dict[str, Any]:
        """The text of a whole answer."""

    @abstractmethod
    def _logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """Log-probabilities of some tokens; `offset` is the length of the text before them."""

    def whole(
        self,
        head: ReplyHead,
        choices: Sequence[Choice],
        per_prompt: int,
        kv_transfer_params: dict[str, Any] | None,
    ) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        body = self._frame(head, self.whole_object)
        body["choices"] = [self._whole_choice(head, choice) for choice in choices]
        body["usage"] = usage(choices, per_prompt)
        body["kv_transfer_params"] = kv_transfer_params
        return body

    def chunk(self, head: ReplyHead, choice: Choice, delta: Delta) -> dict[str, Any]:
        """One stream chunk with what `delta` adds to `choice`."""
        entry = {"index": delta.index, **self._piece(choice, delta), "logprobs": None}
        if head.logprobs is not None and delta.logprobs:
            entry["logprobs"] = self._logprobs(delta.logprobs, delta.offset)
        entry["finish_reason"] = delta.finish_reason
        if delta.finish_reason is not None:
            entry["stop_reason"] = delta.stop_reason
        if head.token_ids:
            entry["token_ids"] = delta.token_ids
        return {**self._frame(head, self.chunk_object), "choices": [entry]}

    def usage_chunk(self, head: ReplyHead, choices: Sequence[Choice], per_prompt: int) -> dict[str, Any]:
        """The last chunk of a stream that asked for usage."""
        body = self._frame(head, self.chunk_object)
        return {**body, "choices": [], "usage": usage(choices, per_prompt)}

    def _frame(self, head: ReplyHead, kind: str) -> dict[str, Any]:
        return {"id": head.id, "object": kind, "created": head.created, "model": head.model}

    def _whole_choice(self, head: ReplyHead, choice: Choice) -> dict[str, Any]:
        entry = {"index": choice.index, **self._message(choice), "logprobs": None}
        if head.logprobs is not None:
            entry["logprobs"] = self._logprobs(choice.logprobs, 0)
        entry["finish_reason"] = choice.finish_reason
        entry["stop_reason"] = choice.stop_reason
        if head.token_ids:
            entry["token_ids"] = choice.token_ids
        return entry


class ChatFormat(Format):
    """POST /v1/chat/completions."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, head: ReplyHead, choice: Choice) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        entry = {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
        body = {**self._frame(head, self.chunk_object), "choices": [entry]}
        if head.token_ids:
            body["prompt_token_ids"] = choice.request.prompt_token_ids
        if head.prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(self._tokenizer, choice)
        return body

    def whole(
        self,
        head: ReplyHead,
        choices: Sequence[Choice],
        per_prompt: int,
        kv_transfer_params: dict[str, Any] | None,
    ) -> dict[str, Any]:
        body = super().whole(head, choices, per_prompt, kv_transfer_params)
        if head.token_ids:
            body["prompt_token_ids"] = choices[0].request.prompt_token_ids
        if head.prompt_logprobs:
            body["prompt_logprobs"] = prompt_logprobs(self._tokenizer, choices[0])
        return body

    def _piece(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        if not delta.calls:
            return {"delta": {"content": delta.text}}
        content = {"content": delta.text} if delta.text else {}
        calls = [{"index": piece.index, **_call(choice, piece)} for piece in delta.calls]
        return {"delta": {**content, "tool_calls": calls}}

    def _message(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call(choice, call) for call in choice.calls]
        return {"message": message}

    def _logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        return {"content": [self._token(token) for token in tokens]}

    def _token(self, token: TokenLogprob) -> dict[str, Any]:
        top = [self._entry(token_id, logprob) for token_id, logprob in token.top]
        return {**self._entry(token.token_id, token.logprob), "top_logprobs": top}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        text = self._tokenizer.token_text(token_id)
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": list(data)}


class CompletionFormat(Format):
    """POST /v1/completions."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, head: ReplyHead, choice: Choice) -> dict[str, Any] | None:
        """The prompt, where it is to be shown."""
        if choice.echo is None and not head.prompt_logprobs:
            return None
        entry: dict[str, Any] = {"index": choice.index, "text": choice.echo or "", "logprobs": None}
        if head.logprobs is not None and choice.echo is not None:
            entry["logprobs"] = self._prompt_part(choice)
        if head.prompt_logprobs:
            entry["prompt_logprobs"] = prompt_logprobs(self._tokenizer, choice)
        return {**self._frame(head, self.chunk_object), "choices": [{**entry, "finish_reason": None}]}

    def chunk(self, head: ReplyHead, choice: Choice, delta: Delta) -> dict[str, Any]:
        delta = replace(delta, offset=delta.offset + len(choice.echo or ""))
        body = super().chunk(head, choice, delta)
        if head.token_ids and delta.total_tokens == len(delta.token_ids):
            body["choices"][0]["prompt_token_ids"] = choice.request.prompt_token_ids
        return body

    def _whole_choice(self, head: ReplyHead, choice: Choice) -> dict[str, Any]:
        entry = super()._whole_choice(head, choice)
        if head.logprobs is not None and choice.echo is not None:
            said = self._logprobs(choice.logprobs, len(choice.echo))
            entry["logprobs"] = {name: values + said[name] for name, values in self._prompt_part(choice).items()}
        if head.prompt_logprobs:
            entry["prompt_logprobs"] = prompt_logprobs(self._tokenizer, choice)
        if head.token_ids:
            entry["prompt_token_ids"] = choice.request.prompt_token_ids
        return entry

    def _piece(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        return {"text": delta.text}

    def _message(self, choice: Choice) -> dict[str, Any]:
        return {"text": (choice.echo or "") + choice.text}

    def _prompt_part(self, choice: Choice) -> dict[str, list[Any]]:
        """Log-probabilities of the prompt's tokens; the first has none, as nothing comes before it."""
        first = TokenLogprob(choice.request.prompt_token_ids[0], 0.0)
        part = self._logprobs([first, *(choice.prompt_logprobs or ())], 0)
        part["token_logprobs"][0] = part["top_logprobs"][0] = None
        return part

    def _logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, list[Any]]:
        texts = [self._tokenizer.token_text(token.token_id) for token in tokens]
        offsets = list(accumulate(map(len, texts), initial=offset))[:-1]
        return {
            "text_offset": offsets,
            "token_logprobs": [max(token.logprob, _LEAST_LOGPROB) for token in tokens],
            "tokens": texts,
            "top_logprobs": [self._top(token) for token in tokens],
        }

    def _top(self, token: TokenLogprob) -> dict[str, float]:
        pairs = [(token.token_id, token.logprob), *token.top]
        return {self._tokenizer.token_text(i): max(p, _LEAST_LOGPROB) for i, p in pairs}
