"""Neither side runs away: a slow client stops its worker, a slow worker's bytes wait for nobody."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from omni_proxy.api.client import ClientConnection
from tests.relay.conftest import Rig, Start
from tests.relay.raw import RawClient, chat, post
from tests.relay.scripted import DONE, Seen, event, prefill_ok

WITH_AND_WITHOUT_PUMP = True

PART = event("x" * 40_000)
SMALL = 1 << 16
BIG = 12 << 20
"""More than the kernel keeps for one connection."""
BOUND = 1 << 20
"""More than the buffers of one connection on both sides, far less than any answer here."""


async def flood(seen: Seen) -> None:
    """As much as the test's seed says, in bytes."""
    await seen.open_stream()
    for index in range(seen.json["seed"] // len(PART)):
        await seen.chunk(PART.replace(b"x", b"%d" % (index % 10), 1))
    await seen.chunk(DONE)
    await seen.end_stream()


def expected(size: int) -> bytes:
    parts = [PART.replace(b"x", b"%d" % (index % 10), 1) for index in range(size // len(PART))]
    return b"".join(parts) + DONE


async def ask(rig: Rig, size: int) -> RawClient:
    client = await deaf(rig)
    await client.send(post(chat(stream=True, seed=size)))
    return client


async def deaf(rig: Rig) -> RawClient:
    """A client that does not read until it is told to."""
    client = await rig.raw(receive_buffer=SMALL)
    client.transport.pause_reading()
    return client


async def stalled(rig: Rig) -> ClientConnection:
    """Wait until the gateway has stopped reading from D because its client does not read."""
    async with asyncio.timeout(10):
        while not rig.gateway.front.edge.exchanges or rig.edge_exchange().slow_since is None:
            await asyncio.sleep(0.005)
    front = rig.edge_exchange().client
    assert isinstance(front, ClientConnection)
    return front


async def test_a_client_that_stops_reading_costs_bounded_memory(start: Start) -> None:
    """One peer of ours buffered all of a 43 MB stream."""
    size = 40 << 20
    rig = await start(p0=prefill_ok, d0=flood)
    client = await ask(rig, size)
    front = await stalled(rig)
    (leg,) = rig.edge_exchange().legs.values()
    assert leg.ticket is not None
    assert leg.ticket.connection is not None
    assert leg.ticket.connection.paused
    assert front.transport.get_write_buffer_size() < BOUND
    sent = rig.edge_exchange().bytes_out
    await (await rig.client.get("/health")).aread()
    assert rig.edge_exchange().bytes_out == sent, "nothing moves while the client does not read"
    client.transport.resume_reading()
    answer = await client.response()
    assert answer.clean
    assert hashlib.sha256(answer.body).digest() == hashlib.sha256(expected(size)).digest()
    await rig.idle()


async def test_a_client_that_never_reads_is_dropped(start: Start) -> None:
    rig = await start({"timeouts": {"client_send_s": 0.2}}, p0=prefill_ok, d0=flood)
    await ask(rig, BIG)
    await stalled(rig)
    async with asyncio.timeout(2):
        await rig["d0"].seen[0].gone.wait()
    await rig.idle()
    assert (await rig.client.get("/omni/requests")).json()["ended"][0]["outcome"] == "cancelled"


async def test_a_slow_client_does_not_make_its_worker_late(start: Start) -> None:
    """D's clock stands while we do not read from it."""
    rig = await start({"timeouts": {"inter_chunk_s": 0.2}}, p0=prefill_ok, d0=flood)
    client = await ask(rig, BIG)
    await stalled(rig)
    await asyncio.sleep(0.6)
    client.transport.resume_reading()
    answer = await client.response()
    assert (len(answer.body), answer.clean) == (len(expected(BIG)), True)
    await rig.idle()


async def test_a_broken_stream_does_not_hang_on_a_client_that_does_not_read(start: Start) -> None:
    async def breaks(seen: Seen) -> None:
        await seen.open_stream()
        for _ in range(20):
            await seen.chunk(PART)
        seen.writer.close()

    rig = await start({"timeouts": {"client_send_s": 0.2}}, p0=prefill_ok, d0=breaks)
    client = await deaf(rig)
    await client.send(post(chat(stream=True)))
    async with asyncio.timeout(5):
        while rig.gateway.front.edge.exchanges or not rig["d0"].seen:
            await asyncio.sleep(0.01)
        # The connection itself ends too, unread as it is.
        connections = rig.gateway.front._server._server.server_state.connections
        while any(isinstance(c, ClientConnection) and c.transport.is_closing() for c in connections):
            await asyncio.sleep(0.01)
    await rig.idle()


async def test_unread_answers_of_a_pipeline_are_bounded(start: Start) -> None:
    """The second answer starts into a connection that is full already."""
    rig = await start(p0=prefill_ok, d0=flood)
    client = await deaf(rig)
    # The first answer fits into what the sockets take or fills them just so; the second must wait.
    size = BIG
    first, second = chat(stream=True, seed=len(PART) * 60), chat(stream=True, seed=size)
    await client.send(post(first) + post(second))
    front = await stalled(rig)
    assert front.transport.get_write_buffer_size() < BOUND
    client.transport.resume_reading()
    assert (await client.response()).body == expected(len(PART) * 60)
    assert (await client.response()).body == expected(size)
    await rig.idle()


@pytest.mark.slow
async def test_many_slow_clients(start: Start) -> None:
    rig = await start(p0=prefill_ok, d0=flood)
    size = BIG
    clients = [await ask(rig, size) for _ in range(6)]
    async with asyncio.timeout(10):
        while sum(e.slow_since is not None for e in rig.gateway.front.edge.exchanges.values()) < len(clients):
            await asyncio.sleep(0.01)
    fronts = [e.client for e in rig.gateway.front.edge.exchanges.values()]
    assert all(isinstance(f, ClientConnection) and f.transport.get_write_buffer_size() < BOUND for f in fronts)
    for client in clients:
        client.transport.resume_reading()
    answers = await asyncio.gather(*(client.response() for client in clients))
    assert all(answer.body == expected(size) for answer in answers)
    await rig.idle()


async def test_a_slow_workers_bytes_wait_for_nobody(start: Start) -> None:
    """In step: the worker says the next word only when the client has heard the last one (faults S1)."""
    heard = asyncio.Event()

    async def decode(seen: Seen) -> None:
        await seen.open_stream()
        for index in range(5):
            await seen.chunk(event(str(index)))
            await heard.wait()
            heard.clear()
        await seen.chunk(DONE)
        await seen.end_stream()

    rig = await start(p0=prefill_ok, d0=decode)
    client = await rig.raw()
    await client.send(post(chat(stream=True)))
    await client.head()
    for index in range(5):
        async with asyncio.timeout(5):
            assert event(str(index)) in await client.reader.readuntil(b"}\n\n\r\n")
        heard.set()
    assert DONE in await client.reader.readuntil(b"0\r\n\r\n")
    await rig.idle()


async def test_a_comment_is_passed_on_at_once(start: Start) -> None:
    """Engines and proxies send comments to keep connections alive while nothing else is to be said."""
    heard = asyncio.Event()

    async def decode(seen: Seen) -> None:
        await seen.open_stream()
        await seen.chunk(b": ping\n\n")
        await heard.wait()
        await seen.chunk(event("x") + DONE)
        await seen.end_stream()

    rig = await start(p0=prefill_ok, d0=decode)
    client = await rig.raw()
    await client.send(post(chat(stream=True)))
    assert b": ping\n\n" in await client.reader.readuntil(b": ping\n\n\r\n")
    heard.set()
    assert DONE in await client.reader.readuntil(b"0\r\n\r\n")
    await rig.idle()
