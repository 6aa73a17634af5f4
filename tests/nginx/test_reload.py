"""SIGHUP: the config changes, and no request is lost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from omni_proxy.config import load, parse
from omni_proxy.parts import check_usable
from omni_proxy.reload import Reloads
from tests.nginx.rig import CHAT, HEALTH, Served, entry, in_process, served, started, until
from tests.relay.scripted import DONE, ScriptedWorker, Seen, decode_stream, event, prefill_ok

pytestmark = pytest.mark.slow


async def slow_stream(seen: Seen) -> None:
    """A decode worker that takes its time over each token."""
    await seen.open_stream()
    for number in range(8):
        await seen.chunk(event(f"{number} "))
        await asyncio.sleep(0.01)
    await seen.chunk(DONE)
    await seen.end_stream()


WHOLE = b"".join(event(f"{number} ") for number in range(8)) + DONE


async def ask(client: httpx.AsyncClient) -> bytes:
    answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True}, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.content


def client_of(port: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=300)
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, limits=limits)


def written(workers: Sequence[dict[str, Any]], **more: Any) -> str:
    return json.dumps({"health": HEALTH, "workers": list(workers), **more})


@contextlib.asynccontextmanager
async def four() -> AsyncIterator[dict[str, ScriptedWorker]]:
    scripts = {"p0": prefill_ok, "p1": prefill_ok, "d0": slow_stream, "d1": slow_stream}
    async with started(**{name: ScriptedWorker(script) for name, script in scripts.items()}) as workers:
        yield workers


async def test_no_request_is_lost_while_members_come_go_and_change(tmp_path: Path) -> None:
    """200 requests arrive while the file is loaded again and again, each time with other members and limits."""
    path, asked, rng = tmp_path / "omni.yaml", asyncio.Event(), random.Random(1)
    async with four() as workers:
        every = [entry(name, worker) for name, worker in workers.items()]
        path.write_text(written(every))
        config = load(path)
        async with in_process(config.model_dump(mode="json")) as (gateway, port), client_of(port) as client:
            reloads = Reloads(path, config, check_usable)
            following = asyncio.create_task(gateway.follow(reloads, asked))
            running = []
            for number in range(200):
                running.append(asyncio.create_task(ask(client)))
                if number % 10 == 0:
                    path.write_text(_any_config(rng, every))
                    asked.set()
                await asyncio.sleep(0.005)
            answers = await asyncio.gather(*running)
            assert answers == [WHOLE] * 200
            assert reloads.failed == 0
            assert reloads.generation >= 15
            path.write_text(written(every[::2]))
            asked.set()
            await until(lambda: [w.spec.name for w in gateway.scheduling.workers()] == ["d0", "p0"])
            await until(lambda: gateway.scheduling.core.live_count() == 0)
            gateway.scheduling.core.check()
            assert all((w.seqs, w.prefill_tokens, w.kv_tokens) == (0, 0, 0) for w in gateway.scheduling.workers())
            following.cancel()


def _any_config(rng: random.Random, every: Sequence[dict[str, Any]]) -> str:
    """One or two workers of each role, with some setting or other."""
    p, d = every[:2], every[2:]
    kept = [*rng.sample(p, rng.randint(1, 2)), *rng.sample(d, rng.randint(1, 2))]
    changes: list[dict[str, Any]] = [{}, {"weight": 2.0}, {"max_seqs": 50}, {"api_key": "k"}, {"backup": True}]
    workers = [{**worker, **rng.choice(changes)} for worker in kept]
    return written(workers, limits={"max_waiting_requests": rng.randint(300, 400)}, retries={"max": rng.randint(2, 3)})


async def test_a_worker_that_leaves_finishes_what_it_has(tmp_path: Path) -> None:
    path, asked = tmp_path / "omni.yaml", asyncio.Event()
    go_on = asyncio.Event()

    async def held(seen: Seen) -> None:
        await seen.open_stream()
        await seen.chunk(event("first"))
        await go_on.wait()
        await seen.chunk(event("last") + DONE)
        await seen.end_stream()

    async with started(m0=ScriptedWorker(held), m1=ScriptedWorker(decode_stream)) as workers:
        every = [entry(name, worker) for name, worker in workers.items()]
        path.write_text(written(every[:1]))
        config = load(path)
        async with in_process(config.model_dump(mode="json")) as (gateway, port), client_of(port) as client:
            following = asyncio.create_task(gateway.follow(Reloads(path, config, check_usable), asked))
            running = asyncio.create_task(ask(client))
            await until(lambda: len(workers["m0"].seen) == 1)
            path.write_text(written(every[1:]))
            asked.set()
            await until(lambda: [(w.spec.name, w.up, w.draining) for w in gateway.scheduling.workers()] == [
                ("m0", True, True), ("m1", True, False)
            ])  # fmt: skip
            assert (await ask(client)).endswith(DONE)
            assert len(workers["m1"].seen) == 1
            go_on.set()
            assert await running == event("first") + event("last") + DONE
            await until(lambda: [w.spec.name for w in gateway.scheduling.workers()] == ["m1"])
            following.cancel()


async def test_limits_and_times_of_requests_change(tmp_path: Path) -> None:
    path, asked, log = tmp_path / "omni.yaml", asyncio.Event(), tmp_path / "new.log"
    async with started(m0=ScriptedWorker(decode_stream)) as workers:
        listed = [entry("m0", workers["m0"])]
        path.write_text(written(listed))
        config = load(path)
        async with in_process(config.model_dump(mode="json")) as (gateway, port):
            following = asyncio.create_task(gateway.follow(Reloads(path, config, check_usable), asked))
            limits = {"client_max_body_bytes": 10}
            path.write_text(written(listed, limits=limits, access_log={"path": str(log), "format": "combined"}))
            asked.set()
            async with client_of(port) as client:
                await until(lambda: log.exists())
                assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 413
            path.write_text(written(listed))
            asked.set()
            await until(lambda: b" 413 " in log.read_bytes())
            following.cancel()


def metric(text: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


async def metrics_of(gateway: Served) -> dict[str, float]:
    async with client_of(gateway.port) as client:
        text = (await client.get("/metrics")).text
    names = {"generation": "omni_config_generation", "ok": 'omni_config_reloads_total{result="ok"}'}
    names["failed"] = 'omni_config_reloads_total{result="failed"}'
    return {short: metric(text, name) for short, name in names.items()}


@pytest.mark.e2e
@pytest.mark.parametrize("processes", [1, 2])
async def test_sighup_to_a_process(tmp_path: Path, processes: int) -> None:
    """Requests go on through good and bad files; what happened is in the log and in the metrics."""
    async with four() as workers:
        every = [entry(name, worker) for name, worker in workers.items()]
        config: dict[str, Any] = {"workers": every, "processes": processes}
        async with served(tmp_path, config) as gateway, client_of(gateway.port) as client:
            running = [asyncio.create_task(ask(client)) for _ in range(20)]
            gateway.config.write_text("workers: [")
            gateway.signal(signal.SIGHUP)
            assert "omni.yaml" in await gateway.says("the old one stays")
            await _until_metrics(gateway, {"generation": 1, "ok": 0, "failed": 1})
            running += [asyncio.create_task(ask(client)) for _ in range(20)]
            gateway.write({"workers": every[1:3], "processes": processes + 1})
            gateway.signal(signal.SIGHUP)
            assert "processes" in await gateway.says("needs a restart")
            assert "changed: workers" in await gateway.says("generation 2")
            running += [asyncio.create_task(ask(client)) for _ in range(20)]
            await _until_metrics(gateway, {"generation": 2, "ok": 1, "failed": 1})
            assert await asyncio.gather(*running) == [WHOLE] * 60
            names: list[str] = []
            while names != ["d0", "p1"]:
                listed = (await client.get("/omni/workers")).json()["workers"]
                names = [worker["name"] for worker in listed]


async def _until_metrics(gateway: Served, expected: dict[str, float]) -> None:
    async with asyncio.timeout(10):
        while await metrics_of(gateway) != expected:
            await asyncio.sleep(0.02)


def test_a_new_access_log_that_cannot_be_opened_is_a_fault_of_the_file() -> None:
    from omni_proxy.config import ConfigError

    with pytest.raises(ConfigError, match=r"access_log.path: cannot open /nowhere/x"):
        check_usable(parse({"access_log": {"path": "/nowhere/x"}}, "test"))
