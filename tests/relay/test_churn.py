"""Workers come, go, drain and change while clients stream: no request is lost.

300 changes in some five seconds: more than 200,000 an hour, of 10,000 that must be possible.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from tests.relay.conftest import Rig, Start
from tests.relay.scripted import DONE, ScriptedWorker, Seen, decode_stream, event, prefill_ok

CHANGES = 300


async def slow_stream(seen: Seen) -> None:
    await asyncio.sleep(0.02)
    await decode_stream(seen)


async def ask(rig: Rig, over: asyncio.Event, answers: list[tuple[int, bool]]) -> None:
    while not over.is_set():
        answer = await rig.chat(stream=True)
        answers.append((answer.status_code, answer.text.endswith("[DONE]\n\n")))


async def change(rig: Rig, extra: list[ScriptedWorker], rng: random.Random) -> None:
    """One order about one worker; m0 is left alone, so that somebody can always work."""
    operations = rig.gateway.scheduling.operations
    there = {str(w["name"]) for w in operations.known()} - {"m0"}
    number = rng.randrange(len(extra))
    name, port = f"x{number}", extra[number].port
    fields: dict[str, Any] = {"name": name, "url": f"http://127.0.0.1:{port}", "role": "mixed"}
    one = rng.choice(sorted(there)) if there else name
    match rng.randrange(6) if there else 0:
        case 0 | 1:
            await operations.add(fields | {"connector": "aggregated"}) if name not in there else None
        case 2:
            await operations.remove(one)
        case 3:
            await operations.drain(one)
        case 4:
            await operations.undrain(one)
        case _:
            await operations.weigh(one, rng.choice((None, 0.5, 3.0)))


async def test_no_request_is_lost_while_workers_change(start: Start) -> None:
    rng = random.Random(11)
    config = {"connector": "aggregated", "kv_cache_policy": "independent"}
    rig = await start(config, m0=slow_stream, m1=slow_stream, m2=slow_stream)
    extra = [ScriptedWorker(slow_stream) for _ in range(4)]
    for worker in extra:
        await worker.start()
    over, answers = asyncio.Event(), list[tuple[int, bool]]()
    clients = [asyncio.create_task(ask(rig, over, answers)) for _ in range(6)]
    for _ in range(CHANGES):
        await change(rig, extra, rng)
        await asyncio.sleep(0.01)
    over.set()
    await asyncio.gather(*clients)
    assert set(answers) == {(200, True)}
    used = sum(bool(worker.seen) for worker in (*extra, *rig.workers.values()))
    assert (len(answers) > 50, used > 4) == (True, True), (len(answers), used)
    await rig.idle()
    for worker in extra:
        await worker.stop()


async def test_a_worker_that_moves_ends_what_it_has_where_it_was(start: Start) -> None:
    """Another address under the same name: streams go on from the old one, new requests go to the new one at once."""
    gate = asyncio.Event()

    async def held(seen: Seen) -> None:
        await seen.open_stream()
        await seen.chunk(event("Hel"))
        await gate.wait()
        await seen.chunk(event("lo", finish="stop"))
        await seen.chunk(DONE)
        await seen.end_stream()

    rig = await start(p0=prefill_ok, d0=held)
    moved = {"p0": ScriptedWorker(prefill_ok), "d0": ScriptedWorker(decode_stream)}
    for worker in moved.values():
        await worker.start()
    running = asyncio.create_task(rig.chat(stream=True))
    await rig.seen("d0")
    membership = rig.gateway.scheduling.membership
    wanted = [
        config.model_copy(update={"url": f"http://127.0.0.1:{moved[name].port}"})
        for name in membership.names()
        if (config := membership.config_of(name)) is not None
    ]
    assert membership.set(wanted) == []
    answer = await rig.chat(stream=True)
    assert (answer.status_code, len(moved["p0"].seen), len(moved["d0"].seen)) == (200, 1, 1)
    assert not running.done()
    gate.set()
    assert (await running).text.endswith("[DONE]\n\n")
    assert (len(rig["p0"].seen), len(rig["d0"].seen)) == (1, 1)
    await rig.idle()
    for worker in moved.values():
        await worker.stop()
