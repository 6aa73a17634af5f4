"""`omni-proxy serve` as a process: signals and the access log, as nginx's operators know them."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.nginx.rig import CHAT, entry, in_process, served, started, until
from tests.relay.scripted import DONE, ScriptedWorker, Seen, decode_stream, event, prefill_ok

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

COMBINED = re.compile(
    r"127\.0\.0\.1 - - \[\d\d/\w{3}/\d{4}:\d\d:\d\d:\d\d [+-]\d{4}\] "
    r'"POST /v1/chat/completions HTTP/1\.1" 200 \d+ "-" "test agent"'
)


class Held:
    """A mixed worker whose streams begin and then wait."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.worker = ScriptedWorker(self._script)

    async def _script(self, seen: Seen) -> None:
        await seen.open_stream()
        await seen.chunk(event("first"))
        await self.go_on.wait()
        await seen.chunk(event("last") + DONE)
        await seen.end_stream()


class Stream:
    """A stream that is being read."""

    def __init__(self, port: int) -> None:
        self.begun = asyncio.Event()
        self.got = b""
        self.task = asyncio.create_task(self._read(f"http://127.0.0.1:{port}/v1/chat/completions"))

    async def _read(self, url: str) -> None:
        body = {**CHAT, "stream": True}
        async with httpx.AsyncClient(trust_env=False) as client, client.stream("POST", url, json=body) as answer:
            async for chunk in answer.aiter_raw():
                self.got += chunk
                self.begun.set()

    async def is_cut(self) -> None:
        """It ends, and does not look whole."""
        with pytest.raises(httpx.RemoteProtocolError):
            await self.task
        assert not self.got.endswith(DONE)


async def test_sigterm_finishes_what_runs_and_takes_nothing_new(tmp_path: Path) -> None:
    held = Held()
    async with started(m0=held.worker), served(tmp_path, {"workers": [entry("m0", held.worker)]}) as gateway:
        stream = Stream(gateway.port)
        await stream.begun.wait()
        gateway.signal(signal.SIGTERM)
        await refused(gateway.port)
        held.go_on.set()
        await stream.task
        assert stream.got == event("first") + event("last") + DONE
        assert await gateway.ended() == 0


async def test_a_second_signal_ends_a_drain(tmp_path: Path) -> None:
    held = Held()
    async with started(m0=held.worker):
        config = {"workers": [entry("m0", held.worker)], "timeouts": {"drain_s": 60}}
        async with served(tmp_path, config) as gateway:
            stream = Stream(gateway.port)
            await stream.begun.wait()
            gateway.signal(signal.SIGTERM)
            await refused(gateway.port)
            gateway.signal(signal.SIGTERM)
            await stream.is_cut()
            assert await gateway.ended() == 0
        held.go_on.set()


async def test_a_drain_takes_its_time_and_no_more() -> None:
    held = Held()
    async with started(m0=held.worker):
        config = {"workers": [entry("m0", held.worker)], "timeouts": {"drain_s": 1}}
        async with in_process(config, force_at_end=False) as (_, port):
            stream = Stream(port)
            await stream.begun.wait()
        await stream.is_cut()
        held.go_on.set()


async def refused(port: int) -> None:
    """Wait until nobody listens any more."""
    async with asyncio.timeout(10):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                return
            writer.transport.abort()


async def ask(port: int, request_id: str) -> None:
    headers = {"user-agent": "test agent", "x-request-id": request_id}
    async with httpx.AsyncClient(trust_env=False) as client:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        answer = await client.post(url, json={**CHAT, "stream": True}, headers=headers)
        assert answer.status_code == 200


def lines(*paths: Path) -> list[str]:
    """What the files hold together; one that is not there holds nothing."""
    return [line for path in paths if path.exists() for line in path.read_text().splitlines()]


async def test_the_log_in_json(tmp_path: Path) -> None:
    log = tmp_path / "access.log"
    async with started(p0=ScriptedWorker(prefill_ok), d0=ScriptedWorker(decode_stream)) as workers:
        config = {"workers": [entry(n, w) for n, w in workers.items()], "access_log": {"path": str(log)}}
        async with in_process(config) as (_, port):
            await ask(port, "mine")
            await until(lambda: len(lines(log)) == 1)
            line = json.loads(*lines(log))
    assert (line["id"], line["client"], line["status"], line["outcome"]) == ("mine", "127.0.0.1", 200, "completed")
    assert line["request"] == "POST /v1/chat/completions"
    assert line["workers"] == ["prefill:p0", "decode:d0"]
    assert line["decode_running_s"] >= 0
    assert str(workers["d0"].port) not in json.dumps(line), "no address of a worker"


@pytest.mark.parametrize("processes", [1, 2])
async def test_the_combined_log_and_its_rotation(tmp_path: Path, processes: int) -> None:
    """Moved away, the file is still written to; after SIGUSR1 a new one is."""
    log, moved = tmp_path / "access.log", tmp_path / "access.log.1"
    async with started(m0=ScriptedWorker(decode_stream)) as workers:
        access_log = {"path": str(log), "format": "combined"}
        config = {"workers": [entry("m0", workers["m0"])], "access_log": access_log, "processes": processes}
        async with served(tmp_path, config) as gateway:
            await ask(gateway.port, "a")
            await until(lambda: len(lines(log)) == 1)
            log.rename(moved)
            await ask(gateway.port, "b")
            await until(lambda: len(lines(moved)) == 2)
            assert not log.exists()
            gateway.signal(signal.SIGUSR1)
            asked = 2
            # With several fronts, each opens the new file when the signal reaches it.
            while not lines(log):
                await ask(gateway.port, "c")
                asked += 1
            await until(lambda: len(lines(moved, log)) == asked)
            assert all(map(COMBINED.fullmatch, lines(moved, log)))


async def test_the_log_on_standard_output(tmp_path: Path) -> None:
    config: dict[str, Any] = {"access_log": {"path": "-", "format": "combined"}, "processes": 2}
    async with started(m0=ScriptedWorker(decode_stream)) as workers:
        config["workers"] = [entry("m0", workers["m0"])]
        async with served(tmp_path, config, asyncio.subprocess.PIPE) as gateway:
            await ask(gateway.port, "a")
            assert gateway.process.stdout is not None
            async with asyncio.timeout(10):
                line = await gateway.process.stdout.readline()
            assert COMBINED.fullmatch(line.decode().rstrip()), line
