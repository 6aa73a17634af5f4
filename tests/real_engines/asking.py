"""What a client asks on each endpoint and reads of the answer, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any

import httpx

from tests.real_engines.processes import Server
from tests.real_engines.vllm import MODEL

WORDS = (
    *("fox", "hare", "forest", "river", "stone", "moon", "bread", "lantern", "winter", "story"),
    *("old", "little", "quickly", "sang", "found", "home", "under", "over", "and", "the"),
)
CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)


def words(seed: int, count: int = 300) -> str:
    """A text that no other seed begins alike."""
    random = Random(seed)
    return " ".join(random.choice(WORDS) for _ in range(count)) + "."


def body(path: str, text: str, tokens: int = 24, **fields: object) -> dict[str, Any]:
    """A greedy request."""
    messages = [{"role": "user", "content": text}]
    said: dict[str, dict[str, Any]] = {
        CHAT: {"messages": messages, "max_tokens": tokens},
        COMPLETIONS: {"prompt": text, "max_tokens": tokens},
        RESPONSES: {"input": text, "max_output_tokens": tokens, "store": False},
        MESSAGES: {"messages": messages, "max_tokens": tokens},
    }
    return {"model": MODEL, "temperature": 0, **said[path], **fields}


def text_of(path: str, answer: Any) -> str:
    """The text of an answer that was not streamed."""
    if path == CHAT:
        return str(answer["choices"][0]["message"]["content"])
    if path == COMPLETIONS:
        return str(answer["choices"][0]["text"])
    parts = answer["content"] if path == MESSAGES else [p for o in answer["output"] for p in o.get("content") or ()]
    return "".join(part.get("text") or "" for part in parts)


def events(response: httpx.Response) -> Iterator[Any]:
    """The events of a stream."""
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def piece_of(path: str, event: Any) -> str:
    """The text that one event of a stream adds."""
    if path in (CHAT, COMPLETIONS):
        choices = event.get("choices") or ()
        return "".join((c.get("text") or "") + (c.get("delta", {}).get("content") or "") for c in choices)
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    return str(event.get("delta", {}).get("text") or "") if event.get("type") == "content_block_delta" else ""


def stream(
    server: Server,
    path: str,
    asked: dict[str, Any],
    after: int = 0,
    then: Callable[[], None] | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[str, httpx.Response, list[Any]]:
    """Read a stream to its end: its text, the response, all events. `then` is called after so many pieces of text."""
    text, all_events, pieces = "", [], 0
    whole = {**asked, "stream": True}
    with httpx.stream("POST", server.url + path, json=whole, headers=headers, timeout=300, trust_env=False) as got:
        assert got.status_code == 200, got.read()
        for event in events(got):
            assert "error" not in event or event["error"] is None, event
            all_events.append(event)
            piece = piece_of(path, event)
            text += piece
            pieces += bool(piece)
            if piece and pieces == after and then is not None:
                then()
    return text, got, all_events
