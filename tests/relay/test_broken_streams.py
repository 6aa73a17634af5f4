"""Streams that break: the client gets an error event and a transfer that is not whole, never a clean end."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.relay.conftest import Rig, Start
from tests.relay.raw import Response, chat, post
from tests.relay.scripted import (
    DONE,
    Script,
    Seen,
    decode_answer,
    decode_stream,
    event,
    prefill_ok,
    usage_event,
)

WITH_AND_WITHOUT_PUMP = True

BEFORE = event(role="assistant", content="") + event("Hel") + event("lo")


async def stream_two_tokens(seen: Seen) -> None:
    await seen.open_stream()
    await seen.chunk(BEFORE)


async def reset(seen: Seen) -> None:
    await stream_two_tokens(seen)
    await asyncio.sleep(0)
    seen.reset()


async def fin(seen: Seen) -> None:
    await stream_two_tokens(seen)
    seen.writer.close()


async def half_chunk(seen: Seen) -> None:
    await stream_two_tokens(seen)
    await seen.send(b"ff\r\n" + event("x")[:9])
    seen.writer.close()


async def half_event(seen: Seen) -> None:
    await stream_two_tokens(seen)
    await seen.chunk(event("x")[:20])
    seen.writer.close()


async def garbage(seen: Seen) -> None:
    await stream_two_tokens(seen)
    await seen.send(b"zz\r\nnot a chunk")


async def no_done(seen: Seen) -> None:
    await stream_two_tokens(seen)
    await seen.chunk(event("", finish="stop"))
    await seen.end_stream()


async def no_done_until_eof(seen: Seen) -> None:
    await seen.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + BEFORE)
    seen.writer.close()


async def no_done_amid_usage(seen: Seen) -> None:
    """With `continuous_usage_stats` every chunk has usage."""
    await stream_two_tokens(seen)
    await seen.chunk(event("x")[:-3] + b',"usage":{"prompt_tokens":9,"completion_tokens":3}}\n\n')
    await seen.end_stream()


BROKEN: list[tuple[Script, str]] = [
    (no_done_amid_usage, "worker_closed"),
    (fin, "worker_closed"),
    (reset, "worker_closed"),
    (half_chunk, "worker_closed"),
    (half_event, "worker_closed"),
    (garbage, "worker_garbage"),
    (no_done, "worker_closed"),
    (no_done_until_eof, "worker_closed"),
]


async def ask(rig: Rig, version: str = "1.1", **fields: object) -> Response:
    client = await rig.raw()
    await client.send(post(chat(stream=True, **fields), version=version))
    return await client.response()


def error_of(body: bytes) -> object:
    """The error in the last event of a stream; every event of it must be readable."""
    events = body.split(b"\n\n")
    assert events.pop() == b""
    found = [json.loads(e.removeprefix(b"data: ")) for e in events]
    return found[-1]["error"]


async def test_a_stream_that_dies_ends_with_an_error_and_unclean(start: Start) -> None:
    rig = await start()
    for script, code in BROKEN:
        rig["d0"].script = script
        answer = await ask(rig)
        assert answer.status == 200
        assert answer.body.startswith(BEFORE)
        error = error_of(answer.body)
        assert (script, error["code"], error["type"]) == (script, code, "server_error")  # type: ignore[index]
        assert not answer.clean
        timeline = (await rig.client.get(f"/omni/requests/{answer.header('x-request-id')}")).json()
        assert (timeline["outcome"], timeline["error"]) == ("failed", code)
        assert len(rig["d0"].seen) == len(rig["p0"].seen)
    await rig.idle()


@pytest.mark.parametrize("separate", [True, False])
async def test_a_stream_may_end_with_its_usage(start: Start, separate: bool) -> None:
    """`transformers serve` sends no `[DONE]`; with the counts of an answer that has ended nothing is missing."""
    usage = b'"usage":{"prompt_tokens":9,"completion_tokens":2}}\n\n'
    end = event("", finish="stop")
    last = end + b'data: {"choices":[],' + usage if separate else end[:-3] + b"," + usage

    async def worker(seen: Seen) -> None:
        await stream_two_tokens(seen)
        await seen.chunk(last)
        await seen.end_stream()

    rig = await start(p0=prefill_ok, d0=worker)
    answer = await ask(rig, stream_options={"include_usage": True})
    assert (answer.body, answer.clean) == (BEFORE + last, True)
    timeline = (await rig.client.get(f"/omni/requests/{answer.header('x-request-id')}")).json()
    assert timeline["outcome"] == "completed"
    await rig.idle()


async def test_without_chunks_only_a_reset_tells(start: Start) -> None:
    """HTTP/1.0: the end of the connection would be the end of the answer."""
    rig = await start(p0=prefill_ok, d0=fin)
    answer = await ask(rig, version="1.0")
    assert answer.status == 200
    assert answer.header("transfer-encoding") is None
    assert not answer.clean
    rig["d0"].script = decode_stream
    answer = await ask(rig, version="1.0")
    assert answer.clean
    assert answer.body.endswith(DONE)
    await rig.idle()


async def test_an_object_that_dies_is_an_error_of_ours(start: Start) -> None:
    async def half(seen: Seen) -> None:
        body = decode_answer()
        await seen.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body))
        await seen.send(body[:-10])
        seen.writer.close()

    rig = await start(p0=prefill_ok, d0=half)
    answer = await rig.chat()
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_closed")
    assert len(rig["d0"].seen) == 1
    await rig.idle()


ERROR = b'data: {"error":{"message":"out of blocks","type":"x","param":null,"code":503}}\n\n'


async def test_an_error_event_of_the_worker_is_told_once_and_as_it_is(start: Start) -> None:
    """The engine ended its stream in order, so do we; the request has failed all the same."""

    async def decode(seen: Seen) -> None:
        await stream_two_tokens(seen)
        await seen.chunk(ERROR + DONE)
        await seen.end_stream()

    async def dies(seen: Seen) -> None:
        await stream_two_tokens(seen)
        await seen.chunk(ERROR)
        seen.writer.close()

    rig = await start(p0=prefill_ok, d0=decode)
    answer = await ask(rig)
    assert (answer.body, answer.clean) == (BEFORE + ERROR + DONE, True)
    timeline = (await rig.client.get(f"/omni/requests/{answer.header('x-request-id')}")).json()
    assert timeline["outcome"] == "failed"
    rig["d0"].script = dies
    answer = await ask(rig)
    assert (answer.body, answer.clean) == (BEFORE + ERROR, False)
    await rig.idle()


async def test_an_error_event_at_once_still_comes_through(start: Start) -> None:
    async def decode(seen: Seen) -> None:
        await seen.open_stream()
        await seen.chunk(ERROR + DONE)
        await seen.end_stream()

    rig = await start(p0=prefill_ok, d0=decode)
    answer = await ask(rig)
    assert (answer.status, answer.body, answer.clean) == (200, ERROR + DONE, True)
    await rig.idle()


async def test_text_that_speaks_of_errors_and_ends_is_only_text(start: Start) -> None:
    text = 'say "error": {"usage":{"a":1}} data: [DONE]\n\ndata: [DONE]'

    async def decode(seen: Seen) -> None:
        await seen.open_stream()
        for part in (event(text), event("more"), usage_event(), DONE):
            await seen.chunk(part)
        await seen.end_stream()

    rig = await start(p0=prefill_ok, d0=decode)
    answer = await ask(rig)
    assert (answer.body, answer.clean) == (event(text) + event("more") + DONE, True)
    await rig.idle()


# ------------------------------------------------------------------------------------- time limits


async def hang(seen: Seen) -> None:
    await seen.gone.wait()


async def hang_after_head(seen: Seen) -> None:
    await seen.open_stream()
    await seen.gone.wait()


async def hang_after_role(seen: Seen) -> None:
    await seen.open_stream()
    await seen.chunk(event(role="assistant", content=""))
    await seen.gone.wait()


async def hang_mid_stream(seen: Seen) -> None:
    await stream_two_tokens(seen)
    await seen.gone.wait()


async def hang_mid_object(seen: Seen) -> None:
    await seen.send(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
    await seen.gone.wait()


FIRST = {"timeouts": {"first_byte_s": 0.1, "inter_chunk_s": 60}}
BETWEEN = {"timeouts": {"first_byte_s": 60, "inter_chunk_s": 0.1}}


@pytest.mark.parametrize(
    ("leg", "script", "limit"),
    [
        ("p0", hang, FIRST),
        ("p0", hang_mid_object, BETWEEN),
        ("d0", hang, FIRST),
        ("d0", hang_after_head, FIRST),
        ("d0", hang_after_role, BETWEEN),
        ("d0", hang_mid_object, BETWEEN),
    ],
)
async def test_a_worker_that_hangs_before_its_answer(start: Start, leg: str, script: Script, limit: dict) -> None:  # type: ignore[type-arg]
    rig = await start(dict(limit), **{"p0": prefill_ok, "d0": decode_stream, leg: script})
    answer = await rig.chat(stream=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "worker_timeout")
    async with asyncio.timeout(1):
        await rig[leg].seen[0].gone.wait()
    assert len(rig[leg].seen) == 1, "a worker that hangs may still be computing: nothing is sent twice"
    await rig.idle()


async def test_a_worker_that_hangs_mid_stream(start: Start) -> None:
    rig = await start(dict(BETWEEN), p0=prefill_ok, d0=hang_mid_stream)
    answer = await ask(rig)
    assert error_of(answer.body)["code"] == "worker_timeout"  # type: ignore[index]
    assert not answer.clean
    await rig.idle()


async def test_there_is_no_limit_on_the_whole(start: Start) -> None:
    """Every part comes in time, the whole takes several times both limits."""

    async def decode(seen: Seen) -> None:
        await seen.open_stream()
        for index in range(12):
            await asyncio.sleep(0.1)
            await seen.chunk(event(str(index)))
        await seen.chunk(DONE)
        await seen.end_stream()

    rig = await start({"timeouts": {"first_byte_s": 0.5, "inter_chunk_s": 0.5}}, p0=prefill_ok, d0=decode)
    answer = await ask(rig)
    assert answer.clean
    assert answer.body.endswith(DONE)
    await rig.idle()


# ---------------------------------------------------------------------------- P and D side by side


async def test_in_parallel_ds_text_waits_for_ps_success(start: Start) -> None:
    """Faults C6 and C13: D answered from half a cache, then P said no."""
    d_has_spoken = asyncio.Event()

    async def prefill(seen: Seen) -> None:
        await d_has_spoken.wait()
        await seen.answer(400, b'{"error":{"message":"too long"}}')

    async def decode(seen: Seen) -> None:
        await stream_two_tokens(seen)
        d_has_spoken.set()
        await seen.gone.wait()

    rig = await start({"connector": "sglang"}, p0=prefill, d0=decode)
    answer = await rig.chat(stream=True)
    assert (answer.status_code, answer.text) == (400, '{"error":{"message":"too long"}}')
    async with asyncio.timeout(1):
        await rig["d0"].seen[0].gone.wait()
    await rig.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_in_parallel_ds_whole_answer_waits_for_p(start: Start, stream: bool) -> None:
    """... and is then told with P's cached tokens."""
    go = asyncio.Event()

    async def prefill(seen: Seen) -> None:
        await go.wait()
        await prefill_ok(seen)

    async def decode(seen: Seen) -> None:
        await decode_stream(seen)
        go.set()

    rig = await start({"connector": "sglang"}, p0=prefill, d0=decode)
    answer = await rig.chat(stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
    assert answer.status_code == 200
    assert '"cached_tokens":3' in answer.text
    assert (await rig.timeline(answer))["outcome"] == "completed"
    await rig.idle()


async def test_in_parallel_a_p_that_breaks_ends_both(start: Start) -> None:
    async def prefill(seen: Seen) -> None:
        seen.reset()

    rig = await start({"connector": "sglang", "retries": {"max": 0}}, p0=prefill, d0=hang)
    answer = await rig.chat(stream=True)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_closed")
    async with asyncio.timeout(1):
        await (await rig.seen("d0")).gone.wait()
    await rig.idle()


async def test_in_parallel_a_d_that_floods_before_p_has_answered_waits(start: Start) -> None:
    """What D says too early is kept within bounds, and all of it arrives in the end."""
    go = asyncio.Event()
    part = event("x" * 60_000)
    count = 200

    async def prefill(seen: Seen) -> None:
        await go.wait()
        await prefill_ok(seen)

    async def decode(seen: Seen) -> None:
        await seen.open_stream()
        for _ in range(count):
            await seen.chunk(part)
        await seen.chunk(DONE)
        await seen.end_stream()

    rig = await start({"connector": "sglang"}, p0=prefill, d0=decode)
    asked = asyncio.create_task(ask(rig))
    seen = await rig.seen("d0")
    exchanges = rig.gateway.front.edge.exchanges
    async with asyncio.timeout(5):
        while not (held := [leg for x in exchanges.values() for leg in x.legs.values() if leg.held_up]) or (
            seen.writer.transport.get_write_buffer_size() == 0
        ):
            await asyncio.sleep(0.01)
    (leg,) = held
    assert leg._size < 2 << 20
    go.set()
    answer = await asked
    assert (answer.body == part * count + DONE, answer.clean) == (True, True)
    await rig.idle()
