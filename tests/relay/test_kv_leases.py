"""A handoff's parameters over real sockets: to their own request, in time, given back or counted when not needed."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from tests.relay.conftest import Rig, Start
from tests.relay.raw import chat, post
from tests.relay.scripted import HANDOFF, Seen, decode_stream, prefill_answer, prefill_ok


async def own_parameters(seen: Seen) -> None:
    """P whose parameters name the request that they are for."""
    name = seen.json["messages"][0]["content"]
    await seen.answer(200, prefill_answer(params={**HANDOFF, "remote_request_id": name}))


async def test_parameters_go_to_their_own_request(start: Start) -> None:
    rig = await start(p0=own_parameters, d0=decode_stream)
    asks = [[{"role": "user", "content": f"n{number}"}] for number in range(30)]
    await asyncio.gather(*(rig.chat(messages=messages) for messages in asks))
    pairs = [(seen.json["messages"][0]["content"], seen.json["kv_transfer_params"]) for seen in rig["d0"].seen]
    assert len(pairs) == 30
    assert all(name == params["remote_request_id"] for name, params in pairs)


async def test_a_clients_own_are_never_sent(start: Start) -> None:
    rig = await start(p0=prefill_ok, d0=decode_stream)
    await rig.chat(kv_transfer_params={"remote_request_id": "stolen"}, bootstrap_room=7)
    assert b"stolen" not in rig["p0"].seen[0].body + rig["d0"].seen[0].body
    assert json.loads(rig["d0"].seen[0].body)["kv_transfer_params"] == HANDOFF


async def test_late_parameters_are_not_sent(start: Start) -> None:
    """D is full for longer than P keeps the KV: the prompt is computed again, and only the new parameters go out."""
    free, count = asyncio.Event(), 0

    async def prefill(seen: Seen) -> None:
        nonlocal count
        count += 1
        await seen.answer(200, prefill_answer(params={**HANDOFF, "remote_request_id": f"attempt-{count}"}))

    async def decode(seen: Seen) -> None:
        if len(rig["d0"].seen) == 1:
            await free.wait()
        await decode_stream(seen)

    each = {"p0": {"kv_lease_s": 0.4}, "d0": {"max_seqs": 1}}
    rig = await start({"each": each, "retries": {"max": 5}}, p0=prefill, d0=decode)
    first = asyncio.create_task(rig.chat(stream=True))
    await rig.seen("d0")
    second = asyncio.create_task(rig.chat(stream=True))
    await rig.seen("p0", 3)
    (load,) = (w for w in rig.gateway.scheduling.workers() if w.name == "p0")
    assert load.stranded_tokens > 0
    free.set()
    assert [answer.status_code for answer in (await first, await second)] == [200, 200]
    sent = [seen.json["kv_transfer_params"]["remote_request_id"] for seen in rig["d0"].seen]
    assert sent[0] == "attempt-1"
    assert sent[1] not in ("attempt-1", "attempt-2")
    await rig.idle()


class SlowToConnect(asyncio.AbstractEventLoop):
    """The running loop, as far as a pool of connections uses it; the first connection takes a while."""

    def __init__(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._delay_s = delay_s
        self._connect = loop.create_connection
        self.create_task = loop.create_task  # type: ignore[method-assign]
        self.call_soon = loop.call_soon  # type: ignore[method-assign,assignment]
        self.time = loop.time  # type: ignore[method-assign]

    async def create_connection(self, *args: Any, **more: Any) -> Any:
        delay_s, self._delay_s = self._delay_s, 0.0
        end = time.monotonic() + delay_s
        while time.monotonic() < end:
            await asyncio.sleep(0.01)
        return await self._connect(*args, **more)


async def test_parameters_do_not_outlive_their_lease_on_the_way_to_d(start: Start) -> None:
    """D was chosen in time, but the connection to it takes longer than P keeps the KV: nothing old is sent."""

    async def prefill(seen: Seen) -> None:
        count = len(rig["p0"].seen)
        await seen.answer(200, prefill_answer(params={**HANDOFF, "remote_request_id": f"attempt-{count}"}))

    rig = await start({"each": {"p0": {"kv_lease_s": 0.4}}, "retries": {"max": 10}}, p0=prefill, d0=decode_stream)
    rig.gateway.front.edge._upstreams["d0"].pool.loop = SlowToConnect(0.4)
    answer = await rig.chat(stream=True)
    assert (answer.status_code, "Hel" in answer.text) == (200, True)
    (sent,) = (seen.json["kv_transfer_params"]["remote_request_id"] for seen in rig["d0"].seen)
    assert sent == f"attempt-{len(rig['p0'].seen)}" != "attempt-1"
    metrics = (await rig.client.get("/metrics")).text
    assert 'omni_leg_failures_total{kind="late",leg="decode",worker="d0"}' in metrics
    (load,) = (worker for worker in rig.gateway.scheduling.workers() if worker.name == "d0")
    assert load.up
    await rig.idle()


async def _leaves_before_the_pull(rig: Rig) -> Any:
    client = await rig.raw()
    await client.send(post(chat(stream=True)))
    await rig.seen("d0")
    client.writer.transport.abort()
    await rig.idle()
    workers = (await rig.client.get("/omni/workers")).json()["workers"]
    return next(worker for worker in workers if worker["name"] == "p0")


async def _hangs(seen: Seen) -> None:
    await seen.gone.wait()


@pytest.mark.parametrize("lease_s", [0.3, 30.0])
async def test_what_nobody_pulls_is_seen_until_the_lease_ends(start: Start, lease_s: float) -> None:
    rig = await start({"each": {"p0": {"kv_lease_s": lease_s}}}, p0=prefill_ok, d0=_hangs)
    told = await _leaves_before_the_pull(rig)
    metrics = (await rig.client.get("/metrics")).text
    stranded = told["stranded_kv_tokens"]
    if lease_s == 30.0:
        assert stranded == told["kv_tokens"] > 0
        assert f'omni_worker_stranded_kv_tokens{{role="prefill",worker="p0"}} {float(stranded)}' in metrics or (
            f'omni_worker_stranded_kv_tokens{{worker="p0",role="prefill"}} {float(stranded)}' in metrics
        )
        return
    async with asyncio.timeout(5):
        while any(worker.kv_tokens for worker in rig.gateway.scheduling.workers()):
            await asyncio.sleep(0.02)


async def test_the_embedded_engine_is_told_at_once(start: Start) -> None:
    async def prefill(seen: Seen) -> None:
        await (seen.answer(200, b"{}") if seen.path == "/omni/release" else prefill_ok(seen))

    rig = await start({"connector": "omni", "schedule_mode": "sequential"}, p0=prefill, d0=_hangs)
    told = await _leaves_before_the_pull(rig)
    assert (told["kv_tokens"], told["stranded_kv_tokens"]) == (0, 0)
    released = await rig.seen("p0", 2)
    assert (released.path, released.json) == ("/omni/release", {"request_id": HANDOFF["remote_request_id"]})
