"""The page's routes: who sees what, what events tell, and that nobody pays while nobody looks."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from omni_proxy.observe.expert_loads import ExpertReading
from omni_proxy.ui.feed import MAX_LISTENERS
from tests.relay.conftest import Rig, Start
from tests.relay.scripted import decode_stream, prefill_ok
from tests.ui.conftest import ADMIN, TOKEN, admin

PAGE = "/omni/ui"


@asynccontextmanager
async def listening(client: httpx.AsyncClient) -> AsyncIterator[AsyncIterator[Any]]:
    """The snapshots of one listener."""

    async def snapshots(answer: httpx.Response) -> AsyncIterator[Any]:
        async for line in answer.aiter_lines():
            if line:
                assert line.startswith("data: "), line
                yield json.loads(line[6:])

    async with client.stream("GET", f"{PAGE}/events") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield snapshots(answer)


async def until_nobody_listens(rig: Rig) -> None:
    async with asyncio.timeout(5):
        while rig.gateway.scheduling.page.listeners:
            await asyncio.sleep(0.01)


async def test_the_page_is_there_without_the_token_and_its_data_is_not(start: Start) -> None:
    rig = await start(ADMIN)
    async with admin(rig, token=None) as client:
        page = await client.get(PAGE)
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        for name in ("main.js", "page.css", "icon.svg"):
            assert (await client.get(f"{PAGE}/files/{name}")).status_code == 200
        for name in ("nothing.js", "..%2froutes.py", "%2e%2e/routes.py"):
            assert (await client.get(f"{PAGE}/files/{name}")).status_code == 404
        for path in (f"{PAGE}/state", f"{PAGE}/events", f"{PAGE}/requests/x"):
            assert (await client.get(path)).status_code == 401, path
        for path in ("/omni/workers/p0/drain", "/omni/workers/p0/undrain", f"{PAGE}/files/x"):
            assert (await client.post(path)).status_code == 401, path


def test_the_page_loads_nothing_from_elsewhere_and_runs_nothing_inline() -> None:
    from omni_proxy.ui.routes import page_files

    files = {name: content.decode() for name, (content, _) in page_files().items()}
    assert {"index.html", "main.js", "page.css", "icon.svg"} <= files.keys()
    for name, text in files.items():
        foreign = text.replace("http://www.w3.org/2000/svg", "")
        assert "//" not in "".join(part.split("\n")[0] for part in foreign.split("http")[1:]), name
        assert "innerHTML" not in text, name
        assert "insertAdjacentHTML" not in text, name
    assert " style=" not in files["index.html"]
    assert " on" not in files["index.html"].replace("<p class", "").replace("content", "").lower().split("<body>")[0]


async def test_where_there_is_no_admin_port_the_page_can_be_looked_at_only(start: Start) -> None:
    rig = await start()
    assert (await rig.client.get(PAGE)).status_code == 200
    state = (await rig.client.get(f"{PAGE}/state")).json()
    assert state["controls"] is False
    assert [w["name"] for w in state["workers"]] == ["d0", "p0"]
    assert (await rig.client.post("/omni/workers/p0/drain")).status_code == 404


async def test_with_an_admin_port_clients_do_not_find_the_page(start: Start) -> None:
    rig = await start(ADMIN)
    for path in (PAGE, f"{PAGE}/state", f"{PAGE}/events", f"{PAGE}/files/main.js"):
        assert (await rig.client.get(path)).status_code == 404


async def test_events_begin_with_everything_and_go_on_with_what_is_new(start: Start) -> None:
    rig = await start(ADMIN)
    await rig.chat(stream=True)
    async with admin(rig) as client, listening(client) as events:
        first = await anext(events)
        assert first["whole"] is True
        assert first["controls"] is True
        assert len(first["points"]) == 150
        assert [row["outcome"] for row in first["ended"]] == ["completed"]
        row = first["ended"][0]
        assert (row["prefill"], row["decode"], row["mode"]) == ("p0", "d0", "sequential")
        assert {stage for stage, _, _ in row["spans"]} >= {0, 3, 5, 8}
        answer = await rig.chat(stream=True)
        seen: list[Any] = []
        async with asyncio.timeout(5):
            while not seen:
                tick = await anext(events)
                assert tick["whole"] is False
                seen = tick["ended"]
        assert seen[0]["id"] == answer.headers["x-request-id"]
        after = await anext(events)
        assert after["ended"] == []
        assert after["window"]["completed"] >= 1
    await until_nobody_listens(rig)


async def test_points_tell_what_ended_in_their_step(start: Start) -> None:
    rig = await start(ADMIN)
    async with admin(rig) as client, listening(client) as events:
        await anext(events)
        for _ in range(3):
            await rig.chat(stream=True)
        told = 0
        async with asyncio.timeout(10):
            while told < 3:
                told += sum(point["completed"] for point in (await anext(events))["points"])
    assert told == 3


async def test_nothing_is_kept_while_nobody_listens(start: Start) -> None:
    rig = await start(ADMIN)
    page = rig.gateway.scheduling.page
    await rig.chat()
    assert not page.watched.on
    assert not page.watched.records
    async with admin(rig) as client, listening(client) as events:
        await anext(events)
        assert page.watched.on
    await until_nobody_listens(rig)
    assert not page.watched.on
    assert not page.watched.records


async def test_there_is_a_bound_on_listeners(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_LISTENERS >= 8
    monkeypatch.setattr("omni_proxy.ui.feed.MAX_LISTENERS", 1)
    rig = await start(ADMIN)
    async with admin(rig) as client:
        async with listening(client) as events:
            await anext(events)
            refused = await client.get(f"{PAGE}/events")
            assert refused.status_code == 429
        await until_nobody_listens(rig)
        async with listening(client) as events:
            await anext(events)


async def test_a_gateway_that_ends_does_not_wait_for_who_looks(start: Start) -> None:
    rig = await start()
    async with rig.client.stream("GET", f"{PAGE}/events") as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        rig.gateway.scheduling.draining = True
        async with asyncio.timeout(3):
            async for _ in lines:
                pass


async def test_one_request_is_told_with_the_reasons_of_its_placements(start: Start) -> None:
    rig = await start(ADMIN, p0=prefill_ok, p1=prefill_ok, d0=decode_stream)
    answer = await rig.chat(stream=True)
    async with admin(rig) as client:
        found = (await client.get(f"{PAGE}/requests/{answer.headers['x-request-id']}")).json()
        missing = await client.get(f"{PAGE}/requests/nobody")
    assert missing.status_code == 404
    assert missing.json()["error"]["param"] == "request_id"
    prefill, decode = found["placements"]
    assert (prefill["leg"], decode["leg"]) == ("prefill", "decode")
    assert {c["worker"] for c in prefill["candidates"]} == {"p0", "p1"}
    assert prefill["reason"]
    assert prefill["finish_s"] >= prefill["start_s"] >= 0
    assert found["stages"][-1]["stage"] == "FINISHED"
    assert found["explain"]["summary"].startswith("It took ")


# ------------------------------------------------------------------------------------------- draining


async def test_a_drained_worker_gets_nothing_until_it_is_undrained(start: Start) -> None:
    rig = await start(ADMIN | {"connector": "aggregated"}, m0=decode_stream, m1=decode_stream)
    async with admin(rig) as client:
        answer = await client.post("/omni/workers/m0/drain")
        assert answer.json()["changed"] is True
        await asyncio.sleep(0.2)  # probes say that it answers, and that changes nothing
        for _ in range(3):
            assert (await rig.chat()).status_code == 200
        assert (len(rig["m0"].seen), len(rig["m1"].seen)) == (0, 3)
        states = {w["name"]: w["state"] for w in (await client.get(f"{PAGE}/state")).json()["workers"]}
        assert states == {"m0": "draining", "m1": "up"}
        assert (await client.post("/omni/workers/m0/undrain")).status_code == 200
        async with asyncio.timeout(5):
            while not all(w.up and not w.draining for w in rig.gateway.scheduling.workers()):
                await asyncio.sleep(0.01)
        for name in ("nobody", "a/b"):
            refused = await client.post(f"/omni/workers/{name}/drain")
            assert (refused.status_code, refused.json()["error"]["param"]) == (404, "worker")
            assert (await client.post(f"/omni/workers/{name}/undrain")).status_code == 404


async def test_what_a_drained_worker_has_ends(start: Start) -> None:
    gate = asyncio.Event()

    async def waits(seen: Any) -> None:
        await gate.wait()
        await decode_stream(seen)

    rig = await start(ADMIN | {"connector": "aggregated"}, m0=waits)
    asked = asyncio.create_task(rig.chat(stream=True))
    await rig.seen("m0")
    async with admin(rig) as client:
        await client.post("/omni/workers/m0/drain")
        gate.set()
        assert (await asked).text.endswith("[DONE]\n\n")
    await rig.idle()


# ------------------------------------------------------------------------------------- other sites' pages


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_page_of_another_site_can_neither_read_nor_drain(start: Start, site: str) -> None:
    rig = await start({"admin": {"port": 0}})
    async with admin(rig, token=None, **{"sec-fetch-site": site}) as client:
        assert (await client.get(f"{PAGE}/state")).status_code == 401
        assert (await client.post("/omni/workers/p0/drain")).status_code == 401
    async with admin(rig, token=None, **{"sec-fetch-site": "same-origin"}) as client:
        assert (await client.get(f"{PAGE}/state")).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9000", 200),
        ("localhost", 200),
        ("[::1]:9000", 200),
        ("evil.example", 401),
        ("evil.example:9000", 401),
        ("localhost.evil.example:9000", 401),
    ],
)
async def test_without_a_token_no_other_name_is_answered(start: Start, host: str, status: int) -> None:
    rig = await start({"admin": {"port": 0}})
    async with admin(rig, token=None, host=host) as client:
        assert (await client.get(f"{PAGE}/state")).status_code == status
    with_token = await start(ADMIN)
    async with admin(with_token, TOKEN, host=host) as client:
        assert (await client.get(f"{PAGE}/state")).status_code == 200


# --------------------------------------------------------------------------------------------- experts


async def test_heat_maps_come_when_they_change(start: Start) -> None:
    rig = await start(ADMIN)
    reader = rig.gateway.scheduling.expert_loads
    async with admin(rig) as client, listening(client) as events:
        assert (await anext(events))["experts"] == []
        assert (await anext(events))["experts"] is None
        reader.read("d0", ExpertReading(((), (300, 100), (200, 0))), 1.0)
        async with asyncio.timeout(5):
            while (maps := (await anext(events))["experts"]) is None:
                pass
        assert (await anext(events))["experts"] is None
    (heat,) = maps
    assert (heat["worker"], heat["layers"], heat["experts"], heat["idle"]) == ("d0", [1, 2], 2, 1)
    assert heat["imbalance"] == [1.5, 2.0]
    assert list(b64decode(heat["cells"])) == [96, 32, 128, 0]
