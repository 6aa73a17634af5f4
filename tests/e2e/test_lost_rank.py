"""A rank of an expert-parallel decode worker is killed under load: every answer is the one that would have come.

The launcher starts the worker again, and it takes load again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from omni_proxy.config import Worker, parse
from omni_proxy.demo import demo_model
from omni_proxy.launcher import Launcher, ProcessPlan, Ready, Report
from omni_proxy.messages import Role
from tests.relay.conftest import FAST, Rig, running

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="ranks are found in /proc"),
]

WAIT_S = 120.0
CLIENTS = 6
PROMPTS = [f"Once upon a time a {animal} met a bear" for animal in ("fox", "cat", "dog", "hen", "pig", "cow")]


class Workers:
    """Workers under a launcher, and a gateway that hears of them as `omni-proxy up` lets it."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.pids: dict[str, int] = {}
        self.urls: dict[str, str] = {}
        self.lives: dict[str, int] = {}

    def report(self) -> Report:
        return Report(lambda plan: None, self._serving, self._lost)

    def _serving(self, plan: ProcessPlan, ready: Ready, seconds: float) -> None:
        url = f"http://{ready.host}:{ready.port}"
        self.pids[plan.name], self.urls[plan.name] = ready.pid, url
        self.lives[plan.name] = self.lives.get(plan.name, 0) + 1
        fields = {"name": plan.name, "url": url, "role": Role(plan.role), "connector": "omni"}
        self.rig.gateway.scheduling.membership.add(Worker.model_validate(fields))

    def _lost(self, plan: ProcessPlan, reason: str) -> None:
        self.rig.gateway.scheduling.membership.lost(plan.name, reason)

    async def up(self, name: str, lives: int) -> None:
        await until(lambda: self.lives.get(name, 0) >= lives, f"life {lives} of {name}")
        await until(
            lambda: any(w.spec.name == name and w.up for w in self.rig.gateway.scheduling.workers()), f"{name} up"
        )

    async def metric(self, name: str, metric: str) -> float:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            return summed((await client.get(self.urls[name] + "/metrics")).text, metric)


def plan(name: str, role: str, *more: str) -> ProcessPlan:
    common = ("worker", f"--role={role}", f"--model={demo_model()}", "--served-model-name=omni-demo")
    return ProcessPlan(name, role, (*common, *more))


@contextlib.asynccontextmanager
async def workers() -> AsyncIterator[Workers]:
    """One P, and two D of which the second has two ranks whose experts move all the time."""
    config = parse({"resume": True, "schedule_mode": "sequential", "health": FAST}, "test")
    async with running(config, {}) as rig:
        found = Workers(rig)
        plans = [plan("p0", "prefill"), plan("d0", "decode")]
        plans.append(plan("d1", "decode", "--expert-parallel=2", "--expert-window=2"))
        launching = asyncio.create_task(Launcher(plans, found.report()).run())
        try:
            for each in plans:
                await found.up(each.name, 1)
            yield found
        finally:
            launching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await launching


async def until(holds: Callable[[], bool], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while not holds():
        assert asyncio.get_running_loop().time() < deadline, f"{what} did not come"
        await asyncio.sleep(0.02)


async def until_rises(read: Callable[[], Awaitable[float]], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + WAIT_S
    while not await read():
        assert asyncio.get_running_loop().time() < deadline, f"{what} did not rise"
        await asyncio.sleep(0.05)


def summed(text: str, metric: str) -> float:
    lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith(metric)]
    return sum(float(value) for name, _, value in lines if name.partition("{")[0] == metric)


async def told(rig: Rig, prompt: str, stream: bool) -> tuple[list[int], str]:
    """The tokens and the reason of the end."""
    body = {"model": "omni-demo", "prompt": prompt, "max_tokens": 80, "temperature": 0, "ignore_eos": True}
    asked = {**body, "stream": stream, "return_token_ids": True}
    answer = await rig.client.post("/v1/completions", json=asked, timeout=WAIT_S)
    assert answer.status_code == 200, answer.text
    chunks: list[dict[str, Any]] = [answer.json()] if not stream else events(answer.text)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [token for choice in choices for token in choice["token_ids"]], choices[-1]["finish_reason"]


def events(text: str) -> list[dict[str, Any]]:
    assert text.endswith("data: [DONE]\n\n"), text[-300:]
    found = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert not any("error" in event for event in found), found[-1]
    return found


def ranks_of(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


class Load:
    """Clients that ask one question after the other, streamed and whole, and compare what they read."""

    def __init__(self, rig: Rig, want: dict[str, tuple[list[int], str]]) -> None:
        self._rig = rig
        self._want = want
        self.over = False
        self.answers = 0

    async def ask(self, number: int) -> None:
        turn = number
        while not self.over:
            prompt = PROMPTS[turn % len(PROMPTS)]
            assert await told(self._rig, prompt, stream=turn % 2 == 0) == self._want[prompt]
            self.answers += 1
            turn += 1 + number  # each client goes through them in another order


async def test_a_lost_rank_costs_no_answer() -> None:
    async with workers() as found:
        rig = found.rig
        want = {prompt: await told(rig, prompt, stream=False) for prompt in PROMPTS}
        assert all(len(tokens) == 80 for tokens, _ in want.values())
        load = Load(rig, want)
        async with asyncio.TaskGroup() as clients:  # one that reads something else ends the test
            for number in range(CLIENTS):
                clients.create_task(load.ask(number))
            await until_rises(lambda: found.metric("d1", "omni_experts_copied_total"), "experts that moved")
            await until_rises(lambda: found.metric("d1", "vllm:num_requests_running"), "requests of d1")
            (rank,) = ranks_of(found.pids["d1"])
            os.kill(rank, signal.SIGKILL)
            await found.up("d1", 2)
            await until_rises(lambda: found.metric("d1", "vllm:generation_tokens_total"), "tokens of the new d1")
            load.over = True
        assert load.answers >= CLIENTS
        metrics = (await rig.client.get("/metrics")).text
        assert summed(metrics, "omni_worker_retries_total") >= 1
        await rig.idle()
