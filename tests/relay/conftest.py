"""A gateway on a real socket before scripted workers, all on the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import httpx
import pytest
import uvloop

from omni_proxy.api.client import ClientConnection
from omni_proxy.api.exchange import Exchange
from omni_proxy.api.serving import listening_socket
from omni_proxy.build import Gateway
from omni_proxy.config import Config, parse
from omni_proxy.relay.pump import BUILT
from tests.relay.light import LightWorker
from tests.relay.raw import RawClient
from tests.relay.scripted import Script, ScriptedWorker, Seen, decode_stream, prefill_ok

FAST = {"interval_s": 0.05, "timeout_s": 2.0, "failures_down": 1}


class Rig:
    """One gateway, its workers, and a client."""

    def __init__(self, gateway: Gateway, port: int, workers: dict[str, ScriptedWorker], client: httpx.AsyncClient):
        self.gateway = gateway
        self.port = port
        self.workers = workers
        self.client = client
        self._raw: list[RawClient] = []

    def __getitem__(self, name: str) -> ScriptedWorker:
        return self.workers[name]

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def raw(self, receive_buffer: int | None = None) -> RawClient:
        """A bare connection; it is dropped with the rig."""
        client = await RawClient.open(self.port, receive_buffer)
        self._raw.append(client)
        return client

    async def connection(self) -> ClientConnection:
        """The gateway's end of the youngest connection of a client."""
        sock = self._raw[-1].transport.get_extra_info("sockname")
        async with asyncio.timeout(20):
            while True:
                for connection in self.gateway.front._server._server.server_state.connections:
                    assert isinstance(connection, ClientConnection)
                    if connection.transport.get_extra_info("peername") == sock:
                        return connection
                await asyncio.sleep(0.002)

    async def up(self) -> None:
        """Wait until all workers are."""
        async with asyncio.timeout(5):
            while not (known := self.gateway.scheduling.workers()) or not all(w.up for w in known):
                await asyncio.sleep(0.005)

    async def seen(self, name: str, count: int = 1) -> Seen:
        """Wait until a worker has got so many requests; the last of them."""
        async with asyncio.timeout(5):
            while len(self[name].seen) < count:
                await asyncio.sleep(0.002)
        return self[name].seen[count - 1]

    async def timeline(self, response: httpx.Response) -> Any:
        """What the gateway tells of a request."""
        return (await self.client.get(f"/omni/requests/{response.headers['x-request-id']}")).json()

    def edge_exchange(self) -> Exchange:
        """The only exchange that is live."""
        (exchange,) = self.gateway.front.edge.exchanges.values()
        return exchange

    def pumped(self) -> int:
        """How many streams are in the pump."""
        pump = self.gateway.front.edge.starter.pump
        return 0 if pump is None else len(pump)

    async def in_pump(self, count: int = 1) -> None:
        """Wait until so many streams are in the pump."""
        async with asyncio.timeout(20):
            while self.pumped() != count:
                await asyncio.sleep(0.002)

    def untouched(self) -> bool:
        """Has no worker been asked anything?"""
        return not any(worker.seen for worker in self.workers.values())

    def drop_clients(self) -> None:
        for client in self._raw:
            client.writer.transport.abort()

    async def idle(self) -> None:
        """Wait until nothing is live, then check that nothing is held."""
        core = self.gateway.scheduling.core
        async with asyncio.timeout(5):
            while list(core.records()) or self.gateway.front.edge.exchanges:
                await asyncio.sleep(0.005)
        core.check()
        assert all(w.seqs == 0 and w.prefill_tokens == 0 and w.kv_tokens == w.stranded_tokens for w in core.workers())
        assert core.waiting() == (0, 0)


Start = Callable[..., Any]


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that serves is not asyncio's own: transports differ in what they tell and when."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def _no_fault_of_ours(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever workers and clients do, nothing here is an error of the gateway's own."""
    yield
    faults = [r for when in ("setup", "call") for r in caplog.get_records(when) if r.levelno >= logging.ERROR]
    assert not faults, [r.getMessage() for r in faults]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module that says `WITH_AND_WITHOUT_PUMP = True` is run twice."""
    if "start" in metafunc.fixturenames and getattr(metafunc.module, "WITH_AND_WITHOUT_PUMP", False):
        ways = [True, False] if BUILT else [False]
        metafunc.parametrize("start", ways, ids=["pump" if way else "python" for way in ways], indirect=True)


@pytest.fixture
async def start(request: pytest.FixtureRequest) -> AsyncIterator[Start]:
    """`await start(p0=script, d0=script, ...)`: names that begin with p, d or m say the role.

    The config is that of a file without `workers`; `connector` is for all of them, `each` has further keys by name.
    Its parameter says whether the gateway has its pump, where one is built.
    """
    pumps = bool(getattr(request, "param", True))
    async with contextlib.AsyncExitStack() as stack:

        async def begin(config: dict[str, Any] | None = None, wait: bool = True, **scripts: Script) -> Rig:
            chosen = scripts or {"p0": prefill_ok, "d0": decode_stream}
            workers = {name: ScriptedWorker(script) for name, script in chosen.items()}
            for worker in workers.values():
                await worker.start()
                stack.push_async_callback(worker.stop)
            rig = await stack.enter_async_context(running(config_of(workers, config or {}), workers, pumps))
            if wait:
                async with asyncio.timeout(5):
                    while sum(w.up for w in rig.gateway.scheduling.workers()) < len(workers):
                        await asyncio.sleep(0.005)
            return rig

        yield begin


def config_of(workers: Mapping[str, ScriptedWorker | LightWorker], extra: dict[str, Any]) -> Config:
    roles = {"p": "prefill", "d": "decode", "m": "mixed"}
    connector = extra.get("connector", "vllm-nixl")
    each = extra.get("each", {})
    extra = {name: value for name, value in extra.items() if name not in ("connector", "each")}
    listed = [
        {"name": name, "url": f"http://127.0.0.1:{w.port}", "role": roles[name[0]], "connector": connector}
        | each.get(name, {})
        for name, w in workers.items()
    ]
    return parse({"workers": listed, **extra, "health": FAST | extra.get("health", {})}, "test")


@contextlib.asynccontextmanager
async def running(config: Config, workers: dict[str, ScriptedWorker], pumps: bool = True) -> AsyncIterator[Rig]:
    stop, force = asyncio.Event(), asyncio.Event()
    with listening_socket("127.0.0.1", 0, 128) as sock:
        port = sock.getsockname()[1]
        gateway = Gateway(config, pumps=pumps)
        serving = asyncio.create_task(gateway.serve(sock, stop, force))
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False) as client:
            rig = Rig(gateway, port, workers, client)
            try:
                yield rig
            finally:
                rig.drop_clients()
                force.set()
                stop.set()
        await serving
