"""Signals and drain, in this process, with a scripted engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from omni_proxy.prompts.chat_template import load_chat_template
from omni_proxy.workers.engine.calls import CallBuilder
from omni_proxy.workers.engine.model_card import ModelCard
from omni_proxy.workers.engine.text import ModelTokenizer
from omni_proxy.workers.engine.worker_life import EXIT_FORCED, EXIT_OK, LauncherWatch, WorkerLife
from omni_proxy.workers.engine.worker_options import WorkerOptions
from tests.workers.server.conftest import new_engine
from tests.workers.server.fake import FakeEngine

STREAM = {"prompt": "hello", "stream": True, "ignore_eos": True}


@pytest.fixture
def own_engine() -> Iterator[FakeEngine]:
    engine = new_engine()
    engine.start()
    yield engine
    engine.stop()


class Running:
    """A worker's life on this test's loop."""

    def __init__(self, engine: FakeEngine, folder: Path, drain_s: float) -> None:
        read, write = os.pipe()
        self._ready_pipe = read
        card = ModelCard(("tiny",), str(folder), 128, 400, 0)
        self._builder = CallBuilder(card, ModelTokenizer.load(folder), load_chat_template(folder))
        options = WorkerOptions(str(folder), drain_s=drain_s, ready_fd=write)
        self._life = WorkerLife(options, engine, self._builder, LauncherWatch(None))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[tuple[httpx.AsyncClient, asyncio.Task[int]]]:
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        task = asyncio.create_task(self._life.run(sock))
        line: dict[str, Any] = json.loads(await asyncio.to_thread(os.read, self._ready_pipe, 1000))
        os.close(self._ready_pipe)
        assert (line["side_channel_port"], line["pid"]) == (5601, os.getpid())
        url = f"http://{line['host']}:{line['port']}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=5, trust_env=False) as http:
                yield http, task
        finally:
            await task
            self._builder.close()


def signal_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_a_signal_ends_an_idle_worker(own_engine: FakeEngine, tokenizer_dir: Path) -> None:
    async with Running(own_engine, tokenizer_dir, 5).serving() as (http, task):
        assert (await http.get("/health")).status_code == 200
        signal_self()
        assert await task == EXIT_OK


async def test_the_drain_has_an_end(own_engine: FakeEngine, tokenizer_dir: Path) -> None:
    own_engine.hold_at = 5
    async with Running(own_engine, tokenizer_dir, 0.3).serving() as (http, task):
        response = await http.send(http.build_request("POST", "/v1/completions", json=STREAM), stream=True)
        lines = response.aiter_lines()
        await anext(lines)
        signal_self()
        rest = [line async for line in lines if line]
        assert "shutting down" in rest[-1]
        assert await task == EXIT_OK


async def test_a_second_signal_forces(own_engine: FakeEngine, tokenizer_dir: Path) -> None:
    own_engine.hold_at = 5
    running = Running(own_engine, tokenizer_dir, 60)
    async with running.serving() as (http, task), http.stream("POST", "/v1/completions", json=STREAM) as response:
        await anext(response.aiter_lines())
        signal_self()
        await asyncio.sleep(0.05)
        assert not task.done()
        signal_self()
        assert await asyncio.wait_for(task, 5) == EXIT_FORCED
    assert own_engine.stats().running == 0


async def lease_and_drain(running: Running, engine: FakeEngine, pull: bool) -> float:
    """Seconds from the signal to the end of a worker that holds leased KV."""
    async with running.serving() as (http, task):
        body = {"prompt": "hello", "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        await http.post("/v1/completions", json=body)
        begun = time.monotonic()
        signal_self()
        if pull:
            await asyncio.sleep(0.4)
            assert not task.done()
            engine.leased.clear()
        assert await task == EXIT_OK
        return time.monotonic() - begun


async def test_leased_kv_is_kept_until_it_is_pulled(own_engine: FakeEngine, tokenizer_dir: Path) -> None:
    assert 0.4 <= await lease_and_drain(Running(own_engine, tokenizer_dir, 30), own_engine, pull=True) < 15


async def test_leased_kv_is_given_up_at_the_end_of_the_drain(own_engine: FakeEngine, tokenizer_dir: Path) -> None:
    assert await lease_and_drain(Running(own_engine, tokenizer_dir, 0.6), own_engine, pull=False) >= 0.6


async def test_a_dead_engine_ends_the_worker(own_engine: FakeEngine, tokenizer_dir: Path) -> None:
    own_engine.hold_at = 5
    running = Running(own_engine, tokenizer_dir, 60)
    async with running.serving() as (http, task), http.stream("POST", "/v1/completions", json=STREAM) as response:
        await anext(response.aiter_lines())
        await asyncio.to_thread(own_engine.stop)
        assert await asyncio.wait_for(task, 5) == EXIT_FORCED
