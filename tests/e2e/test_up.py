"""The main job, end to end: client, gateway, 2P + 1D with the demo model, client; over real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio

from tests.e2e.up import Up, is_alive, up

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

MODEL = "omni-demo"
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Up]:
    async with up() as started:
        yield started


async def _metrics(url: str) -> dict[str, float]:
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"{url}/metrics")).text
    lines = [line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def _sum(metrics: dict[str, float], name: str) -> float:
    return sum(value for key, value in metrics.items() if key.partition("{")[0] == name)


async def test_the_printed_command_streams_text(running: Up) -> None:
    await running.line(r"-d '")
    text = "\n".join(running.lines)
    command = text[text.index("curl ") :].split("\n\n")[0].replace("\\\n", " ")
    process = await asyncio.create_subprocess_exec(*shlex.split(command), stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    events = [json.loads(line[6:]) for line in out.decode().splitlines() if line.startswith("data: {")]
    story = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
    assert len(story.split()) > 10, story
    assert out.decode().rstrip().endswith("data: [DONE]")


async def test_official_client_sync_and_async_streamed_and_not(running: Up) -> None:
    settings = {"base_url": f"{running.url}/v1", "api_key": "none"}
    ask = {"model": MODEL, "messages": STORY, "temperature": 0, "max_tokens": 24}

    def in_sync() -> tuple[str, str]:
        with openai.OpenAI(**settings, http_client=httpx.Client(trust_env=False)) as client:
            whole = client.chat.completions.create(**ask)
            parts = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
            texts = [c.choices[0].delta.content or "" for c in parts if c.choices]
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 24
            assert [m.id for m in client.models.list()] == [MODEL]
            return whole.choices[0].message.content or "", "".join(texts)

    whole, streamed = await asyncio.to_thread(in_sync)
    assert whole == streamed
    async with openai.AsyncOpenAI(**settings, http_client=httpx.AsyncClient(trust_env=False)) as client:
        again = await client.chat.completions.create(**ask)
        assert again.choices[0].message.content == whole
        text = ""
        async for chunk in await client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=8, temperature=0, stream=True
        ):
            text += chunk.choices[0].text
        assert text
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="nothing", messages=STORY)
        assert caught.value.code == "model_not_found"


async def test_the_cache_moves_and_the_prompt_is_computed_once(running: Up) -> None:
    urls = running.worker_urls
    before = {name: await _metrics(url) for name, url in urls.items()}
    # Unlike anything before it, so that no prefix of it is cached anywhere.
    words = " ".join(f"{n}{n * 7}" for n in range(100, 160))
    prompt = {"model": MODEL, "prompt": f"{words} Once", "max_tokens": 16, "temperature": 0}
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        answer = (await client.post(f"{running.url}/v1/completions", json=prompt)).json()
        timeline = (await client.get(f"{running.url}/omni/requests")).json()["ended"][0]
    after = {name: await _metrics(url) for name, url in urls.items()}
    tokens = answer["usage"]["prompt_tokens"]

    def rise(name: str, metric: str) -> float:
        return after[name].get(metric, 0.0) - before[name].get(metric, 0.0)

    computed = next(k for k in after["decode-0"] if "prompt_tokens_by_source_total" in k and "local_compute" in k)
    p = timeline["workers"]["prefill"]
    assert rise(p, computed) == tokens
    assert rise("decode-0", computed) <= 1
    sent, received = _sum(after[p], "omni_kv_bytes_sent_total"), _sum(after["decode-0"], "omni_kv_bytes_received_total")
    sent -= _sum(before[p], "omni_kv_bytes_sent_total")
    received -= _sum(before["decode-0"], "omni_kv_bytes_received_total")
    block_bytes = _demo_block_bytes()
    assert sent == received == -(-tokens // 16) * block_bytes


def _demo_block_bytes() -> int:
    """K and V of 16 tokens in every layer, in float32."""
    from omni_proxy.demo import demo_model

    config = json.loads((demo_model() / "config.json").read_text())
    return int(config["num_hidden_layers"] * 2 * 16 * config["num_key_value_heads"] * config["head_dim"] * 4)


async def test_tokens_equal_those_of_one_mixed_worker(running: Up) -> None:
    from tests.e2e.worker import worker

    prompts = ["Once upon a time there was a fox", "What is a spoon for?", "2 + 3 ="]
    async with worker("--role", "mixed") as alone, httpx.AsyncClient(trust_env=False, timeout=60) as client:
        for prompt in prompts:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0, "return_token_ids": True}
            split = (await client.post(f"{running.url}/v1/completions", json=body)).json()
            whole = (await client.post(f"{alone}/v1/completions", json=body)).json()
            assert split["choices"][0]["text"] == whole["choices"][0]["text"]
            assert split["choices"][0]["token_ids"] == whole["choices"][0]["token_ids"]


async def test_timeline_tells_the_ten_stages(running: Up) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        body = {"model": MODEL, "messages": STORY, "max_tokens": 4}
        answer = await client.post(f"{running.url}/v1/chat/completions", json=body, headers={"x-request-id": "ten"})
        assert answer.headers["x-request-id"] == "ten"
        timeline = (await client.get(f"{running.url}/omni/requests/ten")).json()
    assert [s["stage"] for s in timeline["stages"]] == [
        "RECEIVED",
        "TOKENIZING",
        "APC_MATCHING",
        "PREFILL_WAITING",
        "PREFILL_SCHEDULED",
        "PREFILL_RUNNING",
        "DECODE_WAITING",
        "DECODE_SCHEDULED",
        "DECODE_RUNNING",
        "FINISHED",
    ]
    assert timeline["prompt_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert timeline["generated_tokens"] == 4
    assert {p["leg"] for p in timeline["placements"]} == {"prefill", "decode"}


async def test_a_client_that_leaves_ends_the_work_on_the_worker(running: Up) -> None:
    body = {"model": MODEL, "prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(trust_env=False, timeout=60) as client,
        client.stream("POST", f"{running.url}/v1/completions", json=body) as response,
    ):
        async for _ in response.aiter_raw():
            break
    async with asyncio.timeout(10):
        while _sum(await _metrics(running.worker_urls["decode-0"]), "vllm:num_requests_running"):
            await asyncio.sleep(0.05)
        while _sum(await _metrics(running.url), "omni_requests_live"):
            await asyncio.sleep(0.05)


async def test_a_prompt_longer_than_the_context_is_refused_here(running: Up) -> None:
    before = await _metrics(running.worker_urls["prefill-0"])
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "fox " * 9000}]}
        answer = await client.post(f"{running.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert answer.json()["error"]["param"] == "messages"
    after = await _metrics(running.worker_urls["prefill-0"])
    assert _sum(after, "vllm:prompt_tokens_total") == _sum(before, "vllm:prompt_tokens_total")


async def test_a_worker_that_dies_is_started_again(running: Up) -> None:
    """Last of those that share the run: requests wait for the worker that comes back."""
    mark = len(running.lines)
    os.kill(running.worker_pids["decode-0"], signal.SIGKILL)
    await running.line(r"decode-0: ended by signal 9; starting it again", after=mark)
    async with httpx.AsyncClient(trust_env=False, timeout=90) as client:
        body = {"model": MODEL, "messages": STORY, "max_tokens": 4}
        answer = await client.post(f"{running.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    await running.line(r"decode-0: ready on", after=mark)
    async with asyncio.timeout(10):
        while _sum(await _metrics(running.url), "omni_worker_up") < 3:
            await asyncio.sleep(0.05)


async def test_nothing_is_left_behind_even_when_a_worker_is_stuck() -> None:
    async with up("--prefill", "1") as running:
        pids = running.worker_pids
        os.kill(pids["prefill-0"], signal.SIGSTOP)
    assert running.process.returncode == 0
    assert not any(map(is_alive, pids.values()))
    port = int(running.url.rpartition(":")[2])
    with socket.socket() as sock:
        assert sock.connect_ex(("127.0.0.1", port)) != 0


async def test_workers_end_when_the_launcher_is_killed() -> None:
    async with up("--prefill", "1") as running:
        pids = running.worker_pids
        running.process.kill()
        async with asyncio.timeout(15):
            while any(map(is_alive, pids.values())):
                await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "/no/such/folder"], "there is no folder /no/such/folder"),
        (["--prefill", "0"], "must be a whole number from 1 to 64, got '0'"),
        (["--port", "99999"], "must be a port from 0 to 65535, got '99999'"),
        (["--decode", "two"], "must be a whole number from 1 to 64, got 'two'"),
    ],
)
async def test_what_the_user_can_mend_is_one_line(arguments: list[str], said: str) -> None:
    code, text = await _run("up", *arguments)
    assert code == 2
    assert said in text
    assert len(text.splitlines()) == 1


async def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, text = await _run("up", "--port", str(port))
    assert code == 2
    assert re.fullmatch(rf"omni-proxy up: cannot listen on 127\.0\.0\.1:{port}: Address already in use\n", text)


async def test_a_broken_model_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    code, text = await _run("up", "--model", str(tmp_path))
    assert code == 2
    assert "tokenizer.json: no such file" in text
    assert "Traceback" not in text


async def _run(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "omni_proxy", *arguments),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(60):
        _, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, err.decode()
