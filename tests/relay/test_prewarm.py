"""Speculative prefill on sockets: what P is asked when an answer has ended, and what stops it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from omni_proxy.api.foresight import MAX_ANSWER_BYTES, Kept, covers, next_turn
from omni_proxy.call import CHAT, parse_call
from omni_proxy.config import ConfigError, parse
from tests.prompts.conftest import tokenizer_dir
from tests.relay.conftest import Rig, Start
from tests.relay.scripted import DONE, Seen, decode_answer, event, prefill_answer

__all__ = ["tokenizer_dir"]

ASK = [{"role": "user", "content": "Tell me of the gate."}]
STORY = ["Once upon a time ", "there was a gate ", "that knew what would be asked next."]


async def story(seen: Seen) -> None:
    """D tells it, as a stream or whole."""
    if not seen.json.get("stream"):
        await seen.answer(200, decode_answer("".join(STORY)))
        return
    await seen.open_stream()
    await seen.chunk(event("", role="assistant"))
    for piece in STORY:
        await seen.chunk(event(piece))
    await seen.chunk(event(finish="stop"))
    await seen.chunk(DONE)
    await seen.end_stream()


async def prefill(seen: Seen) -> None:
    await seen.answer(200, prefill_answer(cached=0, prompt=200))


class Slow:
    """A P that never answers what is computed ahead."""

    async def __call__(self, seen: Seen) -> None:
        if seen.headers["x-request-id"].startswith("prewarm-"):
            await seen.gone.wait()
        else:
            await prefill(seen)


def ahead(rig: Rig) -> list[Seen]:
    return [seen for seen in rig["p0"].seen if seen.headers["x-request-id"].startswith("prewarm-")]


async def until(what: Any) -> None:
    async with asyncio.timeout(5):
        while not what():
            await asyncio.sleep(0.005)


def on(folder: Path, **more: object) -> dict[str, Any]:
    return {"prewarm": True, "model": {"path": str(folder)}, **more}


@pytest.mark.parametrize("stream", [True, False])
async def test_p_is_asked_for_prompt_and_answer(start: Start, tokenizer_dir: Path, stream: bool) -> None:
    rig = await start(on(tokenizer_dir), p0=prefill, d0=story)
    await rig.chat(messages=ASK, stream=stream, temperature=0.5, priority=3, seed=7)
    await until(lambda: ahead(rig))
    asked = ahead(rig)[0].json
    assert asked["messages"] == [*ASK, {"role": "assistant", "content": "".join(STORY)}]
    assert asked["add_generation_prompt"] is False
    assert (asked["max_tokens"], asked["stream"], asked["seed"]) == (1, False, 7)
    assert {"kv_transfer_params", "priority", "stream_options"}.isdisjoint(asked)
    counts = rig.gateway.scheduling.core.prewarms()
    assert counts is not None
    await until(lambda: counts.finished == 1)
    metrics = (await rig.client.get("/metrics")).text
    assert 'omni_prewarm_requests_total{result="finished"} 1.0' in metrics
    await rig.idle()
    # The next turn, as a client sends it, is expected to find all of that.
    response = await rig.chat(messages=[*asked["messages"], {"role": "user", "content": "And then?"}], stream=stream)
    assert (await rig.timeline(response))["predicted_tokens"] > 16
    await until(lambda: counts.used_tokens > 0)


async def test_a_real_request_ends_it(start: Start, tokenizer_dir: Path) -> None:
    rig = await start(on(tokenizer_dir, prewarm={"priority": 99}), p0=Slow(), d0=story)
    await rig.chat(messages=ASK, stream=True)
    await until(lambda: ahead(rig))
    assert ahead(rig)[0].json["priority"] == 99
    response = await rig.chat(messages=[{"role": "user", "content": "Something else."}], stream=True)
    assert response.status_code == 200
    async with asyncio.timeout(5):
        await ahead(rig)[0].gone.wait()
    counts = rig.gateway.scheduling.core.prewarms()
    assert counts is not None
    assert counts.cancelled == 1


@pytest.mark.parametrize("status", [400, 503])
async def test_a_p_that_refuses_it_is_not_blamed(start: Start, tokenizer_dir: Path, status: int) -> None:
    async def refusing(seen: Seen) -> None:
        if seen.headers["x-request-id"].startswith("prewarm-"):
            await seen.answer(status, b'{"error":{"message":"no"}}')
        else:
            await prefill(seen)

    rig = await start(on(tokenizer_dir), p0=refusing, d0=story)
    await rig.chat(messages=ASK)
    counts = rig.gateway.scheduling.core.prewarms()
    assert counts is not None
    await until(lambda: counts.failed == 1)
    assert (await rig.chat(messages=ASK)).status_code == 200
    assert all(w.usable(rig.gateway.scheduling.now()) for w in rig.gateway.scheduling.workers())


async def test_nothing_is_kept_or_sent_without_it(start: Start, tokenizer_dir: Path) -> None:
    rig = await start({"model": {"path": str(tokenizer_dir)}}, p0=prefill, d0=story)
    await rig.chat(messages=ASK, stream=True)
    await asyncio.sleep(0.05)
    assert not ahead(rig)
    assert "omni_prewarm" not in (await rig.client.get("/metrics")).text


async def test_an_answer_that_is_not_text_alone_is_not_foreseen(start: Start, tokenizer_dir: Path) -> None:
    async def calls(seen: Seen) -> None:
        tool = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        message = {"role": "assistant", "content": None, "tool_calls": [tool]}
        answer = {"id": "x", "object": "chat.completion", "choices": [{"index": 0, "message": message}]}
        await seen.answer(200, json.dumps(answer).encode())

    rig = await start(on(tokenizer_dir), p0=prefill, d0=calls)
    await rig.chat(messages=ASK)
    await asyncio.sleep(0.05)
    assert not ahead(rig)


def call_of(**fields: object) -> Any:
    return parse_call(CHAT, json.dumps({"model": "m", "messages": ASK, **fields}).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"continue_final_message": True, "add_generation_prompt": False},
        {"add_generation_prompt": False},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]},
    ],
)
def test_calls_whose_next_turn_is_not_known(fields: dict[str, object]) -> None:
    assert covers(call_of())
    assert not covers(call_of(**fields))


def test_the_answer_stands_behind_the_messages_as_json() -> None:
    turn = next_turn(call_of(stream=True, priority=1), 'He said "no"\n\u2028')
    assert json.loads(turn.body)["messages"] == [*ASK, {"role": "assistant", "content": 'He said "no"\n\u2028'}]
    assert not turn.stream


@pytest.mark.parametrize(
    "parts",
    [
        [],
        [b"data: {not json}\n\n"],
        [b"x" * (MAX_ANSWER_BYTES + 1)],
        [event("a"), b"x" * MAX_ANSWER_BYTES, event("b")],
        [b'data: {"choices":[{"index":1,"delta":{"content":"b"}}]}\n\n'],
        [DONE],
    ],
)
def test_what_cannot_be_read_is_no_answer(parts: list[bytes]) -> None:
    kept = Kept()
    for part in parts:
        kept.add(part)
    assert kept.text(stream=True) is None


def test_the_text_is_read_however_it_was_cut() -> None:
    whole = b"".join(map(event, STORY)) + DONE
    for size in (1, 7, 1000):
        kept = Kept()
        for at in range(0, len(whole), size):
            kept.add(whole[at : at + size])
        assert kept.text(stream=True) == "".join(STORY)


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"kv_cache_policy": "independent"}, "'prewarm' needs kv_cache_policy: apc"),
        ({"prewarm": {"share": 0}}, "prewarm.Prewarm.share"),
        ({"prewarm": {"speed": 1}}, "speed"),
    ],
)
def test_bad_settings_are_named(fields: dict[str, object], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        parse({"prewarm": True, **fields}, "test")
