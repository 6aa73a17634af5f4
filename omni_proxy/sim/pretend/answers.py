"""Answers in the shape of vLLM's, as bytes: whole objects, and the chunks of a stream made once per request. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from omni_proxy.sim.http.server import chunked

TOKEN_TEXT: Final = " w1"
"""What every token of an answer reads like."""
DONE: Final = chunked(b"data: [DONE]\n\n")


class Answer:
    """One answer: who asked, in which form, and how many tokens there were."""

    __slots__ = (
        "cached_tokens",
        "chat",
        "created",
        "id",
        "kv_params",
        "model",
        "prompt_tokens",
        "stream",
        "token",
        "usage",
    )

    def __init__(
        self, rid: str, chat: bool, model: str, created: int, prompt_tokens: int, stream: bool, usage: bool
    ) -> None:
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{rid}"
        self.chat = chat
        self.model = model
        self.created = created
        self.prompt_tokens = prompt_tokens
        self.cached_tokens = 0
        self.kv_params: dict[str, Any] | None = None
        self.stream = stream
        self.usage = usage
        """The stream ends with a chunk of usage."""
        self.token = self._chunk(self._choice(TOKEN_TEXT, None)) if stream else b""
        """The chunk of any token but the last."""

    def first_chunk(self) -> bytes:
        """What a stream begins with: in chat the role."""
        if not self.chat:
            return b""
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": 0, "delta": delta, "logprobs": None, "finish_reason": None})

    def last_chunks(self, tokens: int) -> bytes:
        """The last token with its reason, usage where it was asked for, and the end mark."""
        last = self._chunk(self._choice(TOKEN_TEXT, "length"))
        if self.usage:
            last += self._event({**self._head(streamed=True), "choices": [], "usage": self._counts(tokens)})
        return last + DONE

    def whole(self, tokens: int) -> bytes:
        """An answer that is not streamed."""
        text = TOKEN_TEXT * tokens
        shown: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        choice = {"index": 0, **shown, "logprobs": None, "finish_reason": "length", "stop_reason": None}
        body = {**self._head(streamed=False), "choices": [choice], "usage": self._counts(tokens)}
        return msgspec.json.encode({**body, "kv_transfer_params": self.kv_params})

    def _head(self, streamed: bool) -> dict[str, Any]:
        kind = "text_completion" if not self.chat else "chat.completion.chunk" if streamed else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _choice(self, text: str, reason: str | None) -> dict[str, Any]:
        shown: dict[str, Any] = {"delta": {"content": text}} if self.chat else {"text": text}
        return {"index": 0, **shown, "logprobs": None, "finish_reason": reason}

    def _counts(self, tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + tokens,
            "completion_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        return self._event({**self._head(streamed=True), "choices": [choice], "usage": None})

    def _event(self, body: dict[str, Any]) -> bytes:
        return chunked(b"data: %b\n\n" % msgspec.json.encode(body))
