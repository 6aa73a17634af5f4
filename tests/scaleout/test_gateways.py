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


PRETEND = ("--simulate", "demo", "--speed", "20")
TOKEN = "a-long-token"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def admin(port: int) -> dict[str, object]:
    return {"port": port, "token": TOKEN}


@contextlib.asynccontextmanager
async def gateway(
    folder: Path, name: str, redis: str, workers: dict[str, str], more: dict[str, object] | None = None
) -> AsyncIterator[str]:
    port = free_port()
    config = {
        "listen": {"port": port},
        "kv_cache_policy": "independent",
        "replicas": {"redis": redis, "name": name},
        "workers": [
            {"name": n, "url": url, "role": "prefill" if n[0] == "p" else "decode", "connector": "omni"}
            for n, url in workers.items()
        ],
        **(more or {}),
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


def headers(token: str = TOKEN) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def states(client: httpx.AsyncClient, url: str) -> dict[str, str]:
    return {w["name"]: w["state"] for w in (await client.get(url + "/omni/workers")).json()["workers"]}


async def until_states(client: httpx.AsyncClient, url: str, **wanted: str) -> None:
    async with asyncio.timeout(30):
        while await states(client, url) != {"p1": "up", **wanted}:
            await asyncio.sleep(0.05)


async def test_what_operators_order_at_one_gateway_holds_at_the_other(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        redis = await stack.enter_async_context(redis_server(tmp_path))
        urls = {n: await stack.enter_async_context(worker("--role", r, *PRETEND)) for n, r in ROLES.items()}
        ports = [free_port(), free_port()]
        a, b = [
            await stack.enter_async_context(gateway(tmp_path, n, redis.url, urls, {"admin": admin(p)}))
            for n, p in zip("ab", ports, strict=True)
        ]
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60, trust_env=False, headers=headers()))
        at_a, at_b = (f"http://127.0.0.1:{port}/omni" for port in ports)
        async with asyncio.timeout(20):
            while await metric(client, a, "omni_replicas_others") + await metric(client, b, "omni_replicas_others") < 2:
                await asyncio.sleep(0.05)
        answer = await client.post(f"{at_a}/workers/p0/drain")
        assert answer.json() == {"worker": "p0", "action": "drain", "changed": True, "shared": True}
        await until_states(client, b, p0="draining", d0="up")
        await redis.stop()  # with all that it knew
        answer = await client.post(f"{at_b}/workers/d0/drain")
        assert answer.json()["shared"] is False
        await redis.start()
        await until_states(client, a, p0="draining", d0="draining")
        assert (await client.post(f"{at_a}/workers/p0/undrain")).json()["changed"] is True
        assert (await client.post(f"{at_a}/workers/d0/undrain")).json()["changed"] is True
        await until_states(client, b, p0="up", d0="up")


async def test_operators_of_several_processes_have_one_port(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        urls = {n: await stack.enter_async_context(worker("--role", r, *PRETEND)) for n, r in ROLES.items()}
        port = free_port()
        more: dict[str, object] = {"processes": 2, "replicas": None, "admin": admin(port)}
        url = await stack.enter_async_context(gateway(tmp_path, "a", "", urls, more))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60, trust_env=False, headers=headers()))
        omni = f"http://127.0.0.1:{port}/omni"
        assert (await client.post(f"{omni}/workers/d0/drain")).json()["changed"] is True
        await until_states(client, url, p0="up", d0="draining")
        answer = await client.post(f"{omni}/reload")
        assert (answer.status_code, answer.json()) == (200, {"action": "reload", "generation": 2})
        path = tmp_path / "a.yaml"
        good = path.read_text()
        path.write_text("workers: 3")
        answer = await client.post(f"{omni}/reload")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
        path.write_text(good)
        assert (await client.post(f"{omni}/reload")).json()["generation"] == 3
        assert (await client.post(f"{omni}/workers/d0/undrain")).json()["changed"] is True
        await until_states(client, url, p0="up", d0="up")


async def test_an_embedded_worker_registers_itself_and_says_goodbye(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    async with contextlib.AsyncExitStack() as stack:
        urls = {n: await stack.enter_async_context(worker("--role", r, *PRETEND)) for n, r in ROLES.items()}
        port = free_port()
        registration = {"registration": {"port": port, "token": TOKEN}}
        more: dict[str, object] = {"replicas": None, "discovery": registration}
        url = await stack.enter_async_context(gateway(tmp_path, "a", "", urls, more))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=60, trust_env=False))
        where = ("--register", f"http://127.0.0.1:{port}", "--token-file", str(token), "--name", "own")
        async with worker("--role", "mixed", *where):
            await until_states(client, url, p0="up", d0="up", own="up")
        await until_states(client, url, p0="up", d0="up")
