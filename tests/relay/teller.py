"""Workers that tell one story token by token, as a vLLM under greedy decoding would, and die where a test says."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from tests.relay.scripted import DONE, Seen

PROMPT = [1001, 1002, 1003]
"""The token ids of any prompt."""
Event = dict[str, Any]


class Teller:
    """A D. Token n of the story has the id n; its text is `pieces[n]`.

    `held` characters are kept back until the end, as vLLM does with stop strings. It continues whatever of the story
    its prompt ends with. `deaths`: for each stream in turn, after how many tokens of it the connection is reset.
    """

    def __init__(self, pieces: Sequence[str], deaths: Sequence[int | None] = (), held: int = 0) -> None:
        self.pieces = list(pieces)
        self.deaths = list(deaths)
        self.held = held
        self.asked: list[Any] = []
        self.edit: Callable[[Event], Event] = lambda chunk: chunk
        self.last_words: bytes = b""
        """Sent before it dies."""

    @property
    def story(self) -> str:
        return "".join(self.pieces)

    async def __call__(self, seen: Seen) -> None:
        body = seen.json
        self.asked.append(body)
        death = self.deaths.pop(0) if self.deaths else None
        chat = seen.path.endswith("/chat/completions")
        begin = 0 if chat else len(body["prompt"]) - len(PROMPT) if isinstance(body["prompt"], list) else 0
        if begin:
            assert body["prompt"] == PROMPT + list(range(begin))
        end = min(len(self.pieces), begin + (body.get("max_tokens") or 10**6))
        await seen.open_stream()
        if chat:
            opening = self._chunk(True, {"role": "assistant", "content": ""})
            if body.get("return_token_ids"):
                opening["prompt_token_ids"] = PROMPT
            await self._send(seen, opening)
        for at in range(begin, end):
            if death is not None and at - begin == death:
                if self.last_words:
                    await seen.chunk(self.last_words)
                seen.reset()
                return
            await self._send(seen, self._token(body, chat, begin, at, end))
        if (body.get("stream_options") or {}).get("include_usage"):
            made, prompt = end - begin, len(PROMPT) + begin
            usage = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
            usage |= {"prompt_tokens_details": {"cached_tokens": prompt}}
            await self._send(seen, {**self._frame(chat), "choices": [], "usage": usage})
        await seen.chunk(DONE)
        await seen.end_stream()

    async def _send(self, seen: Seen, chunk: Event) -> None:
        await seen.chunk(b"data: " + json.dumps(self.edit(chunk), ensure_ascii=False).encode() + b"\n\n")

    def _frame(self, chat: bool) -> Event:
        kind = "chat.completion.chunk" if chat else "text_completion"
        return {"id": "chatcmpl-d" if chat else "cmpl-d", "object": kind, "created": 7, "model": "m"}

    def _chunk(self, chat: bool, piece: Event, finish: str | None = None, **more: Any) -> Event:
        inside = {"delta": piece} if chat else piece
        choice = {"index": 0, **inside, "logprobs": None, "finish_reason": finish, **more}
        return {**self._frame(chat), "choices": [choice]}

    def _token(self, body: Any, chat: bool, begin: int, at: int, end: int) -> Event:
        last = at == end - 1
        before, after = (self._out(begin, upto, last and upto > at) for upto in (at, at + 1))
        text = after[len(before) :]
        more: Event = {}
        if body.get("return_token_ids"):
            more["token_ids"] = [at]
            if not chat and at == begin:
                more["prompt_token_ids"] = body["prompt"] if isinstance(body["prompt"], list) else PROMPT
        if last:
            more["stop_reason"] = None
        finish = ("stop" if end == len(self.pieces) else "length") if last else None
        return self._chunk(chat, {"content": text} if chat else {"text": text}, finish, **more)

    def _out(self, begin: int, upto: int, whole: bool) -> str:
        """The text that is out after tokens begin..upto-1: whole characters only, without what is held back."""
        text = "".join(self.pieces[begin:upto])
        text = text.rstrip("\ufffd")
        return text if whole else text[: max(0, len(text) - self.held)]


def told(body: bytes) -> str:
    """The text of a stream, chat or completion; every event must be readable, and an error is one."""
    text = ""
    for event in events(body):
        assert "error" not in event, event
        for choice in event["choices"]:
            text += choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
    return text


def events(body: bytes) -> list[Any]:
    """The events of a stream without its `[DONE]`."""
    parts = body.split(b"\n\n")
    assert parts.pop() == b""
    return [json.loads(part.removeprefix(b"data: ")) for part in parts if part != b"data: [DONE]"]
