"""Speculative prefill with `processes: 2`: foreseen in a front, decided by the scheduler; its death takes it along."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest

from tests.processes.test_processes import Running, _free_port, _ready
from tests.relay.scripted import ScriptedWorker, Seen, decode_stream, prefill_answer
from tests.workers.server.conftest import write_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


async def test_it_passes_between_front_and_scheduler(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    ahead: list[Seen] = []

    async def prefill(seen: Seen) -> None:
        if seen.headers["x-request-id"].startswith("prewarm-"):
            ahead.append(seen)
            await seen.gone.wait()
        else:
            await seen.answer(200, prefill_answer(cached=0, prompt=200))

    p, d = ScriptedWorker(prefill), ScriptedWorker(decode_stream)
    await p.start()
    await d.start()
    port = _free_port()
    listed = [("p0", "prefill", p.port), ("d0", "decode", d.port)]
    config = {
        "listen": {"host": "127.0.0.1", "port": port},
        "processes": 2,
        "prewarm": True,
        "model": {"path": str(tmp_path)},
        "workers": [
            {"name": name, "url": f"http://127.0.0.1:{at}", "role": role, "connector": "vllm-nixl"}
            for name, role, at in listed
        ],
    }
    path = tmp_path / "omni.yaml"
    path.write_text(json.dumps(config))
    command = (sys.executable, "-m", "omni_proxy", "serve", "-c", str(path), "--log-level", "warning")
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stderr=log)
    try:
        running = await _ready(Running(process, port, asyncio.Event()))
        async with httpx.AsyncClient(base_url=running.url, trust_env=False, timeout=20) as client:
            await _ask(client, "one")
            await _until(ahead, 1)
            await _ask(client, "two")  # real work ends the first
            async with asyncio.timeout(5):
                await ahead[0].gone.wait()
            await _until(ahead, 2)
            shown = (await client.get("/metrics")).text
            assert 'omni_prewarm_requests_total{result="cancelled"} 1.0' in shown
            scheduler = running.children()["_scheduler0"]
            os.kill(scheduler, signal.SIGKILL)
            async with asyncio.timeout(10):
                await ahead[1].gone.wait()
            await running.wait_for_children(without=scheduler)
            await _ready(running)
            await _ask(client, "three")
            await _until(ahead, 3)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        async with asyncio.timeout(30):
            assert await process.wait() == 0
        await p.stop()
        await d.stop()


async def _ask(client: httpx.AsyncClient, word: str) -> None:
    content = f"{word} and something more about gates and rivers, so that there is a block of it. " * 3
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "stream": True}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def _until(ahead: list[Seen], count: int) -> None:
    async with asyncio.timeout(10):
        while len(ahead) < count:
            await asyncio.sleep(0.01)
