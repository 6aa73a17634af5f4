"""One prefill and one decode worker of any protocol behind a gateway, all scripted, on real sockets."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from omni_proxy.config import parse
from tests.connectors.protocols import PROTOCOLS, Protocol
from tests.relay.conftest import FAST, Rig, _no_fault_of_ours, pytest_asyncio_loop_factories, running
from tests.relay.scripted import Script, ScriptedWorker, Seen, decode_stream

__all__ = ["_no_fault_of_ours", "pytest_asyncio_loop_factories"]

Begin = Callable[..., Any]


class Pair:
    """A running pair, and the order in which its workers were asked."""

    def __init__(self, protocol: Protocol, bootstrap: ScriptedWorker) -> None:
        self.protocol = protocol
        self.bootstrap = bootstrap
        self.asked: list[str] = []
        self.aborted: list[tuple[str, Seen]] = []
        """Calls that end a leg, by the worker that got them."""
        self.rig: Rig

    def noting(self, name: str, script: Script) -> Script:
        async def noted(seen: Seen) -> None:
            if self.protocol.abort is not None and seen.path == self.protocol.abort[0]:
                self.rig[name].seen.remove(seen)
                self.aborted.append((name, seen))
                await seen.answer(200, b"")
                return
            self.asked.append(name)
            await script(seen)

        return noted


@pytest.fixture(params=sorted(PROTOCOLS))
def protocol(request: pytest.FixtureRequest) -> Protocol:
    """Each protocol with a handoff."""
    return PROTOCOLS[request.param]


@pytest.fixture
async def begin() -> AsyncIterator[Begin]:
    """`await begin(protocol, p=script, d=script, **config)`: both are up when it returns."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            protocol: Protocol, p: Script | None = None, d: Script | None = None, wait: bool = True, **config: Any
        ) -> Pair:
            bootstrap = ScriptedWorker(decode_stream)
            bootstrap.gets["/query"] = json.dumps({"0": {"engine_id": "P0"}, "1": {"engine_id": "P1"}}).encode()
            pair = Pair(protocol, bootstrap)
            scripts = {"p0": p or protocol.prefill_script(), "d0": d or protocol.decode_script(decode_stream)}
            workers = {name: ScriptedWorker(pair.noting(name, script)) for name, script in scripts.items()}
            for worker in (bootstrap, *workers.values()):
                await worker.start()
                stack.push_async_callback(worker.stop)
            listed = [
                {
                    "name": name,
                    "url": f"http://127.0.0.1:{worker.port}",
                    "role": {"p0": "prefill", "d0": "decode"}[name],
                    "connector": protocol.connector,
                    "kv_address": f"127.0.0.1:{4000 + ord(name[0])}" if protocol.connector == "vllm-p2p-nccl" else "",
                    **({"bootstrap_port": bootstrap.port} if name == "p0" else {}),
                    **config.pop(name, {}),
                }
                for name, worker in workers.items()
            ]
            whole = {"workers": listed, "schedule_mode": protocol.mode, "health": FAST, **config}
            if protocol.connector == "ascend-layerwise":
                whole["callbacks"] = {"host": "127.0.0.1"}
            pair.rig = await stack.enter_async_context(running(parse(whole, "test"), workers))
            if wait:
                await pair.rig.up()
            return pair

        yield start
