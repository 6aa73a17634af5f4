"""A gateway on a real socket, in this process or as a process of its own, before scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx

from omni_proxy.api.serving import listening_socket
from omni_proxy.build import Gateway
from omni_proxy.config import parse
from tests.relay.scripted import Script, ScriptedWorker

HEALTH = {"interval_s": 0.05, "timeout_s": 2.0, "failures_down": 1}
ROLES = {"p": "prefill", "d": "decode", "m": "mixed"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class TlsWorker(ScriptedWorker):
    """A scripted worker that speaks HTTPS."""

    def __init__(self, script: Script, tls: ssl.SSLContext) -> None:
        super().__init__(script)
        self._tls = tls

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]


def entry(name: str, worker: ScriptedWorker, scheme: str = "http", **more: Any) -> dict[str, Any]:
    """A worker of a config; the first letter of its name says the role."""
    role = ROLES[name[0]]
    connector = {"connector": "aggregated"} if role == "mixed" else {}
    return {"name": name, "url": f"{scheme}://127.0.0.1:{worker.port}", "role": role, **connector, **more}


@contextlib.asynccontextmanager
async def started(**workers: ScriptedWorker) -> AsyncIterator[dict[str, ScriptedWorker]]:
    """Workers that listen for as long as the block lasts."""
    try:
        for worker in workers.values():
            await worker.start()
        yield workers
    finally:
        for worker in workers.values():
            await worker.stop()


@contextlib.asynccontextmanager
async def in_process(config: dict[str, Any], force_at_end: bool = True) -> AsyncIterator[tuple[Gateway, int]]:
    """A gateway on this event loop, all of whose workers are up; yields it with its port.

    At the end it drains, unless it is forced to stop.
    """
    stop, force = asyncio.Event(), asyncio.Event()
    with listening_socket("127.0.0.1", 0, 128) as sock:
        gateway = Gateway(parse({"health": HEALTH, **config}, "test"))
        serving = asyncio.create_task(gateway.serve(sock, stop, force))
        try:
            await until(lambda: all(w.up for w in gateway.scheduling.workers()))
            yield gateway, sock.getsockname()[1]
        finally:
            if force_at_end:
                force.set()
            stop.set()
            await serving


async def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something that will become true."""
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.005)


class Served:
    """`omni-proxy serve` as a process, its port, its config file and what it says."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, config: Path) -> None:
        self.process = process
        self.port = port
        self.config = config
        self.said: list[str] = []
        self._reader = asyncio.create_task(self._read())

    def write(self, config: dict[str, Any]) -> None:
        """Write the config file anew; nobody reads it before SIGHUP."""
        whole = {"listen": {"host": "127.0.0.1", "port": self.port}, "health": HEALTH, **config}
        self.config.write_text(json.dumps(whole))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def says(self, what: str) -> str:
        """Wait for a line on its standard error that contains something, from what it has not been asked for yet."""
        async with asyncio.timeout(20):
            while True:
                for number, line in enumerate(self.said):
                    if what in line:
                        del self.said[: number + 1]
                        return line
                assert not self._reader.done(), f"it ended without saying {what!r}"
                await asyncio.sleep(0.01)

    async def ended(self) -> int:
        async with asyncio.timeout(20):
            code = await self.process.wait()
            await self._reader
        return code

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.said.append(line.decode().rstrip())


@contextlib.asynccontextmanager
async def served(folder: Path, config: dict[str, Any], stdout: int | None = None) -> AsyncIterator[Served]:
    """A gateway as a process of its own, ready to serve; it is told to stop at the end unless it has."""
    served = await _start(folder, config, stdout)
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            async with asyncio.timeout(20):
                while not await _ready(client, served):
                    await asyncio.sleep(0.02)
        yield served
    finally:
        if served.process.returncode is None:
            served.signal(signal.SIGTERM)
            served.signal(signal.SIGTERM)
        await served.ended()


async def _start(folder: Path, config: dict[str, Any], stdout: int | None) -> Served:
    path, port = folder / "omni.yaml", free_port()
    whole = {"listen": {"host": "127.0.0.1", "port": port}, "health": HEALTH, **config}
    path.write_text(json.dumps(whole))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "omni_proxy", "serve", "-c", str(path), stdout=stdout, stderr=asyncio.subprocess.PIPE
    )
    return Served(process, port, path)


async def _ready(client: httpx.AsyncClient, served: Served) -> bool:
    assert served.process.returncode is None, "\n".join(served.said)
    with contextlib.suppress(httpx.TransportError):
        return (await client.get(f"http://127.0.0.1:{served.port}/ready")).status_code == 200
    return False


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
