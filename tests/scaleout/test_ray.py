"""`omni-proxy up --ray` on a cluster of several node processes: whatever dies, dies under load."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.up import Up, is_alive, up
from tests.scaleout.ray_cluster import RayCluster, ray_cluster

pytestmark = [
    pytest.mark.ray,
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'omni-proxy[ray]'"
    ),
]

ASK = {
    "model": "omni-demo",
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "temperature": 0,
    "max_tokens": 120,
    "ignore_eos": True,
    "stream": True,
}


@pytest.fixture
async def cluster() -> AsyncIterator[RayCluster]:
    async with ray_cluster(5) as running:
        yield running


async def story(client: httpx.AsyncClient) -> tuple[str, str | None]:
    """The text, and the error with which the stream ended, if it did."""
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=ASK) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return text, event["error"]["message"]
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    return text, None


class Load:
    """Clients that ask again and again."""

    def __init__(self, url: str, clients: int) -> None:
        self.ended: list[tuple[str, str | None]] = []
        self._stop = asyncio.Event()
        self._client = httpx.AsyncClient(base_url=url, timeout=240, trust_env=False)
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(clients)]

    async def _ask(self) -> None:
        while not self._stop.is_set():
            self.ended.append(await story(self._client))

    async def more(self, count: int) -> None:
        """Until so many more have ended."""
        wanted = len(self.ended) + count
        async with asyncio.timeout(240):
            while len(self.ended) < wanted:
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.05)

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)
        await self._client.aclose()


def nodes(running: Up) -> dict[str, str]:
    """The beginning of the id of the node on which each worker was last started."""
    found = {}
    for line in running.lines:
        if match := re.match(r"(\S+): ready on .* \(node (\w+), pid", line):
            found[match[1]] = match[2]
    return found


def pids(running: Up) -> dict[str, int]:
    found = {}
    for line in running.lines:
        if match := re.match(r"(\S+): ready on .* \(node \w+, pid (\d+)\)", line):
            found[match[1]] = int(match[2])
    return found


def placer_of(running: Up) -> int:
    children = psutil.Process(running.process.pid).children()
    return next(c.pid for c in children if "omni_proxy.ray.placer" in c.cmdline())


async def workers(running: Up) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(trust_env=False) as client:
        found: list[dict[str, Any]] = (await client.get(f"{running.url}/omni/workers")).json()["workers"]
        return found


async def test_nodes_workers_and_the_placing_process_die_under_load(cluster: RayCluster) -> None:
    arguments = (f"--ray={cluster.address}", "--prefill=2", "--decode=2", "--resume")
    async with up(*arguments) as running:
        started = pids(running)
        placed = nodes(running)
        assert len(set(placed.values())) == 4, "SPREAD: one worker a node"
        assert {w["name"] for w in await workers(running)} == set(started)
        load = Load(running.url, 4)
        await load.more(4)

        seen = len(running.lines)
        await cluster.kill(placed["decode-0"])  # there is a fifth node
        await load.more(4)
        await running.line(r"^decode-0: .*starting it again", after=seen)
        await running.line(r"^decode-0: ready", after=seen)
        assert nodes(running)["decode-0"] not in placed.values()

        seen = len(running.lines)
        os.kill(pids(running)["prefill-1"], signal.SIGKILL)
        await running.line(r"^prefill-1: .*starting it again", after=seen)
        await running.line(r"^prefill-1: ready", after=seen)

        seen, before = len(running.lines), pids(running)
        os.kill(placer_of(running), signal.SIGKILL)
        await running.line("Workers run on", after=seen)
        for name in started:
            await running.line(f"^{name}: ready", after=seen)
        assert pids(running) == before, "those that run are found, not started anew"

        await load.more(4)
        await load.stop()
        last = pids(running)
    texts = {text for text, _ in load.ended}
    assert [error for _, error in load.ended if error is not None] == []
    assert len(texts) == 1, "greedy: each stream tells the same story, whoever died meanwhile"
    assert not any(is_alive(pid) for pid in last.values())


async def test_a_node_that_dies_costs_only_streams_that_had_begun(cluster: RayCluster) -> None:
    async with up(f"--ray={cluster.address}", "--prefill=1", "--decode=2") as running:
        load = Load(running.url, 6)
        await load.more(6)
        await cluster.kill(nodes(running)["decode-1"])
        await load.more(12)
        await load.stop()
    lost = [(text, error) for text, error in load.ended if error is not None]
    assert all(text for text, _ in lost), f"lost before its first token: {lost}"
    assert len(lost) <= 6


async def exit_of(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "omni_proxy", "up", "--port=0", *arguments),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, said = await asyncio.wait_for(process.communicate(), 120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    return process.returncode or 0, said.decode()


async def test_no_room_and_engines_that_do_not_start_are_told(cluster: RayCluster, tmp_path: Path) -> None:
    pools = tmp_path / "pools.yaml"
    pools.write_text("wait_s: 1\nprefill: {cpus: 1, resources: {unobtainium: 2}}\n")
    code, said = await exit_of(f"--ray={cluster.address}", f"--ray-pools={pools}")
    assert code == 2
    assert "no room after 1 s: wanted 1 x (1 CPU, 2 unobtainium)" in said
    pools.write_text(
        # The other one neither serves nor ends: what is told must not depend on who is first.
        "wait_s: 30\nengine: vllm\nmodel: m\ndecode: {gpus: 0, command: [python, -c, 'import time; time.sleep(600)']}\n"
        "prefill: {command: [python, -c, 'import sys; sys.exit(\"out of memory\")']}\n"
    )
    code, said = await exit_of(f"--ray={cluster.address}", f"--ray-pools={pools}")
    assert code == 2
    assert "prefill-0: ended with code 1: out of memory" in said


async def test_no_cluster_is_told() -> None:
    code, said = await exit_of("--ray=127.0.0.1:9")
    assert code == 2
    assert "no Ray cluster at '127.0.0.1:9'" in said
