"""Speculative prefill with real engines: the next turn's cached tokens rise, with KV events and without."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from omni_proxy.config import parse
from omni_proxy.demo import demo_model
from tests.e2e.worker import worker
from tests.relay.conftest import FAST, Rig, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

FIRST = [{"role": "user", "content": "Tell me a story about a fox, a gate and a river. " * 4}]


@contextlib.asynccontextmanager
async def pair(prewarm: bool, events: bool) -> AsyncIterator[Rig]:
    """A gateway before one P and one D."""
    async with contextlib.AsyncExitStack() as stack:
        common = (
            f"--model={demo_model()}",
            "--served-model-name=omni-demo",
            *(("--kv-events-port=0",) if events else ()),
        )
        begin = [stack.enter_async_context(worker(f"--role={role}", *common)) for role in ("prefill", "decode")]
        urls = [await one for one in begin]
        workers = [
            {"name": name, "url": url, "role": role, "connector": "omni"}
            for name, role, url in zip(("p0", "d0"), ("prefill", "decode"), urls, strict=True)
        ]
        config = {"workers": workers, "prewarm": prewarm, "model": {"path": str(demo_model())}, "health": FAST}
        rig = await stack.enter_async_context(running(parse(config, "test"), {}))
        async with asyncio.timeout(20):
            while sum(w.up for w in rig.gateway.scheduling.workers()) < 2:
                await asyncio.sleep(0.02)
        yield rig


async def second_turn(prewarm: bool, events: bool) -> tuple[int, int, str]:
    """Cached and predicted tokens of a second turn, and its answer."""
    async with pair(prewarm, events) as rig:
        ask: dict[str, Any] = {"model": "omni-demo", "temperature": 0, "max_tokens": 120, "ignore_eos": True}
        first = (await rig.client.post("/v1/chat/completions", json={**ask, "messages": FIRST}, timeout=120)).json()
        counts = rig.gateway.scheduling.core.prewarms()
        async with asyncio.timeout(30):
            while counts is not None and not counts.finished:
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)  # events are on their way
        told = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
        messages = [*FIRST, told, {"role": "user", "content": "And then?"}]
        response = await rig.client.post("/v1/chat/completions", json={**ask, "messages": messages}, timeout=120)
        answer = response.json()
        assert not counts or (counts.used_tokens > 0 and counts.failed == 0)
        known = await rig.timeline(response)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached, known["predicted_tokens"], answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("events", [True, False])
async def test_the_next_turn_finds_the_answer_cached(events: bool) -> None:
    cold, _, text = await second_turn(False, events)
    warm, predicted, same = await second_turn(True, events)
    assert warm >= cold + 64
    assert abs(warm - predicted) <= 32
    assert same == text
