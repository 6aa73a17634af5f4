"""Workers register themselves at a running gateway, live by their heartbeats, and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from omni_proxy.config import ConfigError, effective, parse
from omni_proxy.workers.register import Registration
from tests.relay.conftest import Rig, Start
from tests.relay.scripted import ScriptedWorker, decode_stream

TOKEN = "token-of-workers"


def config(expire_s: float = 15.0) -> dict[str, Any]:
    registration = {"port": 0, "token": TOKEN, "expire_s": expire_s}
    return {"connector": "aggregated", "discovery": {"registration": registration}}


def url_of(rig: Rig) -> str:
    server = rig.gateway.scheduling.registration
    assert server is not None
    return f"http://127.0.0.1:{server.port}"


@contextlib.asynccontextmanager
async def another() -> AsyncIterator[tuple[ScriptedWorker, dict[str, object]]]:
    worker = ScriptedWorker(decode_stream)
    await worker.start()
    url = f"http://127.0.0.1:{worker.port}"
    yield worker, {"name": "r0", "url": url, "role": "mixed", "connector": "aggregated"}
    await worker.stop()


async def names(rig: Rig, *wanted: str) -> None:
    async with asyncio.timeout(10):
        while {w.spec.name for w in rig.gateway.scheduling.workers() if w.up and not w.draining} != set(wanted):
            await asyncio.sleep(0.01)


async def test_who_registers_works_until_he_says_goodbye(start: Start, tmp_path: Path) -> None:
    rig = await start(config(expire_s=0.6), m0=decode_stream)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    async with another() as (worker, fields):
        task = asyncio.create_task(Registration([url_of(rig)], token, fields).run())
        await names(rig, "m0", "r0")
        await asyncio.sleep(1.0)  # longer than it may be silent
        await names(rig, "m0", "r0")
        for _ in range(4):
            assert (await rig.chat()).status_code == 200
        assert worker.seen
        sources = (await rig.client.get("/omni/workers")).json()["sources"]
        assert [(s["name"], s["workers"], s["fault"]) for s in sources] == [("registered", 1, None)]
        assert 'omni_discovery_workers{source="registered"} 1.0' in (await rig.client.get("/metrics")).text
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await names(rig, "m0")


async def test_who_falls_silent_drains(start: Start) -> None:
    rig = await start(config(expire_s=0.5), m0=decode_stream)
    async with another() as (_, fields), httpx.AsyncClient(trust_env=False) as client:
        headers = {"authorization": f"Bearer {TOKEN}"}
        answer = await client.post(f"{url_of(rig)}/omni/register", json=fields, headers=headers)
        assert answer.json() == {"worker": "r0", "changed": True, "again_in_s": pytest.approx(0.5 / 3)}
        answer = await client.post(f"{url_of(rig)}/omni/register", json=fields, headers=headers)
        assert answer.json()["changed"] is False
        await names(rig, "m0", "r0")
        await names(rig, "m0")


async def test_who_must_not_register_is_told_why(start: Start) -> None:
    rig = await start(config(), m0=decode_stream)
    good = {"name": "r0", "url": "http://127.0.0.1:1", "role": "mixed"}
    cases: list[tuple[object, int, str]] = [
        (good | {"role": "baker"}, 400, "role"),
        (good | {"url": "http://127.0.0.1:8000"}, 400, "this gateway's own address"),
        (good | {"name": "r1"}, 400, "r0 at http://127.0.0.1:1 has registered already"),
        (good | {"url": "http://127.0.0.1:2"}, 400, "has registered already"),
        ([good], 400, "object"),
        ("x" * 70_000, 413, "65536"),
    ]
    async with httpx.AsyncClient(base_url=url_of(rig), trust_env=False) as client:
        for token in (None, "wrong"):
            headers = {} if token is None else {"authorization": f"Bearer {token}"}
            assert (await client.post("/omni/register", json=good, headers=headers)).status_code == 401
        client.headers["authorization"] = f"Bearer {TOKEN}"
        assert (await client.post("/omni/register", json=good)).status_code == 200
        for body, status, said in cases:
            answer = await client.post("/omni/register", json=body)
            assert answer.status_code == status, body
            assert said in answer.json()["error"]["message"]
        assert (await client.post("/omni/register", content=b"{")).json()["error"]["code"] == "invalid_json"
        assert (await client.delete("/omni/register/r9")).json()["changed"] is False
        assert (await client.post("/sleep")).status_code == 404, "operators' routes are not here"


async def test_a_gateway_that_refuses_or_is_away_is_asked_again(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("omni_proxy.workers.register._RETRY_S", 0.05)
    rig = await start(config(), m0=decode_stream)
    token = tmp_path / "token"
    token.write_text("not-the-token")
    async with another() as (_, fields):
        task = asyncio.create_task(Registration(["http://127.0.0.1:1", url_of(rig)], token, fields).run())
        async with asyncio.timeout(5):
            while "status 401" not in caplog.text or "ConnectError" not in caplog.text:
                await asyncio.sleep(0.01)
        token.write_text(TOKEN)
        await names(rig, "m0", "r0")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert caplog.text.count("status 401") == 1, "trouble is told once"


def test_an_open_port_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="token"):
        parse({"discovery": {"registration": {"host": "0.0.0.0", "port": 1}}}, "x")
    assert TOKEN not in effective(parse({"discovery": {"registration": {"port": 1, "token": TOKEN}}}, "x"))
