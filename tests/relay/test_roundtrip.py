"""The way of a request when all goes well, and what each side sees of it."""

from __future__ import annotations

import json

import pytest

from tests.relay.conftest import Start
from tests.relay.scripted import (
    DONE,
    HANDOFF,
    Seen,
    decode_stream,
    event,
    prefill_answer,
    prefill_ok,
    usage_event,
)

WITH_AND_WITHOUT_PUMP = True


async def test_stream_is_relayed_and_legs_are_asked_in_order(start: Start) -> None:
    rig = await start()
    answer = await rig.chat(stream=True, max_tokens=5, x_vendor={"a": [1, 2.50], "b": 9223372036854775807})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    expected = event(role="assistant", content="") + event("Hel") + event("lo") + event("!")
    assert answer.content == expected + event("", finish="stop") + DONE
    (p,), (d,) = rig["p0"].seen, rig["d0"].seen
    assert p.json["max_tokens"] == 1
    assert p.json["stream"] is False
    assert p.json["kv_transfer_params"]["do_remote_decode"] is True
    assert d.json["max_tokens"] == 5
    assert d.json["kv_transfer_params"] == HANDOFF
    assert b'"x_vendor":{"a":[1,2.5],"b":9223372036854775807}' in d.body
    assert p.headers["x-request-id"] == d.headers["x-request-id"] == answer.headers["x-request-id"]
    await rig.idle()


async def test_usage_is_of_d_with_cached_tokens_of_p(start: Start) -> None:
    rig = await start()
    answer = await rig.chat(stream=True, stream_options={"include_usage": True})
    events = [json.loads(e[6:]) for e in answer.text.split("\n\n") if e and e != "data: [DONE]"]
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert events[-1]["usage"]["completion_tokens"] == 3
    whole = (await rig.chat()).json()
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    await rig.idle()


async def test_usage_that_the_client_did_not_ask_for_stays_here(start: Start) -> None:
    rig = await start()
    answer = await rig.chat(stream=True)
    assert rig["d0"].seen[0].json["stream_options"] == {"include_usage": True}
    assert b"usage" not in answer.content
    timeline = (await rig.client.get(f"/omni/requests/{answer.headers['x-request-id']}")).json()
    assert timeline["generated_tokens"] == 3
    assert timeline["cached_tokens"] == 3
    await rig.idle()


async def test_null_details_of_p_mean_nothing_was_cached(start: Start) -> None:
    async def prefill(seen: Seen) -> None:
        await seen.answer(200, prefill_answer(cached=None))

    rig = await start(p0=prefill, d0=decode_stream)
    assert (await rig.chat()).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_timeline_has_the_stages(start: Start) -> None:
    rig = await start()
    answer = await rig.client.post(
        "/v1/completions",
        json={"model": "m", "prompt": "hi", "stream": True},
        headers={"x-request-id": "mine-1", "x-session-id": "s", "traceparent": "00-abc"},
    )
    assert answer.headers["x-request-id"] == "mine-1"
    assert rig["d0"].seen[0].headers["x-session-id"] == "s"
    assert rig["p0"].seen[0].headers["traceparent"] == "00-abc"
    timeline = (await rig.client.get("/omni/requests/mine-1")).json()
    stages = [s["stage"] for s in timeline["stages"]]
    assert stages[-6:] == [
        "PREFILL_SCHEDULED",
        "PREFILL_RUNNING",
        "DECODE_WAITING",
        "DECODE_SCHEDULED",
        "DECODE_RUNNING",
        "FINISHED",
    ]
    assert timeline["workers"] == {"prefill": "p0", "decode": "d0"}
    assert timeline["outcome"] == "completed"
    listed = (await rig.client.get("/omni/requests")).json()
    assert [r["id"] for r in listed["ended"]] == ["mine-1"]


async def test_aggregated_worker_gets_the_body_untouched(start: Start) -> None:
    rig = await start({"connector": "aggregated"}, m0=decode_stream)
    body = b'{ "model" : "m","prompt":"hi" , "zeta":1,"alpha":1.50}'
    answer = await rig.client.post("/v1/completions", content=body)
    assert answer.status_code == 200
    assert rig["m0"].seen[0].body == body
    await rig.idle()


async def test_parallel_legs_share_a_room(start: Start) -> None:
    rig = await start({"connector": "sglang"}, p0=_sglang_prefill, d0=decode_stream)
    answer = await rig.chat(stream=True)
    assert answer.status_code == 200
    p, d = rig["p0"].seen[0].json, rig["d0"].seen[0].json
    assert p["bootstrap_room"] == d["bootstrap_room"]
    assert 0 <= p["bootstrap_room"] < 2**63
    assert p["bootstrap_host"] == "127.0.0.1"
    await rig.idle()


async def _sglang_prefill(seen: Seen) -> None:
    await seen.answer(200, prefill_answer(params=None))


async def test_every_cut_of_a_stream_is_relayed_exactly(start: Start) -> None:
    """UTF-8 characters, comments, CRLF and several events in one read, cut in two at every byte."""
    first = event("é€😀\u2028") + b": comment\r\n\r\n" + event("x").replace(b"\n\n", b"\r\n\r\n")
    whole = first + event("y") + event("z") + usage_event() + DONE

    async def decode(seen: Seen) -> None:
        at = seen.json["seed"]
        await seen.open_stream()
        for part in (whole[:at], whole[at:]):
            if part:
                await seen.chunk(part)
        await seen.end_stream()

    rig = await start(p0=prefill_ok, d0=decode)
    for at in range(len(whole)):
        answer = await rig.chat(stream=True, stream_options={"include_usage": True}, seed=at)
        assert answer.content == whole.replace(b'"cached_tokens": 9', b'"cached_tokens":3')
    await rig.idle()


@pytest.mark.slow
async def test_a_stream_byte_by_byte(start: Start) -> None:
    whole = event("é€😀") + usage_event() + event("z") + DONE[:-1]

    async def decode(seen: Seen) -> None:
        await seen.open_stream()
        for byte in whole:
            await seen.chunk(bytes([byte]))
        await seen.end_stream()

    rig = await start(p0=prefill_ok, d0=decode)
    answer = await rig.chat(stream=True)
    assert answer.content == event("é€😀") + event("z") + DONE[:-1]
