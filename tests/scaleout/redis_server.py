"""A real redis-server (or valkey-server) as a process of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

PROGRAM = shutil.which("valkey-server") or shutil.which("redis-server")
needs_redis = pytest.mark.skipif(PROGRAM is None, reason="no redis-server or valkey-server (Debian: redis-server)")


class RedisServer:
    """One server on one port; it can be ended and started again, and loses everything with that."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.port = int(sock.getsockname()[1])
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        assert PROGRAM is not None
        self._process = await asyncio.create_subprocess_exec(
            *(PROGRAM, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
            *("--dir", str(self._folder)),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            stdin=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", self.port)
                    writer.close()
                    return
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._process = None


@contextlib.asynccontextmanager
async def redis_server(folder: Path) -> AsyncIterator[RedisServer]:
    server = RedisServer(folder)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
