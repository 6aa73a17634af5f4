"""Two whole gateways before the same pretending workers, joined by a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.e2e.worker import worker
from tests.scaleout.redis_server import needs_redis, redis_server

pytest.importorskip("redis")
pytestmark = [needs_redis, pytest.mark.e2e, pytest.mark.slow]


@contextlib.asynccontextmanager
async def gateway(folder: Path, name: str, redis: str, workers: dict[str, str]) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    config = {
        "listen": {"port": port},
        "kv_cache_policy": "independent",
        "replicas": {"redis": redis, "name": name},
        "workers": [
            {"name": n, "url": url, "role": "prefill" if n[0] == "p" else "decode", "connector": "omni"}
            for n, url in workers.items()
        ],
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "omni_proxy", "serve", "-c", str(path), "--log-level", "warning"),
        stdin=asyncio.subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(60), httpx.AsyncClient() as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(url + "/ready")).status_code == 200:
                        break
                await asyncio.sleep(0.05)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def metric(client: httpx.AsyncClient, url: str, name: str) -> float:
    lines = (await client.get(url + "/metrics")).text.splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(name + " ")))


async def test_two_gateways_share_workers(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        redis = await stack.enter_async_context(redis_server(tmp_path))
        pretend = ("--simulate", "demo", "--speed", "20")
        urls = {n: await stack.enter_async_context(worker("--role", r, *pretend)) for n, r in ROLES.items()}
        a = await stack.enter_async_context(gateway(tmp_path, "a", redis.url, urls))
        b = await stack.enter_async_context(gateway(tmp_path, "b", redis.url, urls))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
        async with asyncio.timeout(20):
            while await metric(client, a, "omni_replicas_others") + await metric(client, b, "omni_replicas_others") < 2:
                await asyncio.sleep(0.05)
        model = (await client.get(a + "/v1/models")).json()["data"][0]["id"]
        body = {"model": model, "prompt": "word " * 200, "max_tokens": 16}
        answers = await asyncio.gather(*(client.post(f"{url}/v1/completions", json=body) for url in (a, b) * 10))
        assert [answer.status_code for answer in answers] == [200] * 20
        assert await metric(client, a, "omni_replicas_reports_received_total") > 2
        await redis.stop()
        answers = await asyncio.gather(*(client.post(f"{url}/v1/completions", json=body) for url in (a, b) * 5))
        assert [answer.status_code for answer in answers] == [200] * 10
        async with asyncio.timeout(20):
            while await metric(client, a, "omni_replicas_connected") or await metric(client, a, "omni_replicas_others"):
                await asyncio.sleep(0.1)
        assert await metric(client, a, "omni_replicas_alone_seconds_total") > 0
        await redis.start()
        async with asyncio.timeout(20):
            while await metric(client, b, "omni_replicas_others") < 1:
                await asyncio.sleep(0.1)


ROLES = {"p0": "prefill", "p1": "prefill", "d0": "decode"}
