"""Expert counters of scripted workers: read beside the probes, shown as metrics and for the heat map."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from omni_proxy.config import parse
from omni_proxy.observe.expert_loads import ExpertReading
from omni_proxy.workers.expert_reader import ExpertReader
from tests.relay.conftest import Rig, Start
from tests.relay.scripted import decode_stream, prefill_ok

FAST = {"health": {"experts_interval_s": 0.02}}


MARK = b'x 1\nomni_expert_tokens_total{expert="0",layer="0"} 1.0\n'
"""By this in its metrics a worker shows that it counts."""


def counters(rows: list[list[int]], ranks: tuple[float, ...] = ()) -> bytes:
    return json.dumps({"tokens": rows, "imbalance": ranks}).encode()


async def until(rig: Rig, holds: Callable[[list[Any]], bool]) -> list[Any]:
    async with asyncio.timeout(5):
        while True:
            found: list[Any] = (await rig.client.get("/omni/experts")).json()["workers"]
            if holds(found):
                return found
            await asyncio.sleep(0.01)


async def scraped(rig: Rig, name: str) -> Mapping[tuple[str, ...], float]:
    text = (await rig.client.get("/metrics")).text
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


async def start_with(start: Start, body: bytes) -> Rig:
    rig: Rig = await start(FAST, p0=prefill_ok, d0=decode_stream, wait=False)
    rig["d0"].gets.update({"/metrics": MARK, "/omni/experts": body})
    await rig.up()
    return rig


async def test_what_a_worker_counts_is_shown(start: Start) -> None:
    rig = await start_with(start, counters([[600, 200, 0, 0], [200, 200, 200, 200]], (1.5, 1.25)))
    (found,) = await until(rig, lambda workers: len(workers) == 1)
    assert (found["worker"], found["closed"], found["idle"], found["window_s"]) == ("d0", True, 2, None)
    assert (found["imbalance"], found["rank_imbalance"]) == (2.0, 1.375)
    assert [layer["tokens"] for layer in found["layers"]] == [[600, 200, 0, 0], [200, 200, 200, 200]]
    assert await scraped(rig, "omni_expert_imbalance") == {("experts", "d0"): 2.0, ("ranks", "d0"): 1.375}
    assert await scraped(rig, "omni_expert_layer_imbalance") == {("0", "d0"): 3.0, ("1", "d0"): 1.0}
    assert await scraped(rig, "omni_expert_idle") == {("d0",): 2}
    assert (await scraped(rig, "omni_expert_tokens_total"))["1", "0", "d0"] == 200

    rig["d0"].gets["/omni/experts"] = counters([[600, 200, 500, 500], [300, 300, 300, 300]])
    (found,) = await until(rig, lambda workers: workers[0]["window_s"] is not None)
    assert found["layers"][0]["tokens"] == [0, 0, 500, 500]


async def test_a_worker_that_leaves_takes_its_series_with_it(start: Start) -> None:
    rig = await start_with(start, counters([[600, 200]]))
    await until(rig, lambda workers: len(workers) == 1)
    rig.gateway.scheduling.membership.remove("d0")
    assert not await until(rig, lambda workers: not workers)
    assert not await scraped(rig, "omni_expert_imbalance")


async def test_a_large_table_is_not_repeated_by_expert(start: Start) -> None:
    rig = await start_with(start, counters([[200] * 256] * 17))
    (found,) = await until(rig, lambda workers: len(workers) == 1)
    assert len(found["layers"]) == 17
    assert not await scraped(rig, "omni_expert_tokens_total")
    assert len(await scraped(rig, "omni_expert_layer_imbalance")) == 17


@pytest.mark.parametrize(
    "body",
    [
        counters([[1, 2], [3]]),
        counters([[], []]),
        counters([]),
        counters([[1, -1]]),
        counters([[1, 2]], (-1.0,)),
        b'{"tokens":[[1.5,2]]}',
        b'{"tokens":[["1",2]]}',
        b'{"tokens":null}',
        b'{"tokens":[[1,2]],"imbalance":[NaN]}',
        b"{}",
        b"",
        b"\xff",
        MARK,
    ],
)
async def test_what_is_no_table_of_counters_is_not_shown(body: bytes) -> None:
    told: list[ExpertReading] = []
    worker = Told(body)
    await ExpertReader(lambda: [worker], lambda name, reading, now: told.append(reading), 1.0).read_all()
    assert worker.asked == 1
    assert not told


class Told:
    name = "d0"

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.asked = 0

    async def experts(self) -> bytes:
        self.asked += 1
        return self.body


async def test_layers_without_experts_have_no_row() -> None:
    told: list[ExpertReading] = []
    worker = Told(counters([[], [1, 2]], (1.5,)))
    await ExpertReader(lambda: [worker], lambda name, reading, now: told.append(reading), 1.0).read_all()
    assert told == [ExpertReading(((), (1, 2)), (1.5,))]


def test_never_is_a_choice() -> None:
    assert parse({"health": {"experts_interval_s": None}}, "x").health.experts_interval_s is None
