"""`python -m benchmarks.prewarm --live`: conversations with real processes, their first tokens with and without.

Workers are simulated engines behind real sockets (`omni-proxy worker --simulate`), the gateway is the real one.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx

from benchmarks.routing.words import write_word_model
from omni_proxy.sim.bench.prompts import WORDS
from omni_proxy.sim.live import LivePlan, cluster

TURNS: Final = 4
THINK_S: Final = 1.0
PROMPT, ANSWER = 500, 400


def live(conversations: int, preset: str, say: Callable[[str], None]) -> None:
    """Print a line for each of off and on."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_word_model(folder)
        for on in (False, True):
            gateway = {"prewarm": on, "model": {"path": str(folder)}}
            workers = ("--simulate", preset, "--block-size", "64")
            with cluster(LivePlan(2, 2, workers, gateway)) as running:
                waits, cached, metrics = asyncio.run(_converse(running.url, conversations))
            later = [wait for turn in waits[1:] for wait in turn]
            text = f"TTFT first {_mean(waits[0]):.0f} ms, turns 2+ {_mean(later):.0f} ms"
            say(f"prewarm {'on' if on else 'off'}: {text}, cached of turns 2+ {_mean(cached) / 1000:.1%}{metrics}")


async def _converse(url: str, conversations: int) -> tuple[list[list[float]], list[float], str]:
    waits: list[list[float]] = [[] for _ in range(TURNS)]
    cached: list[float] = []
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        await asyncio.gather(*(_conversation(client, n, waits, cached) for n in range(conversations)))
        lines = (await client.get("/metrics")).text.splitlines()
    shown = [
        line.removeprefix("omni_prewarm_") for line in lines if line.startswith("omni_prewarm_") and "total" in line
    ]
    return waits, cached, "".join(f"\n    {line}" for line in shown)


async def _conversation(client: httpx.AsyncClient, number: int, waits: list[list[float]], cached: list[float]) -> None:
    chance = random.Random(number)
    messages: list[dict[str, str]] = []
    await asyncio.sleep(chance.uniform(0, 2 * TURNS * THINK_S))
    for turn in range(TURNS):
        words = " ".join(f"w{chance.randrange(WORDS)}" for _ in range(PROMPT))
        messages.append({"role": "user", "content": words})
        asked = {"model": "simulated", "messages": messages, "max_tokens": ANSWER, "stream": True}
        body: dict[str, Any] = {**asked, "stream_options": {"include_usage": True}}
        begun, first, text = time.perf_counter(), 0.0, ""
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = httpx.Response(200, content=line[6:]).json()
                for choice in chunk["choices"]:
                    text += choice["delta"].get("content") or ""
                if text and not first:
                    first = time.perf_counter() - begun
                usage = chunk.get("usage")
                if usage and turn:
                    cached.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
        waits[turn].append(first)
        messages.append({"role": "assistant", "content": text})
        await asyncio.sleep(chance.expovariate(1 / THINK_S))


def _mean(values: list[float]) -> float:
    return 1000 * sum(values) / max(1, len(values))
