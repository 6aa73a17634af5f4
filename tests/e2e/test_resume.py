"""A decode worker with the real engine is killed in mid-stream: the client reads what it would have read."""

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
from tests.e2e.worker import worker_process
from tests.relay.conftest import FAST, Rig, running

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

NAMES = {"p0": "prefill", "d0": "decode", "d1": "decode"}
ASK = {
    "model": "omni-demo",
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "temperature": 0,
    "max_tokens": 400,
    "ignore_eos": True,
    "stop": ["\n\nTHE END", "dragon and"],
    "stream": True,
    "stream_options": {"include_usage": True},
}


@contextlib.asynccontextmanager
async def pairs() -> AsyncIterator[tuple[Rig, dict[str, int]]]:
    """A gateway before one P and two D, and the pids of these."""
    async with contextlib.AsyncExitStack() as stack:
        common = (f"--model={demo_model()}", "--served-model-name=omni-demo")
        begin = [stack.enter_async_context(worker_process("--role=" + role, *common)) for role in NAMES.values()]
        started = dict(zip(NAMES, [await one for one in begin], strict=True))
        workers = [
            {"name": name, "url": url, "role": NAMES[name], "connector": "omni"} for name, (url, _) in started.items()
        ]
        config = {"workers": workers, "resume": True, "schedule_mode": "sequential", "health": FAST}
        rig = await stack.enter_async_context(running(parse(config, "test"), {}))
        async with asyncio.timeout(20):
            while sum(w.up for w in rig.gateway.scheduling.workers()) < len(NAMES):
                await asyncio.sleep(0.02)
        yield rig, {name: pid for name, (_, pid) in started.items()}


async def tell(rig: Rig, pids: dict[str, int] | None = None) -> tuple[str, Any]:
    """The story and its usage; with `pids`, whoever tells it is killed after 4 chunks."""
    text, usage, chunks = "", None, 0
    async with rig.client.stream("POST", "/v1/chat/completions", json=ASK, timeout=120) as answer:
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            usage = event.get("usage") or usage
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            chunks += 1
            if chunks == 4 and pids is not None:
                (leg,) = rig.edge_exchange().legs.values()
                os.kill(pids[leg.lease.worker], signal.SIGKILL)
    return text, usage


async def test_a_killed_worker_leaves_no_trace_in_the_text() -> None:
    async with pairs() as (rig, pids):
        undisturbed, usage = await tell(rig)
        assert len(undisturbed) > 200
        again, again_usage = await tell(rig, pids)
        assert again == undisturbed
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [again_usage[name] for name in counts] == [usage[name] for name in counts]
        (last, *_) = (await rig.client.get("/omni/requests")).json()["ended"]
        assert last["outcome"] == "completed"
        metrics = (await rig.client.get("/metrics")).text
        assert 'omni_resumes_total{result="continued"} 1.0' in metrics
        await rig.idle()
