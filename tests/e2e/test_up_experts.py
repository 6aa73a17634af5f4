"""`omni-proxy up --expert-parallel 2`: workers of two ranks answer as one without, and the gateway sees their load."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.e2e.up import up
from tests.e2e.worker import worker

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]

PROMPTS = ("Once upon a time there was a fox", "What is a spoon for?", "2 + 3 =")


async def tokens(client: httpx.AsyncClient, url: str, prompt: str) -> list[int]:
    body = {"model": "omni-demo", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    answer = await client.post(f"{url}/v1/completions", json={**body, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


async def seen(client: httpx.AsyncClient, url: str) -> list[dict[str, Any]]:
    """What the gateway tells of experts, once it has asked both workers."""
    async with asyncio.timeout(120):
        while True:
            found: list[dict[str, Any]] = (await client.get(f"{url}/omni/experts")).json()["workers"]
            if len(found) == 2:
                return found
            await asyncio.sleep(0.2)


async def test_ranks_change_no_token_and_are_seen() -> None:
    ranks = ("--expert-parallel", "2", "--expert-window", "4")
    async with (
        httpx.AsyncClient(trust_env=False, timeout=120) as client,
        worker("--role", "mixed") as alone,
        up("--prefill", "1", "--decode", "1", *ranks) as running,
    ):
        for prompt in PROMPTS:
            assert await tokens(client, running.url, prompt) == await tokens(client, alone, prompt)
        found = await seen(client, running.url)
        assert [one["worker"] for one in found] == ["decode-0", "prefill-0"]
        assert all(len(one["layers"]) == 4 and len(one["layers"][0]["tokens"]) == 16 for one in found)
        assert all(one["rank_imbalance"] >= 1 for one in found)
        text = (await client.get(f"{running.url}/metrics")).text
        assert 'omni_expert_imbalance{over="ranks",worker="decode-0"}' in text
