"""Streams whose decode worker dies go on with another pair: the same text, the same chunks, one usage."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.relay.conftest import Rig, Start
from tests.relay.raw import Response, chat, post
from tests.relay.scripted import DONE, Seen, decode_answer, prefill_answer, prefill_ok
from tests.relay.teller import PROMPT, Teller, events, told

ON = {"resume": True}
STORY = ["Once", " upon", " a", " time", ",", " there", " was", " a", " gate", "way", "."]


async def prefill(seen: Seen) -> None:
    """P that counts what it was asked."""
    prompt = seen.json.get("prompt", PROMPT)
    await seen.answer(200, prefill_answer(cached=2, prompt=len(prompt) if isinstance(prompt, list) else 3))


async def ask(rig: Rig, *, text: bool = False, **fields: Any) -> Response:
    client = await rig.raw()
    if text:
        body = {"model": "m", "prompt": "hi", "stream": True, **fields}
        await client.send(post(json.dumps(body).encode(), path="/v1/completions"))
    else:
        await client.send(post(chat(stream=True, **fields)))
    return await client.response()


def same(teller: Teller) -> dict[str, Any]:
    """Two pairs; the same teller on both D."""
    return {"p0": prefill, "p1": prefill, "d0": teller, "d1": teller}


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("deaths", [[3], [1], [10], [3, 2], [9, 1]])
async def test_the_client_reads_one_stream(start: Start, text: bool, deaths: list[int]) -> None:
    whole = await ask(await start(p0=prefill, d0=Teller(STORY)), text=text, max_tokens=50)
    teller = Teller(STORY, deaths)
    rig = await start(ON, **same(teller))
    answer = await ask(rig, text=text, max_tokens=50)
    assert answer.clean
    assert told(answer.body) == "".join(STORY)
    assert answer.body.endswith(DONE)
    assert [_without_reason(e) for e in events(answer.body)] == [_without_reason(e) for e in events(whole.body)]
    continued = teller.asked[-1]
    assert continued["max_tokens"] == 50 - (len(continued["prompt"]) - len(PROMPT))
    assert [seen.path for seen in rig["p0"].seen + rig["p1"].seen].count("/v1/completions") >= len(deaths)
    timeline = (await rig.client.get(f"/omni/requests/{answer.header('x-request-id')}")).json()
    assert timeline["outcome"] == "completed"
    assert [r["tokens"] for r in timeline["resumes"]] == [sum(deaths[: n + 1]) for n in range(len(deaths))]
    assert (timeline["prompt_tokens"], timeline["generated_tokens"]) == (3, len(STORY))
    await rig.idle()


def _without_reason(event: Any) -> Any:
    for choice in event["choices"]:
        choice.pop("stop_reason", None)
    return event


async def test_usage_is_that_of_one_answer(start: Start) -> None:
    rig = await start(ON, **same(Teller(STORY, [4])))
    answer = await ask(rig, stream_options={"include_usage": True})
    usage = [event["usage"] for event in events(answer.body) if event.get("usage")]
    assert usage == [
        {
            "prompt_tokens": 3,
            "completion_tokens": len(STORY),
            "total_tokens": 3 + len(STORY),
            "prompt_tokens_details": {"cached_tokens": 2},
        }
    ]
    metrics = (await rig.client.get("/metrics")).text
    assert 'omni_resumes_total{result="continued"} 1.0' in metrics
    assert f'omni_tokens_total{{kind="generated"}} {len(STORY)}.0' in metrics


async def test_token_ids_are_told_to_who_asks_for_them_and_to_nobody_else(start: Start) -> None:
    rig = await start(ON, **same(Teller(STORY, [4, None, 4])))
    answer = await ask(rig)
    assert b"token_ids" not in answer.body
    answer = await ask(rig, return_token_ids=True)
    ids = [i for e in events(answer.body) for c in e["choices"] for i in c.get("token_ids") or []]
    assert ids == list(range(len(STORY)))
    assert events(answer.body)[0]["prompt_token_ids"] == PROMPT


@pytest.mark.parametrize("rule", [False, ["other"], ["m"]])
async def test_only_for_the_models_that_are_named(start: Start, rule: bool | list[str]) -> None:
    rig = await start({"resume": rule}, **same(Teller(STORY, [4])))
    answer = await ask(rig)
    assert answer.clean == (rule == ["m"])
    if not answer.clean:
        assert events(answer.body)[-1]["error"]["code"] == "worker_closed"
        assert "return_token_ids" not in rig["d0"].seen[0].json


HAN = ["Gr", "üß", "e ", "\ufffd", "\ufffd", "\ufffd", " and", " more"]
"""A character of three tokens: nothing of it is out before its last."""


def whole_han() -> Teller:
    """... whose bytes become text with the third token."""
    teller = Teller(HAN)

    def out(begin: int, upto: int, whole: bool) -> str:
        pieces = ["Gr", "üß", "e ", "", "", "漢", " and", " more"]
        if 3 < begin < 6:
            pieces = [*pieces[:5], "\ufffd", *pieces[6:]]
        return "".join(pieces[begin:upto])

    teller._out = out  # type: ignore[method-assign]
    return teller


@pytest.mark.parametrize("death", [3, 4, 5, 6])
async def test_death_within_a_character(start: Start, death: int) -> None:
    teller = whole_han()
    teller.deaths = [death]
    rig = await start(ON, **same(teller))
    answer = await ask(rig)
    assert (told(answer.body), answer.clean) == ("Grüße 漢 and more", True)
    assert len(teller.asked[1]["prompt"]) == len(PROMPT) + (3 if death < 6 else 6)


@pytest.mark.parametrize("death", range(1, 11))
async def test_stop_strings_across_the_border(start: Start, death: int) -> None:
    """What vLLM holds back for them is made again; what the client has of that is not told twice."""
    teller = Teller(STORY, [death], held=6)
    rig = await start(ON, **same(teller))
    answer = await ask(rig, stop=["the end", "a gate"])
    assert (told(answer.body), answer.clean) == ("".join(STORY), True)
    if len(teller.asked) > 1:
        prompt = teller.asked[1].get("prompt", [])
        assert teller.asked[1]["stop"] == ["the end", "a gate"]
        kept = "".join(STORY[: max(0, len(prompt) - len(PROMPT))])
        assert not any(kept.endswith(s[:n]) for s in ("the end", "a gate") for n in range(1, len(s)))


async def test_another_continuation_is_not_stitched_on(start: Start) -> None:
    """Sampling, or an engine that does not give the same again: text is never mixed."""
    first, second = Teller(STORY, [9], held=6), Teller([*STORY[:2], *("#" * len(piece) for piece in STORY[2:])], held=6)
    second.asked = first.asked
    begun: list[Teller] = []

    async def whoever(seen: Seen) -> None:
        begun.append(second if begun else first)
        await begun[-1](seen)

    rig = await start(ON, p0=prefill, d0=whoever, d1=whoever)
    answer = await ask(rig, stop=["the end"])
    assert not answer.clean
    *shown, error = answer.body.split(b"\n\n")[:-1]
    assert "".join(STORY).startswith(told(b"\n\n".join([*shown, b""])))
    assert json.loads(error[6:])["error"]["code"] == "worker_garbage"
    assert len(begun) == 2
    await rig.idle()


async def test_the_limit_is_reached_where_it_would_have_been(start: Start) -> None:
    rig = await start(ON, **same(Teller(STORY, [5])))
    answer = await ask(rig, max_tokens=8)
    assert told(answer.body) == "".join(STORY[:8])
    assert events(answer.body)[-1]["choices"][0]["finish_reason"] == "length"
    teller = Teller(STORY, [5])
    rig = await start(ON, **same(teller))
    await ask(rig, text=True)
    assert teller.asked[1]["max_tokens"] == 16 - 5, "vLLM's own limit for completions"
    teller = Teller(STORY, [5])
    rig = await start(ON, **same(teller))
    await ask(rig, min_tokens=7, temperature=0, seed=3, chat_template_kwargs={"x": 1}, user="u")
    asked = teller.asked[1]
    assert (asked["max_tokens"], asked["min_tokens"], asked["temperature"], asked["seed"]) == (None, 2, 0, 3)
    assert asked.keys().isdisjoint({"messages", "chat_template_kwargs"})
    assert (asked["user"], asked["kv_transfer_params"]["do_remote_prefill"]) == ("u", True)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"response_format": {"type": "json_object"}},
        {"frequency_penalty": 0.5},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    ],
)
async def test_what_cannot_be_exact_ends_with_an_error_as_ever(start: Start, fields: dict[str, Any]) -> None:
    rig = await start(ON, **same(Teller(STORY, [5])))
    answer = await ask(rig, **fields)
    assert not answer.clean
    assert events(answer.body)[-1]["error"]["code"] == "worker_closed"
    assert len(rig["d0"].seen) + len(rig["d1"].seen) == 1
    await rig.idle()


@pytest.mark.parametrize(
    "delta",
    [
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"reasoning_content": "hm"},
    ],
)
async def test_death_within_a_tool_call_or_a_thought(start: Start, delta: dict[str, Any]) -> None:
    teller = Teller(STORY, [2])

    def edit(chunk: Any) -> Any:
        for choice in chunk["choices"]:
            if "role" not in choice["delta"]:
                choice["delta"] = delta
        return chunk

    teller.edit = edit
    rig = await start(ON, **same(teller))
    answer = await ask(rig)
    assert not answer.clean
    assert len(teller.asked) == 1


async def test_after_the_thought_it_goes_on(start: Start) -> None:
    teller = Teller(STORY, [5])

    def edit(chunk: Any) -> Any:
        choice = chunk["choices"][0] if chunk["choices"] else {}
        if choice.get("token_ids") in ([0], [1], [2]) and "delta" in choice:
            choice["delta"] = {"reasoning_content": choice["delta"]["content"]}
        return chunk

    teller.edit = edit
    rig = await start(ON, **same(teller))
    answer = await ask(rig)
    assert (told(answer.body), answer.clean) == ("".join(STORY[3:]), True)


async def test_who_does_not_tell_its_tokens_cannot_be_followed(start: Start) -> None:
    teller = Teller(STORY, [5])

    def edit(chunk: Any) -> Any:
        for choice in chunk["choices"]:
            choice.pop("token_ids", None)
        return chunk

    teller.edit = edit
    rig = await start(ON, **same(teller))
    answer = await ask(rig)
    assert not answer.clean
    assert len(teller.asked) == 1


ENGINE_DEAD = b'data: {"error":{"message":"EngineCore died","type":"x","param":null,"code":500}}\n\n'


async def test_an_engine_that_reports_its_own_death(start: Start) -> None:
    teller = Teller(STORY, [5])
    teller.last_words = ENGINE_DEAD + DONE
    rig = await start(ON, **same(teller))
    answer = await ask(rig)
    assert (told(answer.body), answer.clean) == ("".join(STORY), True)


async def test_a_worker_that_falls_silent(start: Start) -> None:
    teller = Teller(STORY)

    async def first_hangs(seen: Seen) -> None:
        if len(teller.asked) == 0:
            teller.asked.append(seen.json)
            await seen.open_stream()
            opening = teller._chunk(True, {"role": "assistant", "content": ""})
            await teller._send(seen, {**opening, "prompt_token_ids": PROMPT})
            for at in range(3):
                await teller._send(seen, teller._token(seen.json, True, 0, at, 99))
            await seen.gone.wait()
        else:
            await teller(seen)

    limits = {"timeouts": {"inter_chunk_s": 0.2}}
    rig = await start({**ON, **limits}, p0=prefill, p1=prefill, d0=first_hangs, d1=first_hangs)
    answer = await ask(rig)
    assert (told(answer.body), answer.clean) == ("".join(STORY), True)


async def test_bounded_and_then_told(start: Start) -> None:
    rig = await start({**ON, "retries": {"max": 2}}, **same(Teller(STORY, [2, 2, 2, 2])))
    answer = await ask(rig)
    assert not answer.clean
    assert told(answer.body[: answer.body.rindex(b"data: ")]) == "".join(STORY[:6])
    assert events(answer.body)[-1]["error"]["code"] == "worker_closed"
    await rig.idle()


async def test_no_pair_is_left(start: Start) -> None:
    async def prefill_while_it_goes(seen: Seen) -> None:
        if len(rig["p0"].seen) > 1:
            rig["d0"].healthy = False
            async with asyncio.timeout(5):
                while any(w.up for w in rig.gateway.scheduling.workers() if w.name == "d0"):
                    await asyncio.sleep(0.005)
        await prefill(seen)

    limits = {"limits": {"no_worker_timeout_s": 0.3, "queue_timeout_s": 0.3}}
    rig = await start({**ON, **limits}, p0=prefill_while_it_goes, d0=Teller(STORY, [3]))
    answer = await ask(rig)
    assert (answer.status, answer.clean) == (200, False)
    assert events(answer.body)[-1]["error"]["code"] == "no_worker"
    await rig.idle()


async def test_the_client_leaves_before_it_goes_on(start: Start) -> None:
    hold = asyncio.Event()
    count = 0

    async def slow_prefill(seen: Seen) -> None:
        nonlocal count
        count += 1
        if count > 1:
            hold.set()
            await seen.gone.wait()
        else:
            await prefill(seen)

    rig = await start(ON, p0=slow_prefill, d0=Teller(STORY, [3]), d1=Teller(STORY, [3]))
    client = await rig.raw()
    await client.send(post(chat(stream=True)))
    async with asyncio.timeout(5):
        await hold.wait()
    client.writer.transport.abort()
    async with asyncio.timeout(2):
        await rig["p0"].seen[1].gone.wait()
    await rig.idle()


async def test_one_worker_for_both_legs(start: Start) -> None:
    teller = Teller(STORY, [3])
    rig = await start(ON, m0=teller, m1=teller)
    answer = await ask(rig)
    assert (told(answer.body), answer.clean) == ("".join(STORY), True)
    await rig.idle()


async def test_the_second_pair_fails_before_it_says_anything(start: Start) -> None:
    count = 0

    async def prefill_fails_once(seen: Seen) -> None:
        nonlocal count
        count += 1
        if count == 2:
            await seen.answer(503, b'{"error":{"message":"busy"}}')
        else:
            await prefill(seen)

    rig = await start(ON, p0=prefill_fails_once, d0=(teller := Teller(STORY, [3])), d1=teller)
    answer = await ask(rig)
    assert (told(answer.body), answer.clean) == ("".join(STORY), True)
    count = 1
    rig = await start(ON, p0=_refuses_the_second(), d0=(teller := Teller(STORY, [3])), d1=teller)
    answer = await ask(rig)
    assert not answer.clean
    assert events(answer.body)[-1]["error"]["code"] == "worker_error", "no status can be told any more"


def _refuses_the_second() -> Any:
    count = 0

    async def script(seen: Seen) -> None:
        nonlocal count
        count += 1
        if count == 2:
            await seen.answer(400, b'{"error":{"message":"no"}}')
        else:
            await prefill_ok(seen)

    return script


# ---------------------------------------------------------------- a worker that gives an answer up (fault S11)


def gives_up_after(tokens: int) -> Teller:
    """vLLM-Ascend, short of memory: a last chunk with a stop reason of its own, then a stream that ends in order."""
    teller = Teller(STORY, [tokens])
    last = teller._chunk(True, {"content": " lost"}, "stop", stop_reason="recomputed", token_ids=[tokens])
    teller.last_words = b"data: " + json.dumps(last).encode() + b"\n\n" + DONE
    return teller


@pytest.mark.parametrize("after", [0, 4])
async def test_an_answer_that_is_given_up_goes_on_from_its_tokens(start: Start, after: int) -> None:
    teller = gives_up_after(after)
    rig = await start(ON, **same(teller))
    answer = await ask(rig, max_tokens=50, stream_options={"include_usage": True})
    assert (told(answer.body), answer.clean) == ("".join(STORY), True)
    assert [c["delta"]["role"] for e in events(answer.body) for c in e["choices"] if "role" in c["delta"]] == [
        "assistant"
    ]
    assert {e["id"] for e in events(answer.body)} == {"chatcmpl-d"}
    assert events(answer.body)[-1]["usage"]["completion_tokens"] == len(STORY)
    if after:
        assert teller.asked[1]["prompt"] == [*PROMPT, *range(after)]
        assert teller.asked[1]["max_tokens"] == 50 - after
    assert not any(w.reason for w in rig.gateway.scheduling.workers()), "it is short of memory, not broken"
    await rig.idle()


async def test_without_resume_it_never_ends_cleanly(start: Start) -> None:
    rig = await start(**same(gives_up_after(4)))
    answer = await ask(rig)
    assert (answer.status, answer.clean) == (200, False)
    assert events(answer.body)[-1]["error"]["code"] == "worker_error"
    assert b"lost" not in answer.body
    rig = await start(**same(gives_up_after(0)))
    answer = await ask(rig)
    assert (told(answer.body), answer.clean) == ("".join(STORY), True), "nobody had seen anything of it"


async def test_an_object_that_is_given_up_is_made_again(start: Start) -> None:
    count = 0

    async def decode(seen: Seen) -> None:
        nonlocal count
        count += 1
        body = json.loads(decode_answer("half" if count == 1 else "whole"))
        body["choices"][0]["stop_reason"] = "recomputed" if count == 1 else None
        await seen.answer(200, json.dumps(body).encode())

    rig = await start(p0=prefill, d0=decode, d1=decode)
    answer = await rig.chat()
    assert answer.json()["choices"][0]["message"]["content"] == "whole"
    assert len(rig["p0"].seen) == 2
    await rig.idle()


async def test_a_client_may_stop_at_that_very_word(start: Start) -> None:
    teller = Teller(STORY)
    teller.edit = lambda chunk: {
        **chunk,
        "choices": [c | {"stop_reason": "recomputed"} if c["finish_reason"] else c for c in chunk["choices"]],
    }
    rig = await start(ON, **same(teller))
    answer = await ask(rig, stop=["recomputed"])
    assert (told(answer.body), answer.clean) == ("".join(STORY), True)


@pytest.mark.parametrize("connector", ["omni", "lmcache", "ascend-mooncake", "vllm-p2p-nccl"])
async def test_with_every_engine_that_tells_its_tokens(start: Start, connector: str) -> None:
    """... also where both workers are asked together; each attempt has keys of its own."""
    teller = Teller(STORY, [4])
    names = ("p0", "p1", "d0", "d1")
    each = {name: {"kv_address": f"127.0.0.1:{7000 + n}"} for n, name in enumerate(names)} if "p2p" in connector else {}
    rig = await start({**ON, "connector": connector, "each": each}, **same(teller))
    answer = await ask(rig, max_tokens=50)
    assert (told(answer.body), answer.clean) == ("".join(STORY), True)
    assert teller.asked[1]["prompt"] == [*PROMPT, 0, 1, 2, 3]
    ids = [seen.headers["x-request-id"] for name in names for seen in rig[name].seen]
    keys = [str(seen.json.get("kv_transfer_params")) for name in names[2:] for seen in rig[name].seen]
    assert len(set(ids)) == 2 or len(set(keys)) == 2 or connector in ("omni", "lmcache", "ascend-mooncake")
    await rig.idle()
