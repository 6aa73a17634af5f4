"""A gateway on a real socket before scripted workers, all on the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from omni_proxy.api.serving import listening_socket
from omni_proxy.build import Gateway
from omni_proxy.config import Config, parse
from tests.relay.scripted import Script, ScriptedWorker, decode_stream, prefill_ok

FAST = {"interval_s": 0.05, "timeout_s": 2.0, "failures_down": 1}


class Rig:
    """One gateway, its workers, and a client."""

    def __init__(self, gateway: Gateway, port: int, workers: dict[str, ScriptedWorker], client: httpx.AsyncClient):
        self.gateway = gateway
        self.port = port
        self.workers = workers
        self.client = client

    def __getitem__(self, name: str) -> ScriptedWorker:
        return self.workers[name]

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def idle(self) -> None:
        """Wait until nothing is live, then check that nothing is held."""
        core = self.gateway.scheduling.core
        async with asyncio.timeout(5):
            while list(core.records()) or self.gateway.front.edge.exchanges:
                await asyncio.sleep(0.005)
        core.check()
        assert all(w.seqs == 0 and w.prefill_tokens == 0 and w.kv_tokens == 0 for w in core.workers())
        assert core.waiting() == (0, 0)


Start = Callable[..., Any]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """`await start(p0=script, d0=script, ...)`: names that begin with p, d or m say the role."""
    async with contextlib.AsyncExitStack() as stack:

        async def begin(config: dict[str, Any] | None = None, wait: bool = True, **scripts: Script) -> Rig:
            chosen = scripts or {"p0": prefill_ok, "d0": decode_stream}
            workers = {name: ScriptedWorker(script) for name, script in chosen.items()}
            for worker in workers.values():
                await worker.start()
                stack.push_async_callback(worker.stop)
            rig = await stack.enter_async_context(_running(_config(workers, config or {}), workers))
            if wait:
                async with asyncio.timeout(5):
                    while not all(w.up for w in rig.gateway.scheduling.workers()):
                        await asyncio.sleep(0.005)
            return rig

        yield begin


def _config(workers: dict[str, ScriptedWorker], extra: dict[str, Any]) -> Config:
    roles = {"p": "prefill", "d": "decode", "m": "mixed"}
    connector = extra.pop("connector", "vllm-nixl")
    listed = [
        {"name": name, "url": f"http://127.0.0.1:{w.port}", "role": roles[name[0]], "connector": connector}
        for name, w in workers.items()
    ]
    return parse({"workers": listed, "health": FAST, **extra}, "test")


@contextlib.asynccontextmanager
async def _running(config: Config, workers: dict[str, ScriptedWorker]) -> AsyncIterator[Rig]:
    stop, force = asyncio.Event(), asyncio.Event()
    with listening_socket("127.0.0.1", 0, 128) as sock:
        port = sock.getsockname()[1]
        gateway = Gateway(config)
        serving = asyncio.create_task(gateway.serve(sock, stop, force))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False) as client:
            try:
                yield Rig(gateway, port, workers, client)
            finally:
                force.set()
                stop.set()
        await serving
