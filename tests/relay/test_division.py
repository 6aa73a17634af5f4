"""Several answers or prompts in one request before P and D that cannot share them: made apart, put together again."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.relay.conftest import Rig, Start
from tests.relay.raw import post
from tests.relay.scripted import DONE, Seen, prefill_ok

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SGLANG = {"connector": "sglang"}


def usage_of(prompt: int, made: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 2, "audio_tokens": None},
    }


async def saying(seen: Seen) -> None:
    """D: says what it was asked, so that a test sees which part it was."""
    body = seen.json
    said = f"{body.get('prompt', 'chat')}/{body.get('seed')}"
    if not body.get("stream"):
        choice = {"index": 0, "text": said, "logprobs": None, "finish_reason": "stop"}
        answer = {"id": f"cmpl-{seen.headers['x-request-id']}", "model": "m", "x": 1e400, "choices": [choice]}
        text = json.dumps(answer | {"usage": usage_of(10, 3)}).replace("Infinity", "1e400")
        await seen.answer(200, text.encode())
        return
    await seen.open_stream()
    for text in ("a", said):
        chunk = {"id": seen.headers["x-request-id"], "choices": [{"index": 0, "text": text}]}
        await seen.chunk(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    if (body.get("stream_options") or {}).get("include_usage"):
        await seen.chunk(b"data: " + json.dumps({"choices": [], "usage": usage_of(10, 3)}).encode() + b"\n\n")
    await seen.chunk(DONE)
    await seen.end_stream()


async def ask(rig: Rig, **fields: Any) -> Any:
    return await rig.client.post(COMPLETIONS, json={"model": "m", "prompt": "x"} | fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 3}, ["x/None"] * 3),
        ({"n": 3, "seed": 7, "best_of": 3}, ["x/7", "x/8", "x/9"]),
        ({"prompt": ["a", "b"]}, ["a/None", "b/None"]),
        ({"prompt": [[1, 2], [3]]}, ["[1, 2]/None", "[3]/None"]),
        ({"prompt": ["a", "b"], "n": 2, "seed": 0}, ["a/0", "a/1", "b/0", "b/1"]),
    ],
)
async def test_choices_stand_where_one_worker_would_put_them(
    start: Start, fields: dict[str, Any], said: list[str]
) -> None:
    """Faults R7 and R8: a room for each."""
    rig = await start(SGLANG, p0=prefill_ok, d0=saying)
    answer = await ask(rig, **fields)
    assert answer.status_code == 200
    body = answer.json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == list(enumerate(said))
    prompts = len(fields["prompt"]) if isinstance(fields.get("prompt"), list) else 1
    assert body["usage"]["prompt_tokens"] == 10 * prompts
    assert body["usage"]["completion_tokens"] == 3 * len(said)
    assert body["usage"]["total_tokens"] == 10 * prompts + 3 * len(said)
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * len(said)
    assert b"1e400" in answer.content
    rooms = {s.json["bootstrap_room"] for s in rig["d0"].seen}
    assert len(rooms) == len(said)
    assert rooms == {s.json["bootstrap_room"] for s in rig["p0"].seen}
    assert not any({"n", "best_of"} & s.json.keys() for s in rig["d0"].seen)
    await rig.idle()


@pytest.mark.parametrize("usage", [False, True])
async def test_streams_are_one_stream(start: Start, usage: bool) -> None:
    rig = await start(SGLANG, p0=prefill_ok, d0=saying)
    options = {"stream_options": {"include_usage": True}} if usage else {}
    answer = await ask(rig, prompt=["a", "b"], n=2, stream=True, **options)
    assert answer.headers["content-type"].startswith("text/event-stream")
    payloads = [line[6:] for line in answer.text.split("\n\n") if line]
    assert payloads[-1] == "[DONE]"
    assert payloads.count("[DONE]") == 1
    chunks = [json.loads(payload) for payload in payloads[:-1]]
    said: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            said.setdefault(choice["index"], []).append(choice["text"])
    assert said == {0: ["a", "a/None"], 1: ["a", "a/None"], 2: ["a", "b/None"], 3: ["a", "b/None"]}
    assert len({chunk["id"] for chunk in chunks if "id" in chunk}) == 1
    told = [chunk["usage"] for chunk in chunks if "usage" in chunk]
    assert [(u["prompt_tokens"], u["completion_tokens"]) for u in told] == ([(20, 12)] if usage else [])
    await rig.idle()


async def test_a_mixed_worker_does_it_all_where_there_is_one(start: Start) -> None:
    each = {"m0": {"connector": "aggregated"}}
    rig = await start(SGLANG | {"each": each}, p0=prefill_ok, d0=saying, m0=saying)
    assert (await ask(rig, n=3)).status_code == 200
    assert [s.json["n"] for s in rig["m0"].seen] == [3]
    assert not rig["d0"].seen
    await rig.idle()


async def test_a_mixed_worker_that_is_down_is_not_waited_for(start: Start) -> None:
    each = {"m0": {"connector": "aggregated"}}
    rig = await start(SGLANG | {"each": each}, p0=prefill_ok, d0=saying, m0=saying)
    await rig["m0"].stop()
    async with asyncio.timeout(5):
        while all(w.up for w in rig.gateway.scheduling.workers()):
            await asyncio.sleep(0.01)
    answer = await ask(rig, n=2)
    assert [choice["text"] for choice in answer.json()["choices"]] == ["x/None"] * 2
    assert len(rig["d0"].seen) == 2
    await rig.idle()


async def test_one_that_is_refused_refuses_the_whole(start: Start) -> None:
    count = 0

    async def second_fails(seen: Seen) -> None:
        nonlocal count
        count += 1
        if count == 2:
            await seen.answer(422, b'{"error":{"message":"no"}}')
        else:
            await seen.gone.wait()

    rig = await start(SGLANG, p0=prefill_ok, d0=second_fails)
    answer = await ask(rig, n=4)
    assert (answer.status_code, answer.json()["error"]["message"]) == (422, "no")
    await rig.idle()


async def test_one_that_breaks_off_ends_the_stream_uncleanly(start: Start) -> None:
    count = 0

    async def one_breaks(seen: Seen) -> None:
        nonlocal count
        count += 1
        breaks = count == 1
        await seen.open_stream()
        await seen.chunk(b'data: {"id":"i","choices":[{"index":0,"text":"a"}]}\n\n')
        await asyncio.sleep(0.05)
        if breaks:
            seen.reset()
        else:
            await seen.gone.wait()

    rig = await start(SGLANG, p0=prefill_ok, d0=one_breaks)
    client = await rig.raw()
    await client.send(
        post(json.dumps({"model": "m", "prompt": "x", "n": 3, "stream": True}).encode(), path=COMPLETIONS)
    )
    answer = await client.response()
    assert answer.status == 200
    assert not answer.clean
    assert b'"error"' in answer.body
    await rig.idle()


async def test_a_client_that_leaves_ends_all_parts(start: Start) -> None:
    waiting: list[Seen] = []

    async def never(seen: Seen) -> None:
        if seen.path == "/abort_request":  # how SGLang is told that nobody waits
            await seen.answer(200, b"{}")
            return
        waiting.append(seen)
        await seen.gone.wait()

    rig = await start(SGLANG, p0=prefill_ok, d0=never)
    client = await rig.raw()
    await client.send(post(json.dumps({"model": "m", "prompt": "x", "n": 3}).encode(), path=COMPLETIONS))
    await rig.seen("d0", 3)
    client.reset()
    async with asyncio.timeout(2):
        for seen in waiting:
            await seen.gone.wait()
    await rig.idle()


async def test_answers_that_do_not_fit_together_are_no_answer(start: Start) -> None:
    async def odd(seen: Seen) -> None:
        await seen.answer(200, b'{"choices":7}')

    rig = await start(SGLANG, p0=prefill_ok, d0=odd)
    answer = await ask(rig, n=2)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_garbage")
    await rig.idle()


async def test_unknown_models_and_too_many_answers_are_refused_once(start: Start) -> None:
    rig = await start(SGLANG, p0=prefill_ok, d0=saying)
    for fields, status, param in (({"model": "other", "n": 3}, 404, "model"), ({"n": 129}, 400, "n")):
        answer = await ask(rig, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert rig.untouched()
    await rig.idle()
    assert (await ask(rig)).status_code == 200, "the connection goes on"
