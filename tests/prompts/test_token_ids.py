"""Tokenised once: workers that take token ids get them, others get what the client sent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from omni_proxy.api.bodies import for_worker
from omni_proxy.call import CHAT, COMPLETIONS, Call, append_fields, parse_call
from omni_proxy.messages import Tokenized
from omni_proxy.tokenizer import PromptTokenizer, TokenCounter
from omni_proxy.workers.connectors.pair import Pair, Peer
from omni_proxy.workers.connectors.registry import CONNECTORS

PAIR = Pair(b"r", 7, Peer("p0", "h", 1))
ALONE = Pair(b"r", 7)


def call(path: str, keep: bool = True) -> Call:
    prompt: dict[str, Any] = (
        {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    )
    parsed = parse_call(path, msgspec.json.encode({"model": "m", **prompt, "unknown": 1e300}))
    parsed.token_ids = b"[5,6]" if keep else b""
    return parsed


@pytest.mark.parametrize(
    ("connector", "path", "field"),
    [
        ("omni", CHAT, "prompt_token_ids"),
        ("omni", COMPLETIONS, "prompt"),
        ("vllm-nixl", COMPLETIONS, "prompt"),
        ("vllm-nixl", CHAT, None),
        ("sglang", CHAT, None),
        ("aggregated", COMPLETIONS, None),
    ],
)
def test_ids_go_where_they_are_taken(connector: str, path: str, field: str | None) -> None:
    sent = for_worker(call(path), CONNECTORS[connector])
    decode = msgspec.json.decode(append_fields(sent, CONNECTORS[connector].decode_fields(sent, ALONE, None)))
    decode.pop("rid", None)  # by which SGLang ends a request
    original = msgspec.json.decode(call(path).body)
    assert decode == (original if field is None else {**original, field: [5, 6]})
    if connector in ("omni", "vllm-nixl"):
        prefill = msgspec.json.decode(CONNECTORS[connector].prefill_body(sent, PAIR, None))
        assert prefill.get(field or "prompt_token_ids") == ([5, 6] if field else None)


def test_without_ids_the_body_stays_byte_for_byte() -> None:
    plain = call(COMPLETIONS, keep=False)
    assert append_fields(for_worker(plain, CONNECTORS["omni"]), []) is plain.body


@pytest.mark.parametrize("keep", [True, False])
async def test_the_counter_keeps_ids_when_asked_to(tokenizer_dir: Path, keep: bool) -> None:
    posted: asyncio.Queue[Tokenized] = asyncio.Queue()
    counter = TokenCounter(PromptTokenizer.load(tokenizer_dir), posted.put_nowait, keep_ids=keep)
    text = parse_call(COMPLETIONS, b'{"model":"m","prompt":"the cat"}')
    counter("r", text)
    answer = await asyncio.wait_for(posted.get(), 10)
    counter.close()
    ids = msgspec.json.decode(text.token_ids) if text.token_ids else None
    assert (ids is not None) == keep
    assert ids is None or len(ids) == answer.prompt_tokens
