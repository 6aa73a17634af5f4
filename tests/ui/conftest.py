"""A gateway whose page is looked at: scripted workers, some traffic, and one worker that counts tokens by expert."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from tests.relay.conftest import Rig, pytest_asyncio_loop_factories, start
from tests.relay.scripted import DONE, Script, Seen, event, prefill_answer, usage_event

__all__ = ["pytest_asyncio_loop_factories", "start"]

TOKEN = "operators-secret"
ADMIN = {"admin": {"port": 0, "token": TOKEN}}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A browser is started only where it is asked for by its marker (`-m browser`)."""
    if "browser" not in config.option.markexpr:
        items[:] = [item for item in items if item.get_closest_marker("browser") is None]


@asynccontextmanager
async def admin(rig: Rig, token: str | None = TOKEN, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the admin port."""
    shown = headers | ({} if token is None else {"authorization": f"Bearer {token}"})
    async with httpx.AsyncClient(base_url=admin_url(rig), headers=shown, trust_env=False, timeout=10) as client:
        yield client


def admin_url(rig: Rig) -> str:
    server = rig.gateway.scheduling.admin
    assert server is not None
    return f"http://127.0.0.1:{server.port}"


def slow_prefill(seed: int) -> Script:
    """P that needs a while, and knows a part of most prompts."""
    rng = random.Random(seed)

    async def prefill(seen: Seen) -> None:
        await asyncio.sleep(rng.uniform(0.02, 0.3))
        prompt = rng.randint(200, 3000)
        await seen.answer(200, prefill_answer(cached=rng.choice((0, prompt // 3, prompt * 3 // 4)), prompt=prompt))

    return prefill


def slow_decode(seed: int) -> Script:
    """D that streams word by word."""
    rng = random.Random(seed)

    async def decode(seen: Seen) -> None:
        await seen.open_stream()
        await seen.chunk(event(role="assistant", content=""))
        await asyncio.sleep(rng.uniform(0.01, 0.05))
        count = rng.randint(10, 60)
        for _ in range(count):
            await seen.chunk(event("word "))
            await asyncio.sleep(0.008)
        await seen.chunk(event("", finish="stop"))
        await seen.chunk(usage_event(count))
        await seen.chunk(DONE)
        await seen.end_stream()

    return decode


def expert_counters(layers: int, experts: int, seed: int = 0, scale: float = 1.0) -> dict[str, bytes]:
    """What a worker with a mixture of experts tells: skewed loads, one idle expert in each third layer."""
    rng = random.Random(seed)
    rows = [
        [
            0 if layer % 3 == 0 and expert == layer % experts else int(scale * 1000 * rng.paretovariate(2.2))
            for expert in range(experts)
        ]
        for layer in range(layers)
    ]
    mark = b'# TYPE omni_expert_tokens counter\nomni_expert_tokens_total{expert="0",layer="0"} 1.0\n'
    return {"/metrics": mark, "/omni/experts": json.dumps({"tokens": rows}).encode()}


def vllm_metrics(kv_tokens: int) -> bytes:
    """What a worker says of its KV cache."""
    blocks = f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="{kv_tokens // 16}"}} 1.0'
    return f"# TYPE vllm:cache_config_info gauge\n{blocks}\n".encode()


@asynccontextmanager
async def traffic(rig: Rig, each_s: float, ids: tuple[str, ...] = ()) -> AsyncIterator[None]:
    """Streamed requests, one after another, until the context ends."""

    async def ask(request_id: str) -> None:
        body: dict[str, Any] = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Tell me."}]}
        with contextlib.suppress(httpx.HTTPError):
            headers = {"x-request-id": request_id}
            async with rig.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
                async for _ in answer.aiter_raw():
                    pass

    async def run() -> None:
        number, rng = 0, random.Random(5)
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(ask(ids[number] if number < len(ids) else f"chat-{number:04d}"))
                number += 1
                await asyncio.sleep(rng.expovariate(1 / each_s))

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def artefacts() -> str:
    """Where screenshots go; ignored by git."""
    folder = os.path.join(os.path.dirname(__file__), "artefacts")
    os.makedirs(folder, exist_ok=True)
    return folder
