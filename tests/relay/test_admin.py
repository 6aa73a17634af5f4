"""The admin port: who may use it, and calls to workers with what came of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from omni_proxy.config import ConfigError, effective, parse
from tests.relay.conftest import Rig, Start
from tests.relay.scripted import Seen, decode_stream, prefill_ok

TOKEN = "a-long-token"
ADMIN = {"admin": {"port": 0, "token": TOKEN}}


@asynccontextmanager
async def admin(rig: Rig, token: str | None = TOKEN) -> AsyncIterator[httpx.AsyncClient]:
    server = rig.gateway.scheduling.admin
    assert server is not None
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", headers=headers, trust_env=False, timeout=10
    ) as client:
        yield client


def also_controlled(script: Any, status: int = 200) -> Any:
    """A worker that can also be put to sleep."""

    async def worker(seen: Seen) -> None:
        if seen.path.startswith("/v1"):
            await script(seen)
        else:
            await seen.answer(status, b'{"done":true}')

    return worker


async def up(rig: Rig, *names: str) -> None:
    async with asyncio.timeout(5):
        while {w.name for w in rig.gateway.scheduling.workers() if w.up} != set(names):
            await asyncio.sleep(0.01)


async def test_a_call_goes_to_every_worker_and_tells_of_each(start: Start) -> None:
    rig = await start(ADMIN, p0=also_controlled(prefill_ok), d0=also_controlled(decode_stream, 404))
    async with admin(rig) as client:
        answer = await client.post("/reset_prefix_cache?deep=1&x=a%20b", content=b'{"k":1}')
    assert answer.status_code == 502
    said = answer.json()
    assert said["summary"] == {"total": 2, "success": 1, "failed": 1}
    assert [(r["worker"], r["role"], r["ok"], r["status"]) for r in said["results"]] == [
        ("p0", "prefill", True, 200),
        ("d0", "decode", False, 404),
    ]
    assert said["results"][0]["body"] == '{"done":true}'
    seen = rig["p0"].seen[0]
    assert (seen.path, seen.body) in (
        ("/reset_prefix_cache?deep=1&x=a%20b", b'{"k":1}'),
        ("/reset_prefix_cache?deep=1&x=a+b", b'{"k":1}'),
    )
    await up(rig, "p0", "d0")


async def test_who_sleeps_gets_no_work_until_it_was_woken(start: Start) -> None:
    config = ADMIN | {"connector": "aggregated"}
    rig = await start(config, m0=also_controlled(decode_stream), m1=also_controlled(decode_stream))
    async with admin(rig) as client:
        assert (await client.post("/sleep?level=1&worker=m0")).status_code == 200
        assert [s.path for s in rig["m0"].seen] == ["/sleep?level=1"]
        assert not rig["m1"].seen
        await asyncio.sleep(0.2)  # probes say that it answers, and that changes nothing
        for _ in range(3):
            assert (await rig.chat()).status_code == 200
        assert len(rig["m1"].seen) == 3
        workers = (await rig.client.get("/omni/workers")).json()["workers"]
        assert [(w["state"], w["reason"]) for w in workers] == [("down", "sleep was asked for"), ("up", None)]
        assert (await client.post("/wake_up?role=mixed")).status_code == 200
    await up(rig, "m0", "m1")
    await rig.idle()


async def test_who_could_not_be_paused_goes_on(start: Start) -> None:
    rig = await start(ADMIN | {"connector": "aggregated"}, m0=also_controlled(decode_stream, 500))
    async with admin(rig) as client:
        assert (await client.post("/pause")).json()["results"][0]["status"] == 500
    await up(rig, "m0")
    assert (await rig.chat()).status_code == 200


async def test_engines_are_called_by_their_own_names(start: Start) -> None:
    rig = await start(
        ADMIN | {"connector": "sglang"}, p0=also_controlled(prefill_ok), d0=also_controlled(decode_stream)
    )
    async with admin(rig) as client:
        assert (await client.post("/reset_prefix_cache?worker=p0")).status_code == 200
        assert (await client.post("/sleep?worker=p0", content=b'{"tags":["kv_cache"]}')).status_code == 200
    assert [(s.path, s.body) for s in rig["p0"].seen] == [
        ("/flush_cache", b"{}"),
        ("/release_memory_occupation", b'{"tags":["kv_cache"]}'),
    ]


async def test_a_worker_that_cannot_be_reached_is_told_of(start: Start) -> None:
    rig = await start(ADMIN, p0=also_controlled(prefill_ok), d0=also_controlled(decode_stream))
    await rig["d0"].stop()
    async with admin(rig) as client:
        results = (await client.post("/resume")).json()["results"]
    assert [(r["worker"], r["ok"], r["status"]) for r in results] == [("p0", True, 200), ("d0", False, None)]
    assert "cannot be reached" in results[1]["body"]


async def test_only_who_shows_the_token_comes_in(start: Start) -> None:
    rig = await start(ADMIN, m0=also_controlled(decode_stream))
    for token in (None, "x", "wrong", TOKEN + "x"):
        async with admin(rig, token) as client:
            for path in ("/sleep", "/nowhere"):
                answer = await client.post(path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
    assert rig.untouched()
    for path in ("/sleep", "/pause", "/reset_prefix_cache"):  # never on the clients' port
        answer = await rig.client.post(path, headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 404


async def test_wrong_choices_are_named(start: Start) -> None:
    rig = await start(ADMIN, m0=also_controlled(decode_stream))
    async with admin(rig) as client:
        for path, status, param in (
            ("/sleep?worker=m9", 404, "worker"),
            ("/sleep?role=baker", 400, "role"),
            ("/collective_rpc", 404, None),
        ):
            answer = await client.post(path)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        assert (await client.get("/sleep")).status_code == 405
    assert rig.untouched()


def test_an_open_port_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="token"):
        parse({"admin": {"host": "0.0.0.0", "port": 9000}}, "x")
    with pytest.raises(ConfigError, match="port"):
        parse({"admin": {}}, "x")
    assert parse({"admin": {"port": 9000}}, "x").admin is not None
    assert TOKEN not in effective(parse({"admin": {"port": 1, "token": TOKEN}}, "x"))
