"""A client that leaves is noticed in every stage: both legs are closed and everything it held comes home."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from omni_proxy.api.served import ServedModels
from omni_proxy.call import Call
from omni_proxy.messages import Stage
from tests.relay.conftest import Rig, Start
from tests.relay.raw import RawClient, chat, post
from tests.relay.scripted import HANDOFF, Seen, decode_stream, event, prefill_answer, prefill_ok

WITH_AND_WITHOUT_PUMP = True

FULL = {"max_seqs": 1}


async def hang(seen: Seen) -> None:
    await seen.gone.wait()


async def stream_for_ever(seen: Seen) -> None:
    await seen.open_stream()
    while not seen.gone.is_set():
        await seen.chunk(event("x"))
        await asyncio.sleep(0.01)


async def ask(rig: Rig, stream: bool = True) -> RawClient:
    client = await rig.raw()
    await client.send(post(chat(stream=stream)))
    return client


async def reaches(rig: Rig, stage: Stage, count: int = 1) -> None:
    async with asyncio.timeout(5):
        while sum(r.marks[-1][0] is stage for r in rig.gateway.scheduling.live()) < count:
            await asyncio.sleep(0.002)


async def ended_as_cancelled(rig: Rig, count: int = 1) -> None:
    await rig.idle()
    ended = (await rig.client.get("/omni/requests")).json()["ended"]
    assert [r["outcome"] for r in ended].count("cancelled") == count


async def leaves(client: RawClient, how: str) -> None:
    """By an orderly end of the connection, by a reset, or by closing only the half that sends."""
    if how == "reset":
        client.reset()
    elif how == "half":
        client.writer.write_eof()
    else:
        client.close()


WAYS = ["close", "reset", "half"]


@pytest.mark.parametrize("how", WAYS)
async def test_while_p_computes(start: Start, how: str) -> None:
    rig = await start(p0=hang, d0=decode_stream)
    client = await ask(rig)
    seen = await rig.seen("p0")
    await leaves(client, how)
    async with asyncio.timeout(1):
        await seen.gone.wait()
    await ended_as_cancelled(rig)
    assert not rig["d0"].seen


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", WAYS)
async def test_while_d_has_not_answered(start: Start, how: str, stream: bool) -> None:
    rig = await start(p0=prefill_ok, d0=hang)
    client = await ask(rig, stream)
    seen = await rig.seen("d0")
    await leaves(client, how)
    async with asyncio.timeout(1):
        await seen.gone.wait()
    await ended_as_cancelled(rig)


@pytest.mark.parametrize("how", WAYS)
async def test_mid_stream(start: Start, how: str) -> None:
    rig = await start(p0=prefill_ok, d0=stream_for_ever)
    client = await ask(rig)
    await client.head()
    await client.reader.readuntil(b"\n\n")
    await leaves(client, how)
    async with asyncio.timeout(1):
        await rig["d0"].seen[0].gone.wait()
    await ended_as_cancelled(rig)


async def test_while_waiting_for_p(start: Start) -> None:
    """A dead request is never sent."""
    go = asyncio.Event()

    async def prefill(seen: Seen) -> None:
        await go.wait()
        await prefill_ok(seen)

    rig = await start({"each": {"p0": FULL}}, p0=prefill, d0=decode_stream)
    first = await ask(rig)
    await rig.seen("p0")
    second = await ask(rig)
    await reaches(rig, Stage.PREFILL_WAITING)
    second.reset()
    async with asyncio.timeout(1):
        while len(rig.gateway.scheduling.live()) > 1:
            await asyncio.sleep(0.002)
    go.set()
    assert (await first.response()).clean
    await ended_as_cancelled(rig)
    assert len(rig["p0"].seen) == 1


async def test_while_waiting_for_d(start: Start) -> None:
    """P has computed for nothing: its blocks are given back where the engine has a call for it."""
    go = asyncio.Event()

    async def decode(seen: Seen) -> None:
        await go.wait()
        await decode_stream(seen)

    async def prefill(seen: Seen) -> None:
        params = {**HANDOFF, "remote_request_id": f"r-{len(rig['p0'].seen)}"}
        await seen.answer(200, prefill_answer(params=params))

    rig = await start({"connector": "omni", "each": {"d0": FULL}}, p0=prefill, d0=decode)
    first = await ask(rig)
    await rig.seen("d0")
    second = await ask(rig)
    await reaches(rig, Stage.DECODE_WAITING)
    second.reset()
    release = await rig.seen("p0", 3)
    assert (release.path, release.json) == ("/omni/release", {"request_id": "r-2"})
    go.set()
    assert (await first.response()).clean
    await ended_as_cancelled(rig)
    assert len(rig["d0"].seen) == 1
    assert len(rig["p0"].seen) == 3, "what was pulled is not released"


async def test_before_d_has_pulled(start: Start) -> None:
    rig = await start({"connector": "omni"}, p0=prefill_ok, d0=hang)
    client = await ask(rig)
    await rig.seen("d0")
    client.reset()
    release = await rig.seen("p0", 2)
    assert (release.path, release.json) == ("/omni/release", {"request_id": "r-1"})
    await ended_as_cancelled(rig)


async def test_both_legs_of_a_pair(start: Start) -> None:
    rig = await start({"connector": "sglang"}, p0=hang, d0=hang)
    client = await ask(rig)
    legs = [await rig.seen("p0"), await rig.seen("d0")]
    client.reset()
    async with asyncio.timeout(1):
        for leg in legs:
            await leg.gone.wait()
    await ended_as_cancelled(rig)


async def test_while_its_prompt_is_tokenised(start: Start) -> None:
    rig = await start()
    asked: list[str] = []

    def never(rid: str, call: Call) -> None:
        asked.append(rid)

    rig.gateway.front.edge._count_tokens = never
    rig.gateway.front.edge.intake.serve(ServedModels(others_counted=True))
    client = await ask(rig)
    await reaches(rig, Stage.TOKENIZING)
    client.reset()
    await ended_as_cancelled(rig)
    assert len(asked) == 1
    assert rig.untouched()


async def test_a_tokenizer_that_hangs_only_delays(start: Start) -> None:
    rig = await start()
    edge = rig.gateway.front.edge
    edge._count_tokens = lambda rid, call: None
    edge.intake.serve(ServedModels(others_counted=True))
    edge._limits = dataclasses.replace(edge._limits, tokenize_s=0.05)
    assert (await rig.chat()).status_code == 200
    await rig.idle()


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_with_more_requests_sent_behind(start: Start, how: str) -> None:
    """Nobody reads from a connection whose next request is there already; leaving is seen all the same."""
    rig = await start(p0=prefill_ok, d0=hang)
    client = await rig.raw()
    await client.send(post(chat()) * 3)
    seen = await rig.seen("d0")
    await leaves(client, how)
    async with asyncio.timeout(1):
        await seen.gone.wait()
    await ended_as_cancelled(rig)
    assert len(rig["p0"].seen) == 1


async def test_in_the_middle_of_its_body(start: Start) -> None:
    rig = await start()
    client = await rig.raw()
    await client.send(post(chat())[:-5])
    client.reset()
    assert (await rig.chat()).status_code == 200
    await rig.idle()
    assert len(rig["p0"].seen) == 1


async def test_many_leave_at_once(start: Start) -> None:
    """Faults C9: fifty are cancelled, and nothing is held any more."""
    rig = await start({"each": {"p0": {"max_seqs": 20}, "d0": {"max_seqs": 10}}}, p0=prefill_ok, d0=hang)
    clients = [await ask(rig) for _ in range(50)]
    await reaches(rig, Stage.DECODE_WAITING, 40)
    for client in clients:
        client.reset()
    await ended_as_cancelled(rig, 50)
