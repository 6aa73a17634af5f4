"""What a gateway counts while it serves, as a scrape shows it; a real Prometheus takes it."""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.relay.conftest import Rig, Start
from tests.relay.scripted import DONE, Seen, decode_stream, event, prefill_ok, usage_event

GAP_S = 0.3


async def slow_stream(seen: Seen) -> None:
    """D that makes a pause before each of three tokens."""
    await seen.open_stream()
    for text in ("Hel", "lo", "!"):
        await seen.chunk(event(text))
        await asyncio.sleep(GAP_S)
    await seen.chunk(event("", finish="stop") + usage_event() + DONE)
    await seen.end_stream()


async def refuses(seen: Seen) -> None:
    await seen.answer(503, b"{}")


async def scrape(rig: Rig) -> Mapping[tuple[str, ...], float]:
    """Values by name and labels in order of their names."""
    text = (await rig.client.get("/metrics")).text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scraped_with(rig: Rig, key: tuple[str, ...], least: float) -> Mapping[tuple[str, ...], float]:
    """What is told once a value has come so far: the front's counts come from time to time."""
    async with asyncio.timeout(20):
        while (found := await scrape(rig)).get(key, 0) < least:
            await asyncio.sleep(0.02)
    return found


@pytest.mark.slow
async def test_gaps_within_a_stream_are_counted(start: Start) -> None:
    rig = await start(p0=prefill_ok, d0=slow_stream)
    assert (await rig.chat(stream=True)).status_code == 200
    found = await scraped_with(rig, ("omni_itl_seconds_count",), 3)
    assert found["omni_itl_seconds_count",] == 3
    assert 2.5 * GAP_S < found["omni_itl_seconds_sum",] < 100 * GAP_S
    assert found["omni_itl_seconds_bucket", "0.05"] == 0


async def test_a_handoff_is_counted_with_its_time_and_tokens(start: Start) -> None:
    rig = await start(p0=prefill_ok, d0=decode_stream)
    assert (await rig.chat(stream=True)).status_code == 200
    await rig.idle()
    found = await scrape(rig)
    assert found["omni_handoff_tokens_total",] == 10
    assert found["omni_worker_prefills_total", "p0"] == 1
    assert 0 < found["omni_worker_prefill_seconds_total", "actual", "p0"] < 5
    assert found["omni_worker_prefill_seconds_total", "predicted", "p0"] > 0
    assert found["omni_requests_total", "/v1/chat/completions", "", "completed"] == 1


async def test_a_worker_that_fails_is_counted_until_it_leaves(start: Start) -> None:
    # The request finds out that D has gone, not a probe.
    config = {"limits": {"no_worker_timeout_s": 0.3}, "health": {"interval_s": 60}}
    rig = await start(config, p0=refuses, p1=prefill_ok, d0=decode_stream)
    await asyncio.gather(*(rig.chat() for _ in range(4)))
    await rig.idle()
    found = await scrape(rig)
    assert found["omni_worker_retries_total", "p0"] >= 1
    assert found["omni_leg_failures_total", "status", "prefill", "p0"] >= 1
    assert found["omni_worker_ejections_total", "prefill", "p0"] == 0  # "not now" is no fault
    await rig["d0"].stop()
    assert (await rig.chat()).status_code >= 500
    found = await scrape(rig)
    assert found["omni_worker_ejections_total", "decode", "d0"] == 1
    for name in ("p0", "d0"):
        rig.gateway.scheduling.membership.remove(name)
    left = await scrape(rig)
    assert not [key for key in left if "p0" in key or "d0" in key]
    assert [key for key in left if "p1" in key]


@pytest.mark.prometheus
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed (Debian: prometheus)")
async def test_a_real_prometheus_scrapes_a_gateway(start: Start, tmp_path: Path) -> None:
    rig = await start(p0=prefill_ok, d0=decode_stream)
    assert (await rig.chat(stream=True)).status_code == 200
    async with prometheus(tmp_path, rig.port) as client:
        up = await ask(client, "up")
        assert [(one["metric"]["job"], one["value"][1]) for one in up] == [("omni-proxy", "1")]
        ended = await ask(client, "sum by (outcome) (omni_requests_total)")
        assert [(one["metric"]["outcome"], one["value"][1]) for one in ended] == [("completed", "1")]
        waiting = await ask(client, "count(omni_worker_up == 1)")
        assert waiting[0]["value"][1] == "2"
        rules = (await client.get("/api/v1/rules")).json()["data"]["groups"]
        assert {rule["health"] for group in rules for rule in group["rules"]} <= {"ok", "unknown"}


class prometheus:
    """A server that scrapes one gateway under the config of `configs/prometheus`, five times a second."""

    def __init__(self, folder: Path, gateway_port: int) -> None:
        ours = Path(__file__).parents[2] / "configs" / "prometheus"
        config = yaml.safe_load((ours / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] = {"scrape_interval": "200ms", "evaluation_interval": "200ms"}
        config["rule_files"] = [str(ours / name) for name in config["rule_files"]]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{gateway_port}"]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self._port = sock.getsockname()[1]
        self._folder = folder
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._port}", trust_env=False, timeout=10)

    async def __aenter__(self) -> httpx.AsyncClient:
        self._process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={self._folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={self._folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
            "--log.level=error",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


async def ask(client: httpx.AsyncClient, query: str) -> list[Any]:
    """Wait until a query has an answer."""
    async with asyncio.timeout(60):
        while True:
            try:
                answer = await client.get("/api/v1/query", params={"query": query})
            except httpx.TransportError:
                answer = None
            if answer is not None and answer.status_code == 200 and (found := answer.json()["data"]["result"]):
                return list(found)
            await asyncio.sleep(0.1)
