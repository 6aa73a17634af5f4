"""Encode workers in front of P: one request for each image or sound, and what becomes of it when one fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.relay.conftest import Rig, Start
from tests.relay.raw import chat, post
from tests.relay.scripted import HANDOFF, Seen, decode_stream, prefill_ok

ENCODE = {"role": "encode", "connector": "aggregated"}
EPD: dict[str, Any] = {"each": {"m0": ENCODE, "m1": ENCODE}}


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


SOUND = {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}


def messages(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "what?"}, *parts]}]


def encoder(params: bool = True) -> Any:
    """E: says where it left what it made, by the item's name."""

    async def script(seen: Seen) -> None:
        part = seen.json["messages"][0]["content"][0]
        name = json.dumps(part)[-12:]
        answer = {"id": "e", "ec_transfer_params": {name: {"at": 1}} if params else None}
        await seen.answer(200, json.dumps(answer).encode())

    return script


def items(rig: Rig) -> list[Any]:
    return [s.json["messages"][0]["content"] for name in ("m0", "m1") for s in rig[name].seen]


async def test_each_item_is_encoded_before_p_is_asked(start: Start) -> None:
    rig = await start(EPD, m0=encoder(), m1=encoder(), p0=prefill_ok, d0=decode_stream)
    parts = [image("http://x/a.png", z=1.5), SOUND, image("data:image/png;base64,AAAA")]
    answer = await rig.chat(messages=messages(*parts), max_tokens=9)
    assert answer.status_code == 200
    assert 0 <= (await rig.timeline(answer))["encode_s"] < 5  # the loop counts milliseconds
    assert "omni_encode_seconds_count 1.0" in (await rig.client.get("/metrics")).text
    assert sorted(items(rig), key=str) == sorted([[part] for part in parts], key=str)
    for name in ("m0", "m1"):
        for seen in rig[name].seen:
            assert (seen.json["max_tokens"], seen.json["stream"], seen.json["model"]) == (1, False, "m")
            assert seen.headers["x-request-id"].startswith(answer.headers["x-request-id"] + ":")
    asked = rig["p0"].seen[0].json
    assert len(asked["ec_transfer_params"]) == 3
    assert asked["messages"] == messages(*parts)
    assert rig["d0"].seen[0].json["kv_transfer_params"] == HANDOFF
    assert "ec_transfer_params" not in rig["d0"].seen[0].json
    await rig.idle()


async def test_without_images_nobody_encodes(start: Start) -> None:
    rig = await start(EPD, m0=encoder(), p0=prefill_ok, d0=decode_stream)
    for extra in ({}, {"messages": messages()}, {"tools": [{"type": "function", "function": {"name": "_url"}}]}):
        assert (await rig.chat(**extra)).status_code == 200
    assert not rig["m0"].seen
    assert "ec_transfer_params" not in rig["p0"].seen[-1].json
    await rig.idle()


async def test_without_encoders_p_gets_the_images(start: Start) -> None:
    rig = await start(p0=prefill_ok, d0=decode_stream)
    sent = messages(image("http://x/a.png"))
    assert (await rig.chat(messages=sent)).status_code == 200
    assert rig["p0"].seen[0].json["messages"] == sent
    await rig.idle()


async def test_the_same_image_goes_to_the_same_encoder(start: Start) -> None:
    rig = await start(EPD, m0=encoder(False), m1=encoder(False), p0=prefill_ok, d0=decode_stream)
    for _ in range(3):
        for at in range(20):
            assert (await rig.chat(messages=messages(image(f"http://x/{at}.png")))).status_code == 200
    homes = [{s.json["messages"][0]["content"][0]["image_url"]["url"] for s in rig[m].seen} for m in ("m0", "m1")]
    assert not homes[0] & homes[1]
    assert min(map(len, homes)) >= 3
    assert "ec_transfer_params" not in rig["p0"].seen[0].json
    await rig.idle()


@pytest.mark.parametrize("how", ["500", "503", "reset", "gone"])
async def test_another_encoder_takes_over(start: Start, how: str) -> None:
    async def fails(seen: Seen) -> None:
        if how == "reset":
            seen.reset()
        else:
            await seen.answer(int(how), b"{}")

    rig = await start(EPD, m0=fails, m1=encoder(), p0=prefill_ok, d0=decode_stream)
    if how == "gone":
        await rig["m0"].stop()
    for at in range(6):
        assert (await rig.chat(messages=messages(image(f"http://x/{at}.png")))).status_code == 200
    assert len(rig["m1"].seen) == 6
    assert len(rig["m0"].seen) <= 1, "who failed is asked last for a while"
    await rig.idle()


async def test_who_does_not_answer_probes_is_not_asked(start: Start) -> None:
    rig = await start(EPD, m0=encoder(), m1=encoder(), p0=prefill_ok, d0=decode_stream)
    rig["m0"].healthy = False
    async with asyncio.timeout(5):
        while rig.gateway.front.upstreams["m0"].member.up:
            await asyncio.sleep(0.01)
    for at in range(6):
        assert (await rig.chat(messages=messages(image(f"http://x/{at}.png")))).status_code == 200
    assert not rig["m0"].seen
    rig["m1"].healthy = False
    async with asyncio.timeout(5):
        while rig.gateway.front.upstreams["m1"].member.up:
            await asyncio.sleep(0.01)
    answer = await rig.chat(messages=messages(image("http://x/a.png")))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_worker")
    assert len(rig["p0"].seen) == 6, "an image that nobody encodes is not sent on"
    rig["m0"].healthy = True
    async with asyncio.timeout(5):
        while (await rig.chat(messages=messages(image("http://x/a.png")))).status_code != 200:
            await asyncio.sleep(0.01)
    await rig.idle()


@pytest.mark.parametrize(
    ("status", "body", "seen_status", "code"),
    [
        (400, b'{"error":{"code":"bad_image"}}', 400, "bad_image"),
        (500, b'{"error":{"code":"oops"}}', 500, "oops"),
        (200, b"nonsense", 502, "worker_garbage"),
        (302, b"", 502, "worker_garbage"),
    ],
)
async def test_an_image_that_cannot_be_encoded_ends_the_request(
    start: Start, status: int, body: bytes, seen_status: int, code: str
) -> None:
    async def fails(seen: Seen) -> None:
        if b"good" in seen.body:
            await seen.gone.wait()
        else:
            await seen.answer(status, body)

    rig = await start(EPD, m0=fails, p0=prefill_ok, d0=decode_stream)
    answer = await rig.chat(messages=messages(image("http://x/bad"), image("http://x/good")))
    assert (answer.status_code, answer.json()["error"]["code"]) == (seen_status, code)
    assert not rig["p0"].seen
    await rig.idle()
    assert not rig.gateway.front.edge.intake.encoders._held


async def test_a_client_that_leaves_ends_the_encoding(start: Start) -> None:
    async def never(seen: Seen) -> None:
        await seen.gone.wait()

    rig = await start(EPD, m0=never, p0=prefill_ok, d0=decode_stream)
    client = await rig.raw()
    await client.send(post(chat(messages=messages(image("http://x/a")))))
    seen = await rig.seen("m0")
    client.reset()
    async with asyncio.timeout(2):
        await seen.gone.wait()
    assert not rig["p0"].seen
    assert not rig.gateway.front.edge.intake.encoders._held
    await rig.idle()


async def test_an_encoder_that_hangs_is_not_waited_for_without_end(start: Start) -> None:
    async def never(seen: Seen) -> None:
        await seen.gone.wait()

    rig = await start(EPD | {"timeouts": {"first_byte_s": 0.2}}, m0=never, p0=prefill_ok, d0=decode_stream)
    answer = await rig.chat(messages=messages(image("http://x/a")))
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "worker_timeout")
    await rig.idle()


async def test_one_worker_that_does_the_rest_gets_what_encoders_said(start: Start) -> None:
    rig = await start(EPD, m0=encoder(), p0=prefill_ok, d0=decode_stream)
    answer = await rig.chat(messages=messages(image("http://x/a.png")), n=2)
    assert answer.status_code == 200
    assert len(rig["d0"].seen[0].json["ec_transfer_params"]) == 1
    await rig.idle()


async def test_parts_of_a_divided_request_share_what_was_encoded(start: Start) -> None:
    rig = await start(EPD | {"connector": "sglang"}, m0=encoder(), p0=prefill_ok, d0=decode_stream)
    assert (await rig.chat(messages=messages(image("http://x/a.png")), n=2)).status_code == 200
    assert len(rig["m0"].seen) == 1
    assert [len(s.json["ec_transfer_params"]) for s in rig["p0"].seen] == [1, 1]
    await rig.idle()


async def test_an_encoder_alone_serves_nobody(start: Start) -> None:
    rig = await start(EPD, m0=encoder())
    assert (await rig.chat()).status_code == 404
    assert not rig.gateway.scheduling.ready()


async def test_an_image_is_not_counted_as_text(start: Start) -> None:
    going = asyncio.Event()

    async def prefill(seen: Seen) -> None:
        await going.wait()
        await prefill_ok(seen)

    rig = await start(EPD, m0=encoder(), p0=prefill, d0=decode_stream)
    asked = asyncio.create_task(rig.chat(messages=messages(image("data:image/png;base64," + "A" * 400_000))))
    assert len((await rig.seen("p0")).body) > 400_000
    spec = rig.edge_exchange().spec
    assert spec is not None
    assert spec.prompt_tokens < 100
    going.set()
    assert (await asked).status_code == 200
    await rig.idle()
