"""A decode worker that goes first and asks for its prefill: in time, late, twice, for nobody, and not at all."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest

from omni_proxy.api import callbacks
from omni_proxy.config import ConfigError, parse
from tests.connectors.conftest import Begin, Pair
from tests.connectors.protocols import PROTOCOLS, ask, asking, post
from tests.connectors.test_contract import PATIENCE
from tests.connectors.test_contract import ask as request
from tests.relay.scripted import Seen, decode_stream

LAYERWISE = PROTOCOLS["ascend-layerwise-parallel"]


def place(pair: Pair) -> tuple[str, int]:
    url = urlsplit(pair.rig.gateway.front.edge.starter.callback_url)
    assert url.hostname is not None
    assert url.port is not None
    return url.hostname, url.port


async def test_prefill_waits_for_the_call(begin: Begin) -> None:
    async def d(seen: Seen) -> None:
        await asyncio.sleep(0.05)
        asked.append(list(pair.asked))
        assert await ask(seen) == (200, {"status": "ok"})
        await decode_stream(seen)

    asked: list[list[str]] = []
    pair: Pair = await begin(LAYERWISE, d=d)
    assert (await request(pair)).status_code == 200
    assert asked == [["d0"]]
    assert pair.asked == ["d0", "p0"]
    said = pair.rig["p0"].seen[0].json["kv_transfer_params"]
    assert (said["remote_engine_id"], said["remote_block_ids"], said["do_remote_decode"]) == ("D0", [[5]], True)


async def test_the_id_of_a_completion(begin: Begin) -> None:
    async def d(seen: Seen) -> None:
        assert (await ask(seen, f"cmpl-{seen.headers['x-request-id']}-0"))[0] == 200
        await decode_stream(seen)

    pair: Pair = await begin(LAYERWISE, d=d)
    response = await pair.rig.client.post("/v1/completions", json={"model": "m", "prompt": "hi"})
    assert response.status_code == 200
    assert pair.rig["p0"].seen[0].path == "/v1/completions"


async def test_asking_twice_computes_once(begin: Begin) -> None:
    async def d(seen: Seen) -> None:
        assert [await ask(seen), await ask(seen)] == [(200, {"status": "ok"})] * 2
        await decode_stream(seen)
        assert (await ask(seen))[0] in (200, 404)

    pair: Pair = await begin(LAYERWISE, d=d)
    assert (await request(pair)).status_code == 200
    await pair.rig.idle()
    assert len(pair.rig["p0"].seen) == 1


async def test_ids_that_nobody_waits_for(begin: Begin) -> None:
    """Also the client's own: whoever knows it must not be able to direct the KV of its request."""

    async def d(seen: Seen) -> None:
        for wrong in ("chatcmpl-rid-1", "rid-1", "chatcmpl-nobody", "", "chatcmpl-" + "x" * 5000):
            status, answer = await ask(seen, wrong)
            assert (status, answer["error"]["param"]) == (404, "request_id")
        assert not pair.rig["p0"].seen
        assert (await ask(seen))[0] == 200
        await decode_stream(seen)

    pair: Pair = await begin(LAYERWISE, d=d)
    assert (await request(pair)).status_code == 200


async def test_a_late_call(begin: Begin) -> None:
    """The request has ended meanwhile: P is not asked, and D hears that nobody waits."""

    async def d(seen: Seen) -> None:
        seen_ids.append(seen)
        await seen.gone.wait()

    seen_ids: list[Seen] = []
    pair: Pair = await begin(LAYERWISE, d=d, **PATIENCE)
    response = await request(pair)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "worker_timeout")
    assert (await ask(seen_ids[0]))[0] == 404
    assert not pair.rig["p0"].seen
    await pair.rig.idle()


async def test_a_decode_that_begins_its_answer_and_never_asks(begin: Begin) -> None:
    """The head of an answer is no sign of life: some engines send it at once."""

    async def d(seen: Seen) -> None:
        await seen.open_stream()
        await seen.gone.wait()

    pair: Pair = await begin(LAYERWISE, d=d, **PATIENCE)
    assert (await request(pair, b',"stream":true')).status_code == 504
    assert not pair.rig["p0"].seen
    await pair.rig.idle()


async def test_a_decode_that_needs_no_prefill(begin: Begin) -> None:
    """It has the whole prompt cached and answers without asking."""
    pair: Pair = await begin(LAYERWISE, d=decode_stream)
    for extra in (b"", b',"stream":true'):
        response = await request(pair, extra)
        assert response.status_code == 200
        assert "Hel" in response.text
    assert not pair.rig["p0"].seen
    await pair.rig.idle()


async def test_a_decode_that_refuses_before_it_asks(begin: Begin) -> None:
    async def d(seen: Seen) -> None:
        await seen.answer(400, b'{"error":{"message":"no such template"}}')

    pair: Pair = await begin(LAYERWISE, d=d)
    response = await request(pair)
    assert (response.status_code, response.json()["error"]["message"]) == (400, "no such template")
    assert not pair.rig["p0"].seen
    await pair.rig.idle()


async def test_another_pair_after_a_decode_that_cannot_be_reached(begin: Begin) -> None:
    """The second attempt has an id of its own."""
    ids: list[str] = []

    async def d(seen: Seen) -> None:
        ids.append(seen.headers["x-request-id"])
        if len(ids) == 1:
            await seen.answer(503, b"{}")
            return
        assert (await ask(seen, f"chatcmpl-{ids[0]}"))[0] == 404
        assert (await ask(seen))[0] == 200
        await decode_stream(seen)

    pair: Pair = await begin(LAYERWISE, d=d)
    assert (await request(pair)).status_code == 200
    assert ids[0] != ids[1]
    assert len(pair.rig["p0"].seen) == 1


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/metaserver", b"{", 400),
        ("POST", "/v1/metaserver", b"[]", 400),
        ("POST", "/v1/metaserver", b'{"request_id":5}', 400),
        ("POST", "/v1/metaserver", b'{"remote_host":"x"}', 400),
        ("POST", "/v1/metaserver", b'{"request_id":"\xff"}', 400),
        ("GET", "/v1/metaserver", b"", 405),
        ("POST", "/v1/chat/completions", b"{}", 404),
        ("POST", "/v1/metaserver", b" " * 200, 413),
    ],
)
async def test_what_is_no_call(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: bytes, status: int
) -> None:
    monkeypatch.setattr(callbacks, "MAX_BODY_BYTES", 100)
    pair: Pair = await begin(LAYERWISE)
    answered, answer = await post(*place(pair), path, body, method)
    assert (answered, "message" in answer["error"]) == (status, True)


async def test_what_is_no_http_ends_the_connection(begin: Begin) -> None:
    pair: Pair = await begin(LAYERWISE)
    reader, writer = await asyncio.open_connection(*place(pair))
    writer.write(b"\x16\x03\x01\x00\r\n\r\n")
    assert (await asyncio.wait_for(reader.read(), 2)).startswith(b"HTTP/1.1 400")
    writer.close()


def test_ids_of_engines() -> None:
    assert callbacks.ids_of("chatcmpl-a-1")[0] == b"a-1"
    assert b"a-1" in callbacks.ids_of("cmpl-a-1-0")
    assert asking("x")


def test_a_config_without_a_place_to_listen() -> None:
    worker = {"name": "d0", "url": "http://h:1", "role": "decode", "connector": "ascend-layerwise"}
    for more, fault in (
        ({}, "'callbacks' is needed for the connector ascend-layerwise of d0"),
        ({"callbacks": {"host": "0.0.0.0"}}, "callbacks: 'host' must be an address that workers can reach"),
        ({"callbacks": {"host": "h", "port": 9}, "processes": 2}, "'callbacks.port' must be 0"),
    ):
        with pytest.raises(ConfigError, match=fault):
            parse({"workers": [worker], **more}, "c")
