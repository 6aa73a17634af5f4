"""Many streams, clients that leave at any moment, workers that are killed: in the end nothing is held by anybody."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import resource
from collections import Counter
from dataclasses import dataclass

import pytest

from tests.relay.conftest import Rig, config_of, running
from tests.relay.light import WHOLE, LightWorker
from tests.relay.raw import RawClient, Response, chat, post
from tests.relay.scripted import DONE

ANSWER_LIMIT_S = 120.0
START_S = 2.0
"""Over so long the users come."""
KV_LEASE_S = 2.0
"""What nobody pulled is load for so long."""
FILES_PER_STREAM = 8
"""Both ends of the client's connection and of one to a worker, with room for those that are being closed."""


def kind_of(answer: Response) -> str:
    """How a request ended for a client that stayed. Anything but these is a failed test."""
    if answer.status != 200:
        assert answer.status in (429, 502, 503, 504), answer
        assert answer.error["code"]
        return "refused"
    if answer.header("content-type") == "application/json":
        assert answer.clean
        assert answer.body == WHOLE
        return "whole"
    if answer.clean:
        assert answer.body.endswith(DONE)
        return "whole"
    last = answer.body.rstrip().rpartition(b"\n\n")[2]
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"], answer
    return "broken"


@dataclass(frozen=True)
class Load:
    """How many users, how many streams at once, of how many tokens, a token each `tick_s`, and how often a worker is
    killed. Some users are always between two streams, so there are a few more of them."""

    users: int
    streams: int
    seconds: float
    tokens: int
    tick_s: float
    kill_every_s: float


class Soak:
    """Users that ask again and again, and somebody who kills workers."""

    def __init__(self, rig: Rig, workers: dict[str, LightWorker], load: Load, seed: int) -> None:
        self._rig = rig
        self._workers = workers
        self._load = load
        self._random = random.Random(seed)
        self.tally: Counter[str] = Counter()
        self.unanswered: list[str] = []
        self.most = 0

    async def run(self) -> None:
        users = self._load.users
        over = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._killer(over))
            tasks.create_task(self._watcher(over))
            for index in range(users):
                tasks.create_task(self._user(over, START_S * index / users))
            await asyncio.sleep(self._load.seconds)
            over.set()

    async def _user(self, over: asyncio.Event, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        while not over.is_set():
            client = await RawClient.open(self._rig.port)
            tokens = self._random.randint(1, self._load.tokens)
            await client.send(post(chat(stream=self._random.random() < 0.9, max_tokens=tokens)))
            if self._random.random() < 0.2:
                await asyncio.sleep(self._random.random() * tokens * self._load.tick_s)
                client.reset() if self._random.random() < 0.5 else client.close()
                self.tally["left"] += 1
                continue
            await self._answer(client)
            client.close()

    async def _answer(self, client: RawClient) -> None:
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                self.tally[kind_of(await client.response())] += 1
        except (TimeoutError, ConnectionError, EOFError, AssertionError) as exc:
            self.unanswered.append(f"{type(exc).__name__}: {exc}"[:500])

    async def _killer(self, over: asyncio.Event) -> None:
        while not over.is_set():
            await asyncio.sleep(self._load.kill_every_s)
            worker = self._workers[self._random.choice(sorted(self._workers))]
            await worker.stop()
            self.tally["killed"] += 1
            await asyncio.sleep(0.3)
            await worker.start()

    async def _watcher(self, over: asyncio.Event) -> None:
        while not over.is_set():
            self.most = max(self.most, len(self._rig.gateway.front.edge.exchanges))
            self._rig.gateway.scheduling.core.check()
            await asyncio.sleep(0.1)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def settles(count: int) -> bool:
    """Wait until no more files are open than before."""
    async with asyncio.timeout(15):
        while open_files() > count:
            await asyncio.sleep(0.05)
    return True


async def nothing_is_held(rig: Rig) -> None:
    await rig.idle()
    async with asyncio.timeout(2 * KV_LEASE_S):
        while any(worker.kv_tokens for worker in rig.gateway.scheduling.workers()):
            await asyncio.sleep(0.05)
    text = (await rig.client.get("/metrics")).text
    held = (
        "requests_live",
        "queue_requests",
        "queue_tokens",
        *(f"worker_{w}" for w in ("sequences", "prefill_tokens", "kv_tokens")),
    )
    lines = [line for line in text.splitlines() if line.startswith(tuple(f"omni_{name}" for name in held))]
    assert len(lines) == 3 + 3 * 4, text
    assert all(float(line.rsplit(" ", 1)[1]) == 0 for line in lines), lines


SHORT = Load(users=150, streams=120, seconds=5.0, tokens=30, tick_s=0.05, kill_every_s=0.5)
LONG = Load(users=2300, streams=2000, seconds=60.0, tokens=40, tick_s=1.0, kill_every_s=5.0)


def allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count:
        pytest.skip(f"needs {count} open files, {hard} are allowed")
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(SHORT, marks=pytest.mark.slow, id="short"),
        pytest.param(LONG, marks=[pytest.mark.soak, pytest.mark.timeout(400)], id="long"),
    ],
)
@pytest.mark.parametrize("pumps", [True, False], ids=["pump", "python"])
async def test_soak(load: Load, pumps: bool) -> None:
    allow_files(load.users * FILES_PER_STREAM)
    workers = {name: LightWorker(name.startswith("d"), load.tick_s) for name in ("p0", "p1", "d0", "d1")}
    for worker in workers.values():
        await worker.start()
    each = {name: {"max_seqs": 4096, "max_batch_tokens": 10_000_000, "kv_lease_s": KV_LEASE_S} for name in workers}
    settings = {"each": each, "keepalive": {"idle_s": 0.5}, "health": {"fail_timeout_s": 0.2}}
    try:
        async with running(config_of(workers, settings), {}, pumps) as rig:
            async with asyncio.timeout(10):
                while sum(w.up for w in rig.gateway.scheduling.workers()) < len(workers):
                    await asyncio.sleep(0.01)
            assert (await rig.client.get("/health")).status_code == 200
            before = open_files()
            soak = Soak(rig, workers, load, seed=1)
            await soak.run()
            print(f"{dict(soak.tally)}, at most {soak.most} at once")  # noqa: T201 - the soak's result
            assert not soak.unanswered, (len(soak.unanswered), soak.unanswered[:3])
            await nothing_is_held(rig)
            gc.collect()
            assert await settles(before)
            assert all(not worker.streams for worker in workers.values())
            assert soak.most >= load.streams
            assert soak.tally["whole"] > load.users // 2
            assert all(soak.tally[kind] for kind in ("left", "killed", "broken")), soak.tally
    finally:
        for worker in workers.values():
            await worker.stop()
