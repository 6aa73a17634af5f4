"""SGLang's protocol from end to end: the embedded engine's workers meet in a room as SGLang's do, and P pushes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from omni_proxy.config import parse
from omni_proxy.demo import demo_model
from tests.e2e.worker import worker, worker_process
from tests.real_engines.processes import free_port
from tests.relay.conftest import FAST, Rig, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

COMMON = (f"--model={demo_model()}", "--served-model-name=omni-demo")
PROMPT = " ".join(f"The fox number {n} met a bear who liked honey." for n in range(20))


class Cluster:
    """A gateway that takes both workers for SGLang's, and P's pid."""

    def __init__(self, rig: Rig, prefill_url: str, prefill_pid: int) -> None:
        self.rig = rig
        self.prefill_pid = prefill_pid
        self._prefill_url = prefill_url

    async def pushes(self) -> float:
        text = (await self.rig.client.get(f"{self._prefill_url}/metrics")).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("omni_kv_pushes_total"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with contextlib.AsyncExitStack() as stack:
        port = free_port()
        begin = (
            stack.enter_async_context(worker_process("--role=prefill", f"--side-channel-port={port}", *COMMON)),
            stack.enter_async_context(worker_process("--role=decode", *COMMON)),
        )
        (p, pid), (d, _) = [await one for one in begin]
        shared = {"connector": "sglang", "checks": False}
        workers = [
            {"name": "p0", "url": p, "role": "prefill", "bootstrap_port": port, **shared},
            {"name": "d0", "url": d, "role": "decode", **shared},
        ]
        health = FAST | {"timeout_s": 20.0}
        config = parse({"workers": workers, "schedule_mode": "parallel", "health": health}, "test")
        rig = await stack.enter_async_context(running(config, {}))
        async with asyncio.timeout(60):
            while sum(w.up for w in rig.gateway.scheduling.workers()) < 2:
                await asyncio.sleep(0.02)
        yield Cluster(rig, p, pid)


def asking(path: str, stream: bool = False) -> dict[str, Any]:
    said = {"prompt": PROMPT} if path == "/v1/completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    return {"model": "omni-demo", **said, "temperature": 0, "max_tokens": 16, "ignore_eos": True, "stream": stream}


def text_of(choice: dict[str, Any]) -> str:
    part = choice.get("delta") or choice.get("message") or {}
    return choice.get("text") or part.get("content") or ""


async def streamed(rig: Rig, path: str) -> str:
    text = ""
    async with rig.client.stream("POST", path, json=asking(path, True), timeout=120) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += "".join(map(text_of, event["choices"]))
    return text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_answer_is_that_of_one_worker(cluster: Cluster, path: str) -> None:
    rig = cluster.rig
    before = await cluster.pushes()
    answer = await rig.client.post(path, json=asking(path), headers={"x-request-id": f"mine{path[-5:]}"}, timeout=120)
    assert answer.status_code == 200, answer.text
    text = text_of(answer.json()["choices"][0])
    async with asyncio.timeout(60):  # P counts it when D has said that all has come
        while await cluster.pushes() == before:
            await asyncio.sleep(0.02)
    assert await cluster.pushes() == before + 1
    timeline = await rig.timeline(answer)
    assert timeline["mode"] == "parallel"
    assert timeline["workers"] == {"prefill": "p0", "decode": "d0"}
    assert f"mine{path[-5:]}" in answer.json()["id"]
    assert await streamed(rig, path) == text
    async with worker("--role=mixed", *COMMON) as alone:
        whole = await rig.client.post(alone + path, json=asking(path), timeout=120)
    assert text == text_of(whole.json()["choices"][0]) != ""
    await rig.idle()


async def test_a_killed_prefill_worker_ends_both_legs(cluster: Cluster) -> None:
    """The last of them: D waits for a P that is gone, and is not waited for."""
    rig = cluster.rig
    os.kill(cluster.prefill_pid, signal.SIGSTOP)  # so that it is asked, and does not answer
    asked = asyncio.create_task(rig.client.post("/v1/completions", json=asking("/v1/completions"), timeout=120))
    async with asyncio.timeout(60):
        while not rig.gateway.front.edge.exchanges or len(rig.edge_exchange().legs) < 2:
            await asyncio.sleep(0.005)
    os.kill(cluster.prefill_pid, signal.SIGKILL)
    answer = await asked
    assert answer.status_code == 502
    # A kept connection that dies is tried afresh, and then nobody is there.
    assert answer.json()["error"]["code"] in ("worker_closed", "worker_unreachable")
    await rig.idle()
