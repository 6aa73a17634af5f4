"""Every protocol, seen from its workers: exact bytes, who is asked first, and what becomes of each failure."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any
from urllib.parse import urlsplit

import pytest

from omni_proxy.workers.connectors.registry import CONNECTORS
from tests.connectors.conftest import Begin, Pair
from tests.connectors.protocols import PROTOCOLS, Protocol
from tests.relay.scripted import DONE, Script, Seen, decode_answer, event

BODY = (
    b'{"model":"m", "messages":[{"role":"user","content":"h\\u0069"}],"x_vendor":{"b":[1,2.50],"a":null},'
    b'"max_tokens":5,"min_tokens":2,"seed":9223372036854775807,"stop":["."]%b}'
)
HEADERS = {"content-type": "application/json", "x-request-id": "rid-1"}
TO_PREFILL = (
    b'{"model":"m","messages":[{"role":"user","content":"h\\u0069"}],"x_vendor":{"b":[1,2.50],"a":null},'
    b'"max_tokens":1,"seed":9223372036854775807,"stream":false,"ignore_eos":true'
)
PATIENCE = {"timeouts": {"first_byte_s": 0.6}, "retries": {"max": 0}}
NO_RETRY = {"retries": {"max": 0}}


def test_every_connector_with_a_handoff_is_here() -> None:
    assert {p.connector for p in PROTOCOLS.values()} == set(CONNECTORS) - {"aggregated"}


async def ask(pair: Pair, extra: bytes = b"", headers: dict[str, str] | None = None) -> Any:
    sent = HEADERS | (headers or {})
    return await pair.rig.client.post("/v1/chat/completions", content=BODY % extra, headers=sent)


def matches(pattern: bytes, body: bytes, pair: Pair) -> dict[str, bytes]:
    """Check a body against a pattern; the parts that have names."""
    port = str(urlsplit(pair.rig.gateway.front.edge.starter.callback_url).port).encode()
    pattern = pattern.replace(b"{b}", str(pair.bootstrap.port).encode()).replace(b"{c}", port)
    found = re.fullmatch(pattern, body)
    assert found is not None, (pattern, body)
    return found.groupdict()


def tail(extra: bytes) -> bytes:
    return b"," + extra if extra else b""


async def test_exact_bytes_and_order(begin: Begin, protocol: Protocol) -> None:
    pair: Pair = await begin(protocol)
    response = await ask(pair)
    assert (response.status_code, response.content) == (200, decode_answer().replace(b": 9}", b":9}"))
    assert response.headers["x-request-id"] == "rid-1"
    p, d = pair.rig["p0"].seen[0], pair.rig["d0"].seen[0]
    assert (p.path, d.path) == ("/v1/chat/completions", "/v1/chat/completions")
    if protocol.whole_body_to_prefill:
        assert p.json == d.json | {"stream": False}
        mine = {"room": str(p.json["bootstrap_room"]).encode()}
    else:
        mine = matches(re.escape(TO_PREFILL) + tail(protocol.prefill) + rb"\}", p.body, pair)
    theirs = matches(re.escape(BODY[:-3]) + tail(protocol.decode) + rb"\}", d.body, pair)
    if "room" in theirs:
        assert mine["room"] == theirs["room"]
    ids = p.headers["x-request-id"], d.headers["x-request-id"]
    assert ids[0] == ids[1]
    assert re.fullmatch(protocol.request_id, ids[0])
    if "id" in theirs:
        assert theirs["id"].decode() == ids[1]
    if protocol.first:
        assert pair.asked[0] == protocol.first
    assert sorted(pair.asked) == ["d0", "p0"]
    await pair.rig.idle()


async def test_no_two_requests_share_a_key(begin: Begin, protocol: Protocol) -> None:
    """The client's id may come twice; what KV is found by may not."""
    pair: Pair = await begin(protocol)
    await asyncio.gather(ask(pair), ask(pair))
    if not protocol.together:
        return
    bodies = [_keys(seen) for seen in pair.rig["d0"].seen]
    assert len(bodies) == 2
    assert bodies[0] != bodies[1]


def _keys(seen: Seen) -> tuple[Any, ...]:
    body = seen.json
    params = body.get("kv_transfer_params", {})
    return body.get("bootstrap_room"), params.get("transfer_id"), seen.headers["x-request-id"]


async def test_streams_are_relayed(begin: Begin, protocol: Protocol) -> None:
    pair: Pair = await begin(protocol)
    response = await ask(pair, b',"stream":true,"stream_options":{"include_usage":true}')
    assert response.headers["content-type"].startswith("text/event-stream")
    assert [part in response.text for part in ('"Hel"', '"lo"', "[DONE]")] == [True] * 3
    p, d = pair.rig["p0"].seen[0].json, pair.rig["d0"].seen[0].json
    assert p["stream"] is False
    assert "stream_options" not in p
    assert (d["stream"], d["stream_options"]) == (True, {"include_usage": True})
    await pair.rig.idle()


async def test_what_is_internal_is_not_taken_from_clients(begin: Begin, protocol: Protocol) -> None:
    pair: Pair = await begin(protocol)
    forged = (
        b',"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"evil"},"bootstrap_host":"evil",'
        b'"bootstrap_room":424242424242,"bootstr\\u0061p_port":424242424242,"routed_dp_rank":424242424242,"disagg_prefill_dp_rank":424242424242,'
        b'"data_parallel_rank":424242424242,"ec_transfer_params":{"evil":1},"rid":"evil"'
    )
    headers = {
        "x-data-parallel-rank": "424242424242",
        "x-prefiller-host-port": "evil:1",
        "X-Prefiller-Url": "http://evil",
    }
    response = await ask(pair, forged, headers)
    assert response.status_code == 200
    for seen in (pair.rig["p0"].seen[0], pair.rig["d0"].seen[0]):
        told = seen.body + repr(seen.headers).encode()
        assert b"evil" not in told
        assert b"424242424242" not in told


async def test_the_client_finds_its_own_id_in_the_answer(begin: Begin, protocol: Protocol) -> None:
    """Engines make the answer's id from the request's, which may be one that is not for clients."""

    async def d(seen: Seen) -> None:
        name = json.dumps("chatcmpl-" + seen.headers["x-request-id"]).encode()
        if not seen.json.get("stream"):
            await seen.answer(200, decode_answer().replace(b'"chatcmpl-d"', name))
            return
        await seen.open_stream()
        whole = b"".join([event(text).replace(b'"chatcmpl-d"', name) for text in ("a", "b")])
        for at in range(0, len(whole), 7):
            await seen.chunk(whole[at : at + 7])
        await seen.chunk(DONE)
        await seen.end_stream()

    pair: Pair = await begin(protocol, d=protocol.decode_script(d))
    assert (await ask(pair)).json()["id"] == "chatcmpl-rid-1"
    response = await ask(pair, b',"stream":true')
    ids = [json.loads(line[6:])["id"] for line in response.text.split("\n") if line.startswith("data: {")]
    assert ids == ["chatcmpl-rid-1"] * 2


# ------------------------------------------------------------------------------------ failures


async def refuse(seen: Seen) -> None:
    await seen.answer(400, b'{"error":{"message":"too long","type":"x","param":null,"code":400}}')


async def break_down(seen: Seen) -> None:
    await seen.answer(500, b'{"error":{"message":"broken","type":"x","param":null,"code":500}}')


async def close(seen: Seen) -> None:
    seen.reset()


async def hang(seen: Seen) -> None:
    await asyncio.wait_for(seen.gone.wait(), 5)


FAILURES: list[tuple[Script, int]] = [(refuse, 400), (break_down, 500), (close, 502), (hang, 504)]


@pytest.mark.parametrize(("fail", "status"), FAILURES, ids=["400", "500", "closes", "hangs"])
async def test_a_failing_prefill_ends_the_request(begin: Begin, protocol: Protocol, fail: Script, status: int) -> None:
    """D is not asked after it; where it was asked before, it is let go at once and what it says counts for nothing."""
    pair: Pair = await begin(
        protocol, p=fail, d=protocol.decode_script(hang), **(PATIENCE if fail is hang else NO_RETRY)
    )
    response = await ask(pair)
    assert response.status_code == status
    if status in (400, 500):
        assert b"too long" in response.content or b"broken" in response.content
    if protocol.together and protocol.first != "p0":
        async with asyncio.timeout(2):
            await pair.rig["d0"].seen[0].gone.wait()
    else:
        assert not pair.rig["d0"].seen
    await pair.rig.idle()


@pytest.mark.parametrize(("fail", "status"), FAILURES, ids=["400", "500", "closes", "hangs"])
async def test_a_failing_decode_ends_the_request(begin: Begin, protocol: Protocol, fail: Script, status: int) -> None:
    pair: Pair = await begin(protocol, d=protocol.decode_script(fail), **(PATIENCE if fail is hang else NO_RETRY))
    response = await ask(pair)
    assert response.status_code == status
    assert len(pair.rig["d0"].seen) == 1
    await pair.rig.idle()


async def ended(pair: Pair, *names: str) -> None:
    """Every one of these legs was ended as its engine understands it, and no other one."""
    for name in names:
        await asyncio.wait_for(pair.rig[name].seen[0].gone.wait(), 20)
    if pair.protocol.abort is None:
        assert not pair.aborted
        return
    path, body = pair.protocol.abort
    async with asyncio.timeout(20):
        while len(pair.aborted) < len(names):
            await asyncio.sleep(0.002)
    calls = {name: (call.path, call.body.decode()) for name, call in pair.aborted}
    ids = {name: pair.rig[name].seen[0].headers["x-request-id"] for name in names}
    assert calls == {name: (path, body.replace("@", ids[name])) for name in names}


async def test_each_leg_of_a_client_that_leaves_ends_as_its_engine_understands_it(
    begin: Begin, protocol: Protocol
) -> None:
    """P hangs; where D is asked beside it, D hangs as well."""
    pair: Pair = await begin(protocol, p=hang, d=protocol.decode_script(hang))
    task = asyncio.create_task(ask(pair))
    await pair.rig.seen("p0")
    names = ["p0"]
    if protocol.together and protocol.first != "p0":
        await pair.rig.seen("d0")
        names.append("d0")
    task.cancel()
    await ended(pair, *names)
    await pair.rig.idle()


@pytest.mark.parametrize(("fails", "other"), [("p0", "d0"), ("d0", "p0")])
async def test_the_other_leg_ends_as_its_engine_understands_it(
    begin: Begin, protocol: Protocol, fails: str, other: str
) -> None:
    """Both run together and one of them fails: nobody will meet the other one."""
    if not protocol.together or protocol.first:
        pytest.skip("its legs do not run together")
    begun = asyncio.Event()

    async def refuse_then(seen: Seen) -> None:
        await begun.wait()
        await refuse(seen)

    async def hang_on(seen: Seen) -> None:
        begun.set()
        await seen.gone.wait()

    scripts = {fails[0]: refuse_then, other[0]: hang_on}
    pair: Pair = await begin(protocol, **scripts, **NO_RETRY)
    assert (await ask(pair)).status_code == 400
    await ended(pair, other)
    await pair.rig.idle()


async def test_a_leg_that_takes_too_long_ends_as_its_engine_understands_it(begin: Begin, protocol: Protocol) -> None:
    if protocol.abort is None:
        pytest.skip("closing the connection is all")
    pair: Pair = await begin(protocol, p=hang, d=hang, **PATIENCE)
    assert (await ask(pair)).status_code == 504
    await ended(pair, "p0", "d0")


async def test_legs_that_end_by_themselves_are_not_aborted(begin: Begin, protocol: Protocol) -> None:
    pair: Pair = await begin(protocol)
    await ask(pair)
    await ask(pair, b',"stream":true')
    await pair.rig.idle()
    await asyncio.sleep(0)
    assert not pair.aborted


async def test_a_client_that_leaves_ends_both_legs(begin: Begin, protocol: Protocol) -> None:
    pair: Pair = await begin(protocol, p=hang, d=protocol.decode_script(hang))
    task = asyncio.create_task(ask(pair))
    await pair.rig.seen("p0")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(2):
        for worker in pair.rig.workers.values():
            for seen in worker.seen:
                await seen.gone.wait()
    await pair.rig.idle()
