"""`processes: 2` as real processes: each part is killed while streams run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.relay.scripted import DONE, ScriptedWorker, Seen, decode_stream, event, prefill_ok

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


class Running:
    """A supervisor with its children, before one P and one D."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, release: asyncio.Event) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.release = release
        """Lets the streams of D end."""

    def children(self) -> dict[str, int]:
        """Pids of the children by command; only ours: their parent is our supervisor."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                pid = int(entry.name)
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                words = (entry / "cmdline").read_bytes().split(b"\0")
                kind = next((w.decode() for w in words if w in (b"_front", b"_scheduler")), None)
                if int(stat[1]) == self.process.pid and stat[0] != "Z" and kind is not None:
                    found[f"{kind}{sum(k.startswith(kind) for k in found)}"] = pid
        return found

    async def wait_for_children(self, without: int) -> None:
        """Until all three are there again, and one that was killed is not."""
        async with asyncio.timeout(20):
            while len(pids := self.children()) < 3 or without in pids.values():
                await asyncio.sleep(0.05)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    release = asyncio.Event()

    async def decode(seen: Seen) -> None:
        if not seen.json.get("stream"):
            await decode_stream(seen)
            return
        await seen.open_stream()
        await seen.chunk(event("first"))
        await release.wait()
        await seen.chunk(event("last"))
        await seen.chunk(DONE)
        await seen.end_stream()

    p, d = ScriptedWorker(prefill_ok), ScriptedWorker(decode)
    await p.start()
    await d.start()
    port = _free_port()
    config = tmp_path / "omni.yaml"
    workers = [
        {"name": "p0", "url": f"http://127.0.0.1:{p.port}", "role": "prefill"},
        {"name": "d0", "url": f"http://127.0.0.1:{d.port}", "role": "decode"},
    ]
    listen = {"host": "127.0.0.1", "port": port}
    config.write_text(json.dumps({"listen": listen, "processes": 2, "workers": workers}))
    command = (sys.executable, "-m", "omni_proxy", "serve", "-c", str(config), "--log-level", "warning")
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, stderr=log)
    try:
        yield await _ready(Running(process, port, release))
    finally:
        release.set()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        async with asyncio.timeout(30):
            assert await process.wait() == 0
        await p.stop()
        await d.stop()


async def _ready(running: Running) -> Running:
    async with asyncio.timeout(30), httpx.AsyncClient(trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"{running.url}/ready")).status_code == 200:
                    return running
            await asyncio.sleep(0.05)


def _free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def _stream(running: Running, begun: asyncio.Event) -> bytes:
    """One stream on a connection of its own; what came of it, or b"" when it broke."""
    got = b""
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        try:
            request = client.stream("POST", f"{running.url}/v1/chat/completions", json={**BODY, "stream": True})
            async with request as response:
                async for part in response.aiter_raw():
                    got += part
                    begun.set()
        except httpx.HTTPError:
            return b""
        finally:
            begun.set()
    return got


async def _begin(running: Running, count: int) -> list[asyncio.Task[bytes]]:
    begun = [asyncio.Event() for _ in range(count)]
    tasks = [asyncio.create_task(_stream(running, b)) for b in begun]
    for each in begun:
        await asyncio.wait_for(each.wait(), 20)
    return tasks


async def _ask(running: Running) -> httpx.Response:
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        return await client.post(f"{running.url}/v1/chat/completions", json=BODY)


async def _idle(running: Running) -> None:
    async with asyncio.timeout(10), httpx.AsyncClient(trust_env=False) as client:
        while True:
            workers = (await client.get(f"{running.url}/omni/workers")).json()["workers"]
            if all(w["sequences"] == w["kv_tokens"] == w["prefill_tokens"] == 0 for w in workers):
                return
            await asyncio.sleep(0.05)


async def test_a_killed_scheduler_costs_no_request(running: Running) -> None:
    streams = await _begin(running, 8)
    killed = running.children()["_scheduler0"]
    os.kill(killed, signal.SIGKILL)
    # Begun while nobody schedules, served by the next scheduler.
    asked = asyncio.create_task(_ask(running))
    await running.wait_for_children(without=killed)
    assert (await asked).status_code == 200
    await _ready(running)
    async with httpx.AsyncClient(trust_env=False) as client:
        workers = (await client.get(f"{running.url}/omni/workers")).json()["workers"]
    assert sum(w["sequences"] for w in workers) == 8, "the new scheduler does not know what runs"
    running.release.set()
    whole = event("first") + event("last") + DONE
    assert await asyncio.gather(*streams) == [whole] * 8
    await _idle(running)


async def test_a_killed_front_takes_only_its_own_clients(running: Running) -> None:
    streams = await _begin(running, 12)
    killed = running.children()["_front0"]
    os.kill(killed, signal.SIGKILL)
    await running.wait_for_children(without=killed)
    running.release.set()
    got = await asyncio.gather(*streams)
    whole = event("first") + event("last") + DONE
    assert set(got) <= {whole, b""}
    assert whole in got, "the other front's clients were hurt"
    assert (await _ask(running)).status_code == 200
    await _idle(running)


async def test_a_normal_end_is_nothing_to_warn_of(running: Running, tmp_path: Path) -> None:
    streams = await _begin(running, 4)
    running.process.terminate()
    running.release.set()
    assert all(body.endswith(DONE) for body in await asyncio.gather(*streams))
    async with asyncio.timeout(30):
        assert await running.process.wait() == 0
    assert (tmp_path / "log").read_text() == ""


async def test_what_runs_is_finished_before_the_end(running: Running) -> None:
    streams = await _begin(running, 4)
    running.process.terminate()
    async with asyncio.timeout(20):
        while await _accepts(running):
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)
    assert not any(stream.done() for stream in streams)
    running.release.set()
    assert all(body.endswith(DONE) for body in await asyncio.gather(*streams))
    async with asyncio.timeout(30):
        assert await running.process.wait() == 0


async def test_a_second_signal_ends_what_runs(running: Running) -> None:
    streams = await _begin(running, 4)
    running.process.terminate()
    async with asyncio.timeout(20):
        while await _accepts(running):
            await asyncio.sleep(0.05)
    assert not any(stream.done() for stream in streams)
    running.process.terminate()
    assert not any(body.endswith(DONE) for body in await asyncio.gather(*streams))
    async with asyncio.timeout(30):
        assert await running.process.wait() == 0


async def _accepts(running: Running) -> bool:
    """Does anybody still take connections?"""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rpartition(":")[2]))
    except OSError:
        return False
    writer.close()
    return True


async def test_both_fronts_answer_about_everything(running: Running) -> None:
    for _ in range(12):
        answer = await _ask(running)
        assert answer.status_code == 200
        async with httpx.AsyncClient(trust_env=False) as client:
            timeline = await client.get(f"{running.url}/omni/requests/{answer.headers['x-request-id']}")
            assert timeline.json()["outcome"] == "completed"
            assert (await client.get(f"{running.url}/v1/models")).json()["data"][0]["id"] == "m"
            assert "omni_requests_total" in (await client.get(f"{running.url}/metrics")).text
            assert (await client.get(f"{running.url}/nowhere")).json()["error"]["code"] == "not_found"


async def test_any_front_answers_a_scrape_for_all(running: Running) -> None:
    count = 6
    tasks = await _begin(running, count)
    running.release.set()
    assert all(await asyncio.gather(*tasks))
    ended = 'omni_requests_total{endpoint="/v1/chat/completions",error="",outcome="completed"}'
    async with asyncio.timeout(20):
        while True:
            async with httpx.AsyncClient(trust_env=False, timeout=30) as client:  # a connection each: any front
                text = (await client.get(f"{running.url}/metrics")).text
            values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
            if float(values[ended]) == count and float(values["omni_itl_seconds_count"]) >= count:
                break
            await asyncio.sleep(0.1)
