"""Operators change the workers of a running gateway: nothing that runs is lost, every call leaves a line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from omni_proxy.cli import main
from omni_proxy.config import ConfigError, effective, parse
from tests.relay.conftest import Rig, Start
from tests.relay.scripted import ScriptedWorker, Seen, decode_stream
from tests.relay.test_admin import ADMIN, TOKEN, admin, also_controlled, up

AGGREGATED = ADMIN | {"connector": "aggregated"}


class Held:
    """A worker whose answers wait until they are let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def __call__(self, seen: Seen) -> None:
        await self.go.wait()
        await decode_stream(seen)


def states(rig: Rig) -> dict[str, str]:
    return {
        w.spec.name: "draining" if w.draining else "up" if w.up else "down" for w in rig.gateway.scheduling.workers()
    }


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def listed(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    return {w["name"]: w for w in (await client.get("/omni/workers")).json()["workers"]}


async def test_who_drains_ends_his_work_and_comes_back(start: Start) -> None:
    held = Held()
    rig = await start(AGGREGATED, m0=held)
    running = asyncio.create_task(rig.chat())
    await rig.seen("m0")
    async with admin(rig) as client:
        first = await client.post("/omni/workers/m0/drain")
        assert first.json() == {"worker": "m0", "action": "drain", "changed": True, "shared": None}
        assert (await client.post("/omni/workers/m0/drain")).json()["changed"] is False
        assert states(rig) == {"m0": "draining"}
        shown = (await listed(client))["m0"]
        assert (shown["state"], shown["sequences"], shown["ordered"]) == ("draining", 1, {"drained": True})
        assert (await client.post("/omni/workers/m0/undrain")).json()["changed"] is True
        await up(rig, "m0")
        held.go.set()
        assert (await running).status_code == 200, "taking it back lost what it did"
        assert (await listed(client))["m0"]["ordered"] == {}
    assert (await rig.chat()).status_code == 200
    await rig.idle()


async def test_drained_stays_drained_through_a_reload(start: Start) -> None:
    rig = await start(AGGREGATED, m0=decode_stream, m1=decode_stream)
    async with admin(rig) as client:
        await client.post("/omni/workers/m0/drain")
        scheduling = rig.gateway.scheduling
        scheduling.roster.set("config", scheduling.roster.workers())
        await asyncio.sleep(0.2)
    assert states(rig) == {"m0": "draining", "m1": "up"}
    for _ in range(4):
        assert (await rig.chat()).status_code == 200
    assert (len(rig["m0"].seen), len(rig["m1"].seen)) == (0, 4)


async def test_who_is_removed_goes_when_he_is_idle_and_can_be_added_again(start: Start) -> None:
    held = Held()
    rig = await start(AGGREGATED, m0=held)
    running = asyncio.create_task(rig.chat())
    await rig.seen("m0")
    async with admin(rig) as client:
        assert (await client.delete("/omni/workers/m0")).json()["changed"] is True
        assert (await client.delete("/omni/workers/m0")).json()["changed"] is False
        assert states(rig) == {"m0": "draining"}
        held.go.set()
        assert (await running).status_code == 200
        await until(lambda: states(rig) == {})
        assert (await listed(client))["m0"]["state"] == "removed"
        fields = {"name": "m0", "url": f"http://127.0.0.1:{rig['m0'].port}", "role": "mixed", "connector": "aggregated"}
        assert (await client.post("/omni/workers", json=fields)).json()["changed"] is True
    await up(rig, "m0")
    assert (await rig.chat()).status_code == 200


async def test_workers_are_added_changed_and_removed(start: Start) -> None:
    rig = await start(AGGREGATED, m0=decode_stream)
    more = ScriptedWorker(decode_stream)
    await more.start()
    fields = {"name": "m1", "url": f"http://127.0.0.1:{more.port}", "role": "mixed", "connector": "aggregated"}
    async with admin(rig) as client:
        assert (await client.post("/omni/workers", json=fields)).json()["changed"] is True
        assert (await client.post("/omni/workers", json=fields)).json()["changed"] is False
        await up(rig, "m0", "m1")
        assert (await client.put("/omni/workers/m1/weight", json={"weight": 2.5})).json()["changed"] is True
        loads = {w.spec.name: w for w in rig.gateway.scheduling.workers()}
        assert (loads["m0"].spec.weight, loads["m1"].spec.weight) == (1.0, 2.5)
        assert (await client.put("/omni/workers/m1/weight", json={"weight": None})).json()["changed"] is True
        assert (await listed(client))["m1"] | {"url": ""} == {
            **{"name": "m1", "url": "", "source": "admin", "role": "mixed", "weight": 1.0, "connector": "aggregated"},
            **{"group": None, "state": "up", "reason": None, "sequences": 0, "kv_tokens": 0, "ordered": {}},
        }
        assert (await client.delete("/omni/workers/m1")).json()["changed"] is True
        await until(lambda: states(rig) == {"m0": "up"})
        assert set(await listed(client)) == {"m0"}
        assert (await client.delete("/omni/workers/m1")).status_code == 404
    await more.stop()


async def test_a_role_changes_when_the_worker_is_idle(start: Start) -> None:
    held = Held()
    rig = await start(AGGREGATED, m0=held, m1=decode_stream)
    running = [asyncio.create_task(rig.chat()) for _ in range(2)]
    await rig.seen("m0")
    async with admin(rig) as client:
        assert (await client.put("/omni/workers/m0/role", json={"role": "decode"})).json()["changed"] is True
        assert states(rig)["m0"] == "draining"
        held.go.set()
        assert [(await one).status_code for one in running] == [200, 200]
        await until(lambda: {w.spec.name: w.spec.role for w in rig.gateway.scheduling.workers()}["m0"] == "decode")
        await up(rig, "m0", "m1")
        assert (await listed(client))["m0"]["ordered"] == {"role": "decode"}
    await rig.idle()


async def test_bad_orders_are_refused_with_a_reason(start: Start) -> None:
    rig = await start(AGGREGATED, m0=decode_stream)
    url = f"http://127.0.0.1:{rig['m0'].port}"
    good = {"name": "m1", "url": "http://127.0.0.1:1", "role": "mixed"}
    cases: list[tuple[str, str, bytes | dict[str, Any], int, str | None, str]] = [
        ("POST", "/omni/workers/m9/drain", b"", 404, "worker", "m9"),
        ("PUT", "/omni/workers/m9/weight", {"weight": 1}, 404, "worker", "m9"),
        ("PUT", "/omni/workers/m0/weight", {"weight": 0}, 400, "weight", "0"),
        ("PUT", "/omni/workers/m0/weight", {"weight": True}, 400, "weight", "True"),
        ("PUT", "/omni/workers/m0/weight", {"wait": 1}, 400, "weight", "wait"),
        ("PUT", "/omni/workers/m0/role", {"role": "baker"}, 400, "role", "baker"),
        ("PUT", "/omni/workers/m0/role", b"{", 400, None, "not JSON"),
        ("PUT", "/omni/workers/m0/role", b"[1]", 400, None, "object"),
        ("PUT", "/omni/workers/m0/role", b" " * 70_000, 413, None, "65536"),
        ("POST", "/omni/workers", good | {"role": "baker"}, 400, "role", "baker"),
        ("POST", "/omni/workers", good | {"wait": 1}, 400, "wait", "wait"),
        ("POST", "/omni/workers", good | {"url": "ftp://x"}, 400, "url", "ftp://x"),
        ("POST", "/omni/workers", good | {"name": "m0"}, 400, None, "from config"),
        ("POST", "/omni/workers", good | {"url": url}, 400, None, "from config"),
    ]
    async with admin(rig) as client:
        for method, path, body, status, param, said in cases:
            how = {"content": body} if isinstance(body, bytes) else {"json": body}
            answer = await client.request(method, path, **how)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (status, param), (path, body)
            assert said in error["message"]
    assert states(rig) == {"m0": "up"}


async def test_every_call_leaves_a_line_that_names_no_secret(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "audit.log"
    config = {"port": 0, "token": TOKEN, "tokens": {"ann": "token-of-ann"}, "audit_log": str(log)}
    rig = await start({"admin": config, "connector": "aggregated"}, m0=also_controlled(decode_stream))
    async with admin(rig, "token-of-ann") as client:
        await client.post("/omni/workers/m0/drain")
        await client.post("/omni/workers/m0/undrain")
    async with admin(rig) as client:
        await client.post("/omni/workers/m9/drain")
        secret = {"name": "m1", "url": "http://127.0.0.1:1", "role": "mixed", "api_key": "key-of-m1"}
        await client.post("/omni/workers", json=secret)
        await client.post("/reset_prefix_cache?worker=m0")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    digest = lines[2]["who"]
    assert digest.startswith("token:")
    assert [(x["who"], x["action"], x.get("worker"), x["outcome"]) for x in lines] == [
        ("ann", "drain", "m0", "changed"),
        ("ann", "undrain", "m0", "changed"),
        (digest, "drain", "m9", "No worker is called m9."),
        (digest, "add", "m1", "changed"),
        (digest, "/reset_prefix_cache", None, "1 of 1 succeeded"),
    ]
    assert lines[3]["details"] == secret | {"api_key": "***"}
    assert all(line["time"].endswith("Z") and line["peer"].startswith("127.0.0.1:") for line in lines)
    assert not [secret for secret in (TOKEN, "token-of-ann", "key-of-m1") if secret in log.read_text()]


def test_named_tokens_guard_and_are_not_shown() -> None:
    config = parse({"admin": {"host": "0.0.0.0", "port": 1, "tokens": {"ann": "token-of-ann"}}}, "x")
    assert "token-of-ann" not in effective(config)
    with pytest.raises(ConfigError, match="tokens"):
        parse({"admin": {"port": 1, "tokens": {"ann": "short"}}}, "x")


async def test_the_command_line_does_the_same(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rig = await start(AGGREGATED, m0=decode_stream)
    server = rig.gateway.scheduling.admin
    assert server is not None
    token = tmp_path / "token"
    token.write_text(TOKEN + "\n")
    where: tuple[str, ...] = ("--admin", f"http://127.0.0.1:{server.port}", "--token-file", str(token))

    async def run(*arguments: str) -> tuple[int, str]:
        code = await asyncio.to_thread(main, [*arguments, *where])
        said = capsys.readouterr()
        return code, said.out + said.err

    assert await run("workers", "drain", "m0") == (0, "drain m0: done\n")
    assert await run("workers", "drain", "m0") == (0, "drain m0: it was so already\n")
    assert await run("workers", "undrain", "m0") == (0, "undrain m0: done\n")
    added = ("workers", "add", "m1", "http://127.0.0.1:1", "--role", "mixed", "--set", "models=[a, b]")
    assert await run(*added) == (0, "add m1: done\n")
    assert await run("workers", "weight", "m1", "3") == (0, "weight m1: done\n")
    assert await run("workers", "role", "m1", "decode") == (0, "role m1: done\n")
    code, table = await run("workers", "list")
    row = next(line for line in table.splitlines() if line.startswith("m1"))
    assert (code, row.split()) == (
        0,
        ["m1", "decode", "down", "3.0", "0", "0", "admin", "http://127.0.0.1:1", "weight=3.0,", "role=decode"],
    )
    assert json.loads((await run("workers", "list", "--json"))[1])["workers"][1]["name"] == "m1"
    assert await run("workers", "remove", "m1") == (0, "remove m1: done\n")
    assert (await run("workers", "weight", "m0", "heavy"))[0] == 2
    assert (await run("workers", "drain", "m9"))[0] == 1
    where = ("--admin", where[1], "--token-file", str(tmp_path / "none"))
    assert (await run("workers", "list"))[0] == 2
    where = ("--admin", "http://127.0.0.1:1")
    code, said = await run("reload")
    assert code == 2
    assert "cannot be reached" in said


async def test_without_a_file_to_load_again_that_is_said(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omni_proxy.halves.scheduling.RELOAD_S", 0.1)
    rig = await start(AGGREGATED, m0=decode_stream)
    scheduling = rig.gateway.scheduling
    async with admin(rig) as client:
        assert (await client.post("/omni/reload")).status_code == 500
        scheduling.reload_by(lambda: scheduling.tallies.config_reloaded(2, 0))
        assert (await client.post("/omni/reload")).json() == {"action": "reload", "generation": 2}
        scheduling.reload_by(lambda: scheduling.tallies.config_reloaded(2, 1))
        answer = await client.post("/omni/reload")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
