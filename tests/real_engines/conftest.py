"""Real engines run only where their marker is asked for: they need gigabytes and minutes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from omni_proxy.demo import demo_model
from tests.real_engines.processes import Gateway, Server, gateway
from tests.real_engines.vllm import LEASE_S, MODEL, cores, environment, vllm

MARKERS = ("real_vllm", "real_server")
ROLES = {"p0": "prefill", "d0": "decode", "d1": "decode"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop the tests whose marker is not in `-m`."""
    asked = config.option.markexpr
    absent = [marker for marker in MARKERS if marker not in asked]
    items[:] = [item for item in items if not any(item.get_closest_marker(marker) for marker in absent)]


class Cluster:
    """One prefill and two decode workers of vLLM, and a gateway before them."""

    def __init__(self, engines: dict[str, Server], folder: Path) -> None:
        self.engines = engines
        self.folder = folder
        self.gateway: Gateway

    def __getitem__(self, name: str) -> Server:
        return self.engines[name]

    def revive(self) -> None:
        """Start again whoever was killed, and wait until the gateway uses him."""
        dead = [engine for engine in self.engines.values() if not engine.alive]
        for engine in dead:
            engine.start()
        for engine in dead:
            engine.ready()

    def config(self, *names: str, **each: object) -> dict[str, object]:
        """A gateway's config with these workers; `each`: further keys of every worker."""
        workers = [
            {"name": name, "url": self[name].url, "role": ROLES[name], "connector": "auto", **each}
            | ({"kv_lease_s": LEASE_S} if ROLES[name] == "prefill" else {})
            for name in names
        ]
        models = [{"name": MODEL, "path": str(demo_model()), "aliases": ["story-teller"]}]
        return {"workers": workers, "models": models, "resume": True}


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """vLLM, started once for all tests."""
    venv = environment()
    if isinstance(venv, str):
        pytest.skip(venv)
    folder = tmp_path_factory.mktemp("vllm")
    kinds = {"prefill": "kv_producer", "decode": "kv_consumer"}
    started = {
        name: vllm(venv, name, kinds[role], folder, core)
        for (name, role), core in zip(ROLES.items(), cores(len(ROLES)), strict=True)
    }
    with contextlib.ExitStack() as stack:
        for engine in started.values():
            stack.callback(engine.stop)
            engine.start()
        for engine in started.values():
            engine.ready()
        yield Cluster(started, folder)


@pytest.fixture(scope="session")
def serving(engines: Cluster) -> Iterator[Cluster]:
    with gateway("gateway", engines.folder, engines.config(*ROLES)) as started:
        engines.gateway = started
        yield engines


@pytest.fixture
def cluster(serving: Cluster) -> Cluster:
    """All of it, whole."""
    serving.revive()
    serving.gateway.all_up()
    return serving
