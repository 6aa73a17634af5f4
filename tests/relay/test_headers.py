"""Which headers pass, which stay, and which are made here."""

from __future__ import annotations

import pytest

from tests.relay.conftest import Rig, Start
from tests.relay.raw import Response, chat, post
from tests.relay.scripted import Seen, decode_answer, decode_stream, prefill_ok


async def ask(rig: Rig, extra: str, **fields: object) -> Response:
    client = await rig.raw()
    await client.send(post(chat(**fields), extra))
    return await client.response()


def seen_by(rig: Rig, name: str = "d0") -> dict[str, str]:
    return rig[name].seen[-1].headers


async def test_what_is_about_the_connection_stays_here(start: Start) -> None:
    rig = await start()
    await ask(
        rig,
        "connection: keep-alive, X-Private , x-other\r\nkeep-alive: timeout=5\r\nx-private: 1\r\nX-Other: 2\r\n"
        "te: trailers\r\nproxy-authorization: Basic eA==\r\nproxy-connection: keep-alive\r\ntrailer: x\r\n"
        "accept-encoding: gzip\r\nx-kept: 3\r\n",
    )
    for leg in ("p0", "d0"):
        headers = seen_by(rig, leg)
        assert headers["x-kept"] == "3"
        gone = {"connection", "keep-alive", "x-private", "x-other", "te", "proxy-authorization", "proxy-connection"}
        assert not (gone | {"trailer", "accept-encoding", "transfer-encoding"}) & headers.keys()
    await rig.idle()


async def test_control_headers_of_workers_are_not_a_clients_to_send(start: Start) -> None:
    rig = await start()
    control = ["x-data-parallel-rank", "x-prefiller-host-port", "x-prefiller-url", "x-encoder-hosts-ports"]
    await ask(rig, "".join(f"{name}: 1\r\n" for name in control))
    for leg in ("p0", "d0"):
        assert not set(control) & seen_by(rig, leg).keys()


async def test_what_workers_get_to_know_of_the_client(start: Start) -> None:
    rig = await start()
    await ask(
        rig,
        "x-forwarded-for: 10.0.0.1, 10.0.0.2\r\nx-forwarded-proto: https\r\ntraceparent: 00-a-b-01\r\n"
        "tracestate: v=1\r\nx-session-id: s\r\nuser-agent: u\r\n",
    )
    for leg in ("p0", "d0"):
        headers = seen_by(rig, leg)
        assert headers["x-forwarded-for"] == "10.0.0.1, 10.0.0.2, 127.0.0.1"
        passed = {"x-forwarded-proto": "https", "traceparent": "00-a-b-01", "tracestate": "v=1", "x-session-id": "s"}
        assert passed.items() <= headers.items()
        assert headers["host"] == f"127.0.0.1:{rig[leg].port}"
        assert headers["content-type"] == "application/json"
        assert headers["content-length"] == str(len(rig[leg].seen[-1].body))
    await rig.idle()


async def test_several_sources_of_one_client_become_one_line(start: Start) -> None:
    rig = await start()
    await ask(rig, "x-forwarded-for: 10.0.0.1\r\nx-forwarded-for: 10.0.0.2\r\n")
    assert seen_by(rig)["x-forwarded-for"] == "10.0.0.1, 10.0.0.2, 127.0.0.1"


async def test_the_clients_key_goes_through_unless_workers_have_their_own(start: Start) -> None:
    rig = await start({"each": {"p0": {"api_key": "ours"}}})
    await ask(rig, "Authorization: Bearer theirs\r\nx-authorization: other\r\n")
    assert seen_by(rig, "p0")["authorization"] == "Bearer ours"
    assert seen_by(rig, "d0")["authorization"] == "Bearer theirs"
    assert seen_by(rig, "p0")["x-authorization"] == "other"
    await ask(rig, "")
    assert seen_by(rig, "p0")["authorization"] == "Bearer ours"
    assert "authorization" not in seen_by(rig, "d0")


@pytest.mark.parametrize("given", ["mine-1", "a" * 128, "x:y/z?{}"])
async def test_a_clients_request_id_is_kept(start: Start, given: str) -> None:
    rig = await start()
    answer = await ask(rig, f"X-Request-Id: {given}\r\n")
    assert answer.header("x-request-id") == given
    assert seen_by(rig, "p0")["x-request-id"] == seen_by(rig, "d0")["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a" * 129, "a b", "t\tab", "\u00e9"])
async def test_an_id_that_cannot_be_used_is_replaced(start: Start, given: str) -> None:
    rig = await start()
    answers = [await ask(rig, f"x-request-id: {given}\r\n") for _ in range(2)]
    ids = [answer.header("x-request-id") for answer in answers]
    assert given not in ids
    assert len(set(ids)) == 2
    assert seen_by(rig)["x-request-id"] == ids[1]


async def test_what_a_worker_says_about_its_connection_stays_here(start: Start) -> None:
    async def decode(seen: Seen) -> None:
        await seen.answer(
            200,
            decode_answer(),
            extra="connection: keep-alive, x-private\r\nx-private: 1\r\nkeep-alive: timeout=5\r\nserver: uvicorn\r\n"
            "date: Mon\r\nx-request-id: theirs\r\nset-cookie: a=1\r\nset-cookie: b=2\r\nx-kept: 3\r\n"
            "proxy-authenticate: Basic\r\nx-accel-buffering: yes\r\n",
        )

    rig = await start(p0=prefill_ok, d0=decode)
    answer = await ask(rig, "x-request-id: mine\r\n")
    names = [name for name, _ in answer.headers]
    assert not {"connection", "x-private", "keep-alive", "server", "date", "proxy-authenticate"} & set(names)
    assert [value for name, value in answer.headers if name == "set-cookie"] == ["a=1", "b=2"]
    assert answer.header("x-kept") == "3"
    assert names.count("x-request-id") == names.count("content-length") == names.count("content-type") == 1
    assert answer.header("x-request-id") == "mine"
    await rig.idle()


async def test_streams_say_that_they_are_not_to_be_buffered(start: Start) -> None:
    """Faults S3 and S4: nginx in front holds 16 KB back unless it is told."""

    async def decode(seen: Seen) -> None:
        if not seen.json.get("stream"):
            await seen.answer(200, decode_answer(), "application/json; charset=utf-8")
            return
        await decode_stream(seen)

    rig = await start(p0=prefill_ok, d0=decode)
    stream = await ask(rig, "", stream=True)
    assert stream.header("x-accel-buffering") == "no"
    assert stream.header("cache-control") == "no-cache"
    assert stream.header("content-type") == "text/event-stream; charset=utf-8"
    assert stream.header("content-length") is None
    whole = await ask(rig, "")
    assert whole.header("content-type") == "application/json; charset=utf-8"
    assert whole.header("x-accel-buffering") is None


async def test_a_workers_own_cache_control_does_not_double(start: Start) -> None:
    async def decode(seen: Seen) -> None:
        await seen.open_stream("cache-control: no-store\r\nx-accel-buffering: no\r\n")
        await seen.chunk(b"data: [DONE]\n\n")
        await seen.end_stream()

    rig = await start(p0=prefill_ok, d0=decode)
    answer = await ask(rig, "", stream=True)
    names = [name for name, _ in answer.headers]
    assert names.count("cache-control") == names.count("x-accel-buffering") == 1
