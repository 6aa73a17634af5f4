"""`processes: 3` as real processes: a limit is one for all of them, and so are keys that change."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from omni_proxy.access.keys import hash_key, make_key
from tests.relay.raw import RawClient, chat, post
from tests.relay.scripted import ScriptedWorker, decode_stream, prefill_ok

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
KEY = make_key()


async def statuses(port: int, count: int, key: str = KEY) -> list[int]:
    """Each on a connection of its own: the kernel spreads those over the fronts."""

    async def one() -> int:
        client = await RawClient.open(port)
        await client.send(post(chat(), f"authorization: Bearer {key}\r\n"))
        status = (await client.response()).status
        client.close()
        return status

    return [await one() for _ in range(count)]


async def test_fronts_count_together(tmp_path: Path) -> None:
    workers = {"prefill": ScriptedWorker(prefill_ok), "decode": ScriptedWorker(decode_stream)}
    for worker in workers.values():
        await worker.start()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    path = tmp_path / "omni.yaml"

    def write(key: str, limit: int) -> None:
        config: dict[str, Any] = {
            "listen": {"port": port},
            "processes": 3,
            "access": {"tenants": {"alice": {"keys": [hash_key(key)], "requests_per_minute": limit}}},
            "workers": [
                {"name": role, "url": f"http://127.0.0.1:{worker.port}", "role": role}
                for role, worker in workers.items()
            ],
        }
        path.write_text(json.dumps(config))

    write(KEY, 20)
    command = (sys.executable, "-m", "omni_proxy", "serve", "-c", str(path), "--log-level", "warning")
    process = await asyncio.create_subprocess_exec(*command)
    try:
        await _ready(port)
        found = await statuses(port, 26)
        assert found == [200] * 20 + [429] * 6
        other = make_key()
        write(other, 25)
        process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(20):
            while set(await statuses(port, 8)) != {401}:
                await asyncio.sleep(0.1)
        assert await statuses(port, 7, other) == [200] * 5 + [429] * 2
    finally:
        process.terminate()
        assert await process.wait() == 0
        for worker in workers.values():
            await worker.stop()


async def _ready(port: int) -> None:
    async with asyncio.timeout(40), httpx.AsyncClient(trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await client.get(f"http://127.0.0.1:{port}/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.05)
