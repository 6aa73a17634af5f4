"""`omni-proxy up --schedule-mode parallel`: P and D work on a request at the same time, and the answer is the same."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.e2e.up import Up, up
from tests.e2e.worker import worker

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

MODEL = "omni-demo"
LONG = " ".join(f"The fox number {n} met a bear who liked honey." for n in range(110))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Up]:
    async with up("--prefill", "1", "--decode", "1", "--schedule-mode", "parallel") as started:
        yield started


async def ask(url: str, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0, "return_token_ids": True, **fields}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        answer = await client.post(f"{url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        whole: dict[str, Any] = answer.json()
        return whole


async def samples(url: str) -> dict[str, float]:
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"{url}/metrics")).text
    lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {re.sub(r"(engine|model_name)=\"[^\"]*\",?", "", name): float(value) for name, _, value in lines}


async def test_tokens_equal_those_of_one_worker(running: Up) -> None:
    async with worker("--role", "mixed") as alone:
        for prompt in ("Once upon a time there was a fox", LONG):
            split, whole = await ask(running.url, prompt), await ask(alone, prompt)
            assert split["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]


async def test_p_and_d_overlap_in_the_timeline_and_the_push_is_hidden(running: Up) -> None:
    before = await samples(running.worker_urls["prefill-0"])
    answer = await ask(running.url, "Listen: " + LONG)
    assert answer["usage"]["prompt_tokens"] > 1000
    async with httpx.AsyncClient(trust_env=False) as client:
        newest = (await client.get(f"{running.url}/omni/requests")).json()["ended"][0]["id"]
        timeline = (await client.get(f"{running.url}/omni/requests/{newest}")).json()
    assert timeline["mode"] == "parallel"
    stages = {stage["stage"]: stage for stage in timeline["stages"]}
    p, d = stages["PREFILL_RUNNING"], stages["DECODE_RUNNING"]
    overlap = min(_end(p), _end(d)) - max(p["start_s"], d["start_s"])
    assert overlap > 0.5 * p["seconds"]

    after = await samples(running.worker_urls["prefill-0"])
    rise = {key: after[key] - before.get(key, 0.0) for key in after if key.startswith("omni_kv_push")}
    assert rise["omni_kv_pushes_total{}"] == 1
    hidden, exposed = (rise[f'omni_kv_push_seconds_total{{part="{part}"}}'] for part in ("hidden", "exposed"))
    assert hidden > exposed


def _end(stage: dict[str, Any]) -> float:
    return float(stage["start_s"] + stage["seconds"])


async def test_a_call_with_several_answers_still_works(running: Up) -> None:
    answer = await ask(running.url, "Once upon a time", n=2, max_tokens=4)
    assert [len(choice["token_ids"]) for choice in answer["choices"]] == [4, 4]
