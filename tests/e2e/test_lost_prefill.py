"""A prefill worker with the real engine is killed: before its KV was pulled, and after it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from omni_proxy.config import parse
from omni_proxy.demo import demo_model
from omni_proxy.messages import Leg, RequestRecord, Stage
from tests.e2e.worker import worker_process
from tests.relay.conftest import FAST, Rig, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

NAMES = {"p0": "prefill", "p1": "prefill", "d0": "decode"}
FOX, BEAR = "Tell me a story about a fox.", "Tell me a story about a bear."


@contextlib.asynccontextmanager
async def cluster() -> AsyncIterator[tuple[Rig, dict[str, int]]]:
    """A gateway before two P and a D that takes one request at a time, and their pids."""
    async with contextlib.AsyncExitStack() as stack:
        common = (f"--model={demo_model()}", "--served-model-name=omni-demo")
        begin = [stack.enter_async_context(worker_process("--role=" + role, *common)) for role in NAMES.values()]
        started = dict(zip(NAMES, [await one for one in begin], strict=True))
        workers = [
            {"name": name, "url": url, "role": NAMES[name], "connector": "omni", "max_seqs": 1 if name == "d0" else 8}
            for name, (url, _) in started.items()
        ]
        config = {"workers": workers, "schedule_mode": "sequential", "health": FAST | {"timeout_s": 20.0}}
        rig = await stack.enter_async_context(running(parse(config, "test"), {}))
        async with asyncio.timeout(60):
            while sum(w.up for w in rig.gateway.scheduling.workers()) < len(NAMES):
                await asyncio.sleep(0.02)
        yield rig, {name: pid for name, (_, pid) in started.items()}


def asking(text: str, tokens: int, stream: bool = False) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    fields = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    return {"model": "omni-demo", "messages": messages, **fields}


async def whole(rig: Rig, text: str, tokens: int) -> tuple[str, Any]:
    """An answer, and its request's timeline."""
    answer = await rig.client.post("/v1/chat/completions", json=asking(text, tokens), timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], await rig.timeline(answer)


async def pieces(rig: Rig, text: str, tokens: int) -> AsyncIterator[str]:
    """A stream's content, piece by piece."""
    asked = asking(text, tokens, stream=True)
    async with rig.client.stream("POST", "/v1/chat/completions", json=asked, timeout=120) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                yield "".join(choice["delta"].get("content") or "" for choice in event["choices"])


async def waiting(rig: Rig) -> RequestRecord:
    """The request whose prompt is computed and that has no D yet."""
    async with asyncio.timeout(60):
        while True:
            for record in rig.gateway.scheduling.core.records():
                if record.marks[-1][0] is Stage.DECODE_WAITING:
                    return record
            await asyncio.sleep(0.005)


def prefill_of(record: RequestRecord) -> str:
    return [placement.worker for placement in record.placements if placement.leg is Leg.PREFILL][-1]


async def test_a_killed_prefill_worker_leaves_no_trace_in_the_text() -> None:
    async with cluster() as (rig, pids):
        undisturbed, _ = await whole(rig, BEAR, 24)
        long = pieces(rig, FOX, 1500)
        await anext(long)
        other = asyncio.create_task(whole(rig, BEAR, 24))
        lost = prefill_of(await waiting(rig))
        os.kill(pids[lost], signal.SIGKILL)
        await long.aclose()  # type: ignore[attr-defined]  # its D is free, and finds nobody to pull from
        text, timeline = await other
        assert text == undisturbed
        computed = [p["worker"] for p in timeline["placements"] if p["leg"] == "prefill"]
        assert (computed[0], computed[-1]) == (lost, *({"p0", "p1"} - {lost}))

        undisturbed, _ = await whole(rig, FOX, 400)
        text, count = "", 0
        async for piece in pieces(rig, FOX, 400):
            text, count = text + piece, count + 1
            if count == 3:  # several tokens come in one
                (record,) = rig.gateway.scheduling.core.records()
                os.kill(pids[prefill_of(record)], signal.SIGKILL)
        assert text == undisturbed
        await rig.idle()
