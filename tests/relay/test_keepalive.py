"""Connections and what is left of them: pools of idle ones, framing, pipelines, slow senders."""

from __future__ import annotations

import asyncio

import pytest

from omni_proxy.config import parse
from tests.relay.conftest import Rig, Start
from tests.relay.raw import chat, post
from tests.relay.scripted import (
    DONE,
    ScriptedWorker,
    Seen,
    decode_answer,
    decode_stream,
    event,
    prefill_answer,
    prefill_ok,
)

COMPLETIONS = "/v1/completions"


def posts(worker: ScriptedWorker) -> int:
    """Connections that carried requests: probes of the gateway have their own."""
    return len({id(seen.writer) for seen in worker.seen})


async def settled(rig: Rig, name: str, count: int) -> None:
    """Wait until so many connections are idle in a worker's pool."""
    pool = rig.gateway.front.upstreams[name].pool
    async with asyncio.timeout(5):
        while len(pool._idle) != count:
            await asyncio.sleep(0.005)


# -------------------------------------------------------------------------------- towards workers


def test_idle_time_is_below_the_engines() -> None:
    """uvicorn closes after 5 s (faults K1)."""
    config = parse({}, "test")
    assert config.keepalive.idle_s <= 4.0
    assert config.listen.backlog == 4096


async def test_connections_are_used_again_and_the_last_one_first(start: Start) -> None:
    go = asyncio.Event()

    async def prefill(seen: Seen) -> None:
        await go.wait()
        await prefill_ok(seen)

    rig = await start(p0=prefill, d0=decode_stream)
    asked = [asyncio.create_task(rig.chat()) for _ in range(3)]
    await rig.seen("p0", 3)
    go.set()
    assert [(await a).status_code for a in asked] == [200] * 3
    await settled(rig, "p0", 3)
    last = rig.gateway.front.upstreams["p0"].pool._idle[-1]
    for _ in range(3):
        await rig.chat()
        assert rig.gateway.front.upstreams["p0"].pool._idle[-1] is last
    assert posts(rig["p0"]) == 3


async def test_idle_connections_are_closed_before_the_worker_does(start: Start) -> None:
    rig = await start({"keepalive": {"idle_s": 0.1}})
    assert (await rig.chat()).status_code == 200
    await settled(rig, "p0", 0)
    async with asyncio.timeout(1):
        while not rig["p0"].seen[0].writer.is_closing():
            await asyncio.sleep(0.005)
    assert (await rig.chat()).status_code == 200
    assert posts(rig["p0"]) == 2


async def test_a_worker_that_closes_idle_connections(start: Start) -> None:
    """Request, the worker closes, request, ... at once after it and a little later."""

    async def once(seen: Seen) -> None:
        await decode_stream(seen)
        seen.writer.close()

    rig = await start(p0=prefill_ok, d0=once)
    for pause in (0.0, 0.001, 0.01, 0.05) * 5:
        assert (await rig.chat()).status_code == 200
        await asyncio.sleep(pause)
    assert posts(rig["d0"]) == 20
    await settled(rig, "d0", 0)
    await rig.idle()


async def test_at_most_so_many_stay_idle(start: Start) -> None:
    rig = await start({"keepalive": {"max_idle": 0}})
    assert [(await rig.chat()).status_code for _ in range(3)] == [200] * 3
    assert posts(rig["p0"]) == 3


async def test_what_nobody_asked_for_is_not_taken_for_an_answer(start: Start) -> None:
    """A second answer behind the first one would be the next client's."""

    async def twice(seen: Seen) -> None:
        await seen.answer(200, decode_answer("right"))
        await seen.answer(200, decode_answer("wrong"))

    rig = await start(p0=prefill_ok, d0=twice)
    for _ in range(5):
        answer = await rig.chat()
        assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (200, "right")
    await rig.idle()


def head(*lines: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", "content-type: application/json", *lines, "", ""]).encode()


BODY = decode_answer()
FRAMINGS = {
    "until the end": (head() + BODY, True),
    "http/1.0": (head(f"content-length: {len(BODY)}").replace(b"/1.1", b"/1.0") + BODY, True),
    "connection: close": (head(f"content-length: {len(BODY)}", "connection: close") + BODY, True),
    "continue first": (b"HTTP/1.1 100 Continue\r\n\r\n" + head(f"content-length: {len(BODY)}") + BODY, False),
    "early hints": (
        b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" * 2 + head(f"content-length: {len(BODY)}") + BODY,
        False,
    ),
    "chunked with a trailer": (
        head("transfer-encoding: chunked") + b"%x\r\n%b\r\n0\r\nx-trailer: 1\r\n\r\n" % (len(BODY), BODY),
        False,
    ),
    "chunks of one": (
        head("transfer-encoding: chunked") + b"".join(b"1\r\n%c\r\n" % b for b in BODY) + b"0\r\n\r\n",
        False,
    ),
    "chunk extensions": (
        head("transfer-encoding: chunked") + b"%x;a=b\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY),
        False,
    ),
}


async def test_framings_of_a_workers_answer(start: Start) -> None:
    """Whatever is legal is understood, and the client gets framing of our own."""
    rig = await start()
    for name, (data, closes) in FRAMINGS.items():

        async def framed(seen: Seen, data: bytes = data, closes: bool = closes) -> None:
            await seen.send(data)
            if closes:
                seen.writer.close()

        rig["d0"].script = framed
        for _ in range(2):
            answer = await rig.chat()
            assert (name, answer.status_code, answer.content) == (name, 200, BODY.replace(b": 9}", b":3}"))
            assert answer.headers["content-length"] == str(len(answer.content))
            assert "x-trailer" not in answer.headers
            assert "link" not in answer.headers
    await rig.idle()


async def test_a_stream_until_the_end_of_the_connection(start: Start) -> None:
    async def decode(seen: Seen) -> None:
        await seen.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + event("x") + DONE)
        seen.writer.close()

    rig = await start(p0=prefill_ok, d0=decode)
    client = await rig.raw()
    await client.send(post(chat(stream=True)))
    answer = await client.response()
    assert (answer.body, answer.clean) == (event("x") + DONE, True)
    await rig.idle()


AMBIGUOUS = {
    "two lengths": head("content-length: 5", "content-length: 6") + b"{}{}{}",
    "length and chunks": head("content-length: 5", "transfer-encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n",
    "negative length": head("content-length: -1"),
    "upgrade": b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
}


async def test_an_answer_without_one_meaning_is_none(start: Start) -> None:
    rig = await start({"retries": {"max": 0}})
    for name, data in AMBIGUOUS.items():

        async def framed(seen: Seen, data: bytes = data) -> None:
            await seen.send(data)
            await seen.gone.wait()

        rig["d0"].script = framed
        answer = await rig.chat()
        assert (name, answer.status_code, answer.json()["error"]["code"]) == (name, 502, "worker_garbage")
    await rig.idle()


# -------------------------------------------------------------------------------- towards clients


async def test_one_connection_carries_hot_and_other_requests_in_order(start: Start) -> None:
    rig = await start()
    client = await rig.raw()
    get = b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n"
    head_request = b"HEAD /omni/workers HTTP/1.1\r\nhost: g\r\n\r\n"
    bad = post(b"{")
    text = post(b'{"model":"m","prompt":"x"}', path=COMPLETIONS)
    await client.send(post(chat()) + get + bad + post(chat(stream=True)) + head_request + text + get)
    answers = [await client.response(bodyless=index == 4) for index in range(7)]
    assert [a.status for a in answers] == [200, 200, 400, 200, 405, 200, 200]
    assert answers[3].body.endswith(DONE)
    assert answers[1].body == answers[6].body == b'{"status":"ok"}'
    assert len({a.header("x-request-id") for a in answers if a.header("x-request-id")}) == 4
    await client.send(post(chat()))
    assert (await client.response()).status == 200
    await rig.idle()


async def test_whole_requests_need_no_parser_and_others_get_one(start: Start) -> None:
    """On one connection, also when a whole request comes after others, or before one that is cut."""
    rig = await start()
    client = await rig.raw()
    connection = await rig.connection()
    for _ in range(2):
        await client.send(post(chat()))
        assert (await client.response()).status == 200
        assert connection._parser is None
    await client.send(b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n")
    assert (await client.response()).status == 200
    assert connection._parser is not None
    data = post(chat(max_tokens=7))
    await client.send(data)
    await rig.seen("d0", 3)
    await client.send(data[:30])
    assert (await client.response()).status == 200
    await client.send(data[30:])
    assert (await client.response()).status == 200
    assert [seen.json.get("max_tokens") for seen in rig["d0"].seen] == [None, None, 7, 7]
    await rig.idle()


async def test_a_request_is_cut_behind_one_that_is_answered(start: Start) -> None:
    """The parser begins while a whole request is under way: its first message is the second in line."""
    rig = await start()
    client = await rig.raw()
    data = post(chat())
    await client.send(data)
    await client.send(data[:50])
    assert (await client.response()).status == 200
    await client.send(data[50:] + data)
    for _ in range(2):
        assert (await client.response()).status == 200
    await rig.idle()


async def test_a_long_pipeline_of_short_answers(start: Start) -> None:
    """Each answer begins the next one; that must not nest."""
    rig = await start()
    client = await rig.raw()
    count = 3000
    await client.send(post(b"") * count + post(chat()))
    for _ in range(count):
        assert (await client.response()).status == 400
    assert (await client.response()).status == 200
    await rig.idle()


async def test_a_pipelined_body_that_is_too_large_is_refused_in_turn(start: Start) -> None:
    go = asyncio.Event()

    async def decode(seen: Seen) -> None:
        await go.wait()
        await decode_stream(seen)

    rig = await start({"limits": {"client_max_body_bytes": 500}}, p0=prefill_ok, d0=decode)
    client = await rig.raw()
    await client.send(post(chat(stream=True)) + post(b"x" * 501))
    await rig.seen("d0")
    go.set()
    first = await client.response()
    assert (first.status, first.clean) == (200, True)
    assert (await client.response()).status == 413
    assert await client.closed()
    await rig.idle()


async def test_garbage_behind_a_good_request_does_not_spoil_it(start: Start) -> None:
    rig = await start()
    client = await rig.raw()
    await client.send(post(chat(stream=True)) + b"\x16\x03\x01 not http\r\n\r\n")
    answer = await client.response()
    assert (answer.status, answer.clean) == (200, True)
    assert await client.closed()
    await rig.idle()


@pytest.mark.parametrize(
    ("version", "extra"), [("1.0", ""), ("1.1", "connection: close\r\n"), ("1.0", "expect: 100-continue\r\n")]
)
async def test_clients_that_want_the_connection_closed(start: Start, version: str, extra: str) -> None:
    rig = await start()
    client = await rig.raw()
    await client.send(post(chat(), extra, version=version))
    answer = await client.response()
    assert (answer.status, answer.header("connection")) == (200, "close")
    assert await client.closed()
    await rig.idle()


async def test_expect_continue(start: Start) -> None:
    rig = await start()
    client = await rig.raw()
    for _ in range(2):
        request = post(chat(), "expect: 100-continue\r\n")
        at = request.index(b"\r\n\r\n") + 4
        await client.send(request[:at])
        assert (await client.head())[0] == 100
        await client.send(request[at:])
        assert (await client.response()).status == 200
    await rig.idle()


async def test_expect_continue_behind_another_request(start: Start) -> None:
    rig = await start()
    client = await rig.raw()
    request = post(chat(), "expect: 100-continue\r\n")
    at = request.index(b"\r\n\r\n") + 4
    await client.send(post(chat()) + request[:at])
    assert (await client.response()).status == 200
    assert (await client.head())[0] == 100
    await client.send(request[at:])
    assert (await client.response()).status == 200
    await rig.idle()


async def test_byte_by_byte(start: Start) -> None:
    rig = await start()
    client = await rig.raw()
    for byte in post(chat(stream=True)):
        await client.send(bytes([byte]))
        await asyncio.sleep(0)
    answer = await client.response()
    assert (answer.status, answer.clean) == (200, True)
    await rig.idle()


SLOW = {"timeouts": {"client_body_s": 0.1}}


@pytest.mark.parametrize("before", [b"", post(chat())])
@pytest.mark.parametrize("cut", [10, 60, -3])
async def test_a_sender_that_stalls_is_closed(start: Start, cut: int, before: bytes) -> None:
    """In its head or its body, also behind a request that was answered."""
    rig = await start(dict(SLOW))
    client = await rig.raw()
    await client.send(before + post(chat())[:cut])
    if before:
        assert (await client.response()).status == 200
    async with asyncio.timeout(2):
        assert await client.closed()
    await rig.idle()


async def test_a_long_answer_is_not_the_next_senders_delay(start: Start) -> None:
    """The limit on the next request's body does not run while this one is being answered."""

    async def decode(seen: Seen) -> None:
        await asyncio.sleep(0.7)
        await decode_stream(seen)

    rig = await start({"timeouts": {"client_body_s": 0.3}}, p0=prefill_ok, d0=decode)
    client = await rig.raw()
    second = post(chat())
    await client.send(second + second[:50])
    assert (await client.response()).status == 200
    await client.send(second[50:])
    assert (await client.response()).status == 200
    await rig.idle()


async def test_idle_clients_are_closed_and_busy_ones_are_not(start: Start) -> None:
    rig = await start({"timeouts": {"client_keepalive_s": 0.6}}, p0=prefill_ok, d0=_slow_decode)
    idle, busy = await rig.raw(), await rig.raw()
    half = post(chat())
    await busy.send(half[:20])
    await asyncio.sleep(0)
    await busy.send(half[20:])
    async with asyncio.timeout(4):
        assert await idle.closed()
    assert (await busy.response()).status == 200
    await rig.idle()


async def _slow_decode(seen: Seen) -> None:
    await asyncio.sleep(2.5)
    await decode_stream(seen)


async def test_an_endless_head_is_cut_off(start: Start) -> None:
    rig = await start()
    client = await rig.raw()
    await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nx: ")
    with pytest.raises((ConnectionError, asyncio.TimeoutError)):  # noqa: PT012 - whichever write meets the end
        async with asyncio.timeout(5):
            while True:
                await client.send(b"y" * 4000)
                await asyncio.sleep(0.001)
    assert (await rig.chat()).status_code == 200
    await rig.idle()


async def test_curls_offer_of_http2_is_passed_over(start: Start) -> None:
    rig = await start()
    client = await rig.raw()
    upgrade = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    await client.send(post(chat(), upgrade))
    assert (await client.response()).status == 200
    assert "http2-settings" not in rig["d0"].seen[0].headers
    assert "upgrade" not in rig["d0"].seen[0].headers
    await rig.idle()


# -------------------------------------------------------------------------------- one meaning only

CHAT_LINE = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n"
EVIL = chat(user="evil")
SMUGGLED = {
    "length and chunks": CHAT_LINE + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + post(EVIL),
    "two lengths": CHAT_LINE + b"content-length: 0\r\ncontent-length: 5\r\n\r\nabcde" + post(EVIL),
    "length with a sign": CHAT_LINE + b"content-length: +5\r\n\r\nabcde" + post(EVIL),
    "length as a list": CHAT_LINE + b"content-length: 5, 5\r\n\r\nabcde" + post(EVIL),
    "space before the colon": CHAT_LINE + b"content-length : 5\r\n\r\nabcde" + post(EVIL),
    "unknown encoding": CHAT_LINE + b"transfer-encoding: chunked, x\r\n\r\n0\r\n\r\n" + post(EVIL),
    "nul in a value": CHAT_LINE + b"x: a\0b\r\ncontent-length: 0\r\n\r\n" + post(EVIL),
    "bare cr in a value": CHAT_LINE + b"x: a\rb: c\r\ncontent-length: 0\r\n\r\n" + post(EVIL),
    "bad chunk size": CHAT_LINE + b"transfer-encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n" + post(EVIL),
    "chunk longer than it says": CHAT_LINE + b"transfer-encoding: chunked\r\n\r\n1\r\n{}\r\n0\r\n\r\n" + post(EVIL),
}  # fmt: skip


async def test_a_request_with_two_meanings_has_none(start: Start) -> None:
    """... and nothing behind it on that connection is looked at."""
    rig = await start()
    for name, data in SMUGGLED.items():
        client = await rig.raw()
        await client.send(data)
        answer = await client.response()
        assert (name, answer.status, answer.header("connection")) == (name, 400, "close")
        assert answer.error["code"] == "invalid_header"
        assert await client.closed()
    assert rig.untouched()
    await rig.idle()


async def test_folded_and_bare_lines_never_reach_a_worker_as_lines(start: Start) -> None:
    rig = await start()
    body = chat()
    for value in (b"a\r\n folded: 1", b"a\n folded: 1", b"a\nfolded: 1"):
        client = await rig.raw()
        await client.send(CHAT_LINE + b"x-try: " + value + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        answer = await client.response()
        assert answer.status in (200, 400)
        client.close()
    for seen in (*rig["p0"].seen, *rig["d0"].seen):
        assert "\n" not in seen.headers.get("x-try", "")
        assert " folded" not in seen.headers
    await rig.idle()


async def test_a_chunked_upload(start: Start) -> None:
    rig = await start()
    client = await rig.raw()
    body = chat()
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:8], body[8:]))
    for _ in range(2):
        await client.send(CHAT_LINE + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\nx-trailer: 1\r\n\r\n")
        assert (await client.response()).status == 200
    seen = rig["p0"].seen[0].headers
    assert "transfer-encoding" not in seen
    assert "x-trailer" not in seen
    await rig.idle()


async def test_prefill_answers_may_be_framed_freely_too(start: Start) -> None:
    async def prefill(seen: Seen) -> None:
        await seen.send(head("transfer-encoding: chunked"))
        for byte in prefill_answer():
            await seen.chunk(bytes([byte]))
        await seen.end_stream()

    rig = await start(p0=prefill, d0=decode_stream)
    assert (await rig.chat()).status_code == 200
    await rig.idle()
