"""Several front processes: each listens to the decode workers that it has asked, on a port of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx
import pytest

from tests.connectors.protocols import PROTOCOLS
from tests.connectors.test_announcements import free_port
from tests.relay.scripted import ScriptedWorker, decode_stream

LAYERWISE = PROTOCOLS["ascend-layerwise-parallel"]


@pytest.mark.e2e
async def test_decode_workers_that_go_first_behind_two_fronts(tmp_path: Path) -> None:
    p, d = ScriptedWorker(LAYERWISE.prefill_script()), ScriptedWorker(LAYERWISE.decode_script(decode_stream))
    await p.start()
    await d.start()
    port = free_port()
    pair = {"p0": ("prefill", p.port, 1), "d0": ("decode", d.port, 2)}
    config = {
        "listen": {"port": port},
        "processes": 2,
        "schedule_mode": "parallel",
        "callbacks": {"host": "127.0.0.1"},
        "workers": [
            {
                "name": n,
                "url": f"http://127.0.0.1:{at}",
                "role": role,
                "connector": LAYERWISE.connector,
                "dp_size": size,
            }
            for n, (role, at, size) in pair.items()
        ],
    }
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))
    gateway = await asyncio.create_subprocess_exec(sys.executable, "-m", "omni_proxy", "serve", "-c", str(path))
    try:
        await _ready(port)
        answers = await asyncio.gather(*(_ask(port, stream=bool(i % 2)) for i in range(40)))
        assert set(answers) == {200}
        places = {seen.json["kv_transfer_params"]["metaserver"] for seen in d.seen}
        assert len(places) == 2, "each front is called where it listens"
        assert len(p.seen) == 40
        assert {seen.headers["x-data-parallel-rank"] for seen in d.seen} == {"0", "1"}
    finally:
        gateway.terminate()
        await gateway.wait()
        await p.stop()
        await d.stop()


async def _ready(port: int) -> None:
    async with asyncio.timeout(60), httpx.AsyncClient(trust_env=False) as client:
        while True:
            try:
                if (await client.get(f"http://127.0.0.1:{port}/ready")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)


async def _ask(port: int, stream: bool) -> int:
    """One request on a connection of its own: the system picks a front for it."""
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": stream}
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        return (await client.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)).status_code
