"""What fronts do by themselves, as real processes: aliases, encode workers, divided requests; and the admin port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import httpx
import pytest

from tests.processes.test_processes import Running, _free_port, _ready
from tests.relay.scripted import ScriptedWorker, Seen, decode_stream, prefill_ok

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TOKEN = "a-long-token"


async def encode(seen: Seen) -> None:
    if seen.path.startswith("/v1"):
        await seen.answer(200, b'{"ec_transfer_params":{"x":{"at":1}}}')
    else:
        await seen.answer(200, b"{}")


async def test_two_fronts_serve_what_one_does(tmp_path: Path) -> None:
    workers = {"p0": ScriptedWorker(prefill_ok), "d0": ScriptedWorker(decode_stream), "e0": ScriptedWorker(encode)}
    roles = {"p0": "prefill", "d0": "decode", "e0": "encode"}
    listed = []
    for name, worker in workers.items():
        await worker.start()
        connector = "aggregated" if name == "e0" else "sglang"
        url = f"http://127.0.0.1:{worker.port}"
        listed.append({"name": name, "url": url, "role": roles[name], "connector": connector, "models": {"big": "m"}})
    port, admin = _free_port(), _free_port()
    config = {
        "listen": {"host": "127.0.0.1", "port": port},
        "admin": {"port": admin, "token": TOKEN},
        "processes": 2,
        "models": [{"name": "big", "aliases": ["gpt-4"]}],
        "workers": listed,
    }
    path = tmp_path / "omni.yaml"
    path.write_text(json.dumps(config))
    command = (sys.executable, "-m", "omni_proxy", "serve", "-c", str(path), "--log-level", "warning")
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stderr=log)
    try:
        running = await _ready(Running(process, port, asyncio.Event()))
        async with httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=20) as client:
            await _ask(client)
            refused = await client.post(f"http://127.0.0.1:{admin}/reset_prefix_cache")
            assert refused.status_code == 401
            headers = {"authorization": f"Bearer {TOKEN}"}
            called = await client.post(f"http://127.0.0.1:{admin}/reset_prefix_cache?worker=e0", headers=headers)
            assert called.json()["summary"] == {"total": 1, "success": 1, "failed": 0}
        assert {s.json["model"] for s in workers["d0"].seen} == {"m"}
        asked = [s.json["ec_transfer_params"] for s in workers["p0"].seen]
        assert asked == [{"x": {"at": 1}}] * len(workers["d0"].seen)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        async with asyncio.timeout(30):
            await process.wait()
        for worker in workers.values():
            await worker.stop()


async def _ask(client: httpx.AsyncClient) -> None:
    image = {"type": "image_url", "image_url": {"url": "http://x/a.png"}}
    body = {"model": "gpt-4", "messages": [{"role": "user", "content": [image]}]}
    for fields, choices in (({}, 1), ({"n": 3}, 3)):
        answer = await client.post("/v1/chat/completions", json=body | fields)
        assert answer.status_code == 200, answer.text
        assert [choice["index"] for choice in answer.json()["choices"]] == list(range(choices))
    listed = (await client.get("/v1/models")).json()["data"]
    assert [entry["id"] for entry in listed] == ["big", "gpt-4"]
