"""Streams in the pump of a real gateway: how they get in, and that every way out is the one without a pump."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from omni_proxy.api.client import ClientConnection
from omni_proxy.api.edge import EdgeLimits
from omni_proxy.messages import Cancelled, Event
from omni_proxy.observe.edge_news import EdgeNews
from omni_proxy.relay.pump import BUILT
from tests.relay.conftest import Rig, Start
from tests.relay.raw import RawClient, chat, post
from tests.relay.scripted import DONE, Seen, event, prefill_ok, usage_event

pytestmark = pytest.mark.skipif(not BUILT, reason="the pump is not built here")

TOKEN = event("token")


class Talk:
    """A decode worker that says what the test tells it to, when it does."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []

    async def __call__(self, seen: Seen) -> None:
        await seen.open_stream()
        self.seen.append(seen)
        await seen.gone.wait()


async def opened(rig: Rig, talk: Talk, in_pump: bool = True, **fields: Any) -> tuple[RawClient, Seen]:
    """A client with its stream open after one token."""
    before = len(talk.seen)
    client = await rig.raw()
    await client.send(post(chat(stream=True, **fields)))
    async with asyncio.timeout(20):
        while len(talk.seen) == before:
            await asyncio.sleep(0.002)
    seen = talk.seen[-1]
    await seen.chunk(TOKEN)
    await client.head()
    assert await part(client) == TOKEN
    assert rig.pumped() == in_pump
    return client, seen


async def part(client: RawClient) -> bytes:
    """The next chunk that a client gets."""
    async with asyncio.timeout(20):
        size = int(await client.reader.readuntil(b"\r\n"), 16)
        return (await client.reader.readexactly(size + 2))[:-2]


async def gone(seen: Seen) -> None:
    async with asyncio.timeout(20):
        await seen.gone.wait()


@pytest.fixture
async def talking(start: Start) -> tuple[Rig, Talk]:
    talk = Talk()
    return await start(p0=prefill_ok, d0=talk), talk


# ------------------------------------------------------------------------------------ the way in


async def test_a_stream_passes_through_the_pump_and_ends_as_ever(talking: tuple[Rig, Talk]) -> None:
    rig, talk = talking
    client, seen = await opened(rig, talk, stream_options={"include_usage": True})
    for text in ("a", "é€😀", "c" * 5000):
        await seen.chunk(event(text))
        assert await part(client) == event(text)
        assert rig.pumped() == 1
    await seen.send(b"".join(b"%x\r\n%b\r\n" % (len(d), d) for d in (TOKEN, usage_event(), DONE)) + b"0\r\n\r\n")
    body, clean = await client._chunks()
    assert (body.startswith(TOKEN), body.endswith(DONE), clean) == (True, True, True)
    assert b'"cached_tokens":3' in body, "P's count, put in by the one who looks"
    await rig.idle()
    ended = (await rig.client.get("/omni/requests")).json()["ended"][0]
    assert (ended["outcome"], ended["generated_tokens"]) == ("completed", 3)


async def test_a_connection_that_was_in_the_pump_is_used_again(talking: tuple[Rig, Talk]) -> None:
    rig, talk = talking
    client, seen = await opened(rig, talk)
    for _ in range(3):
        await seen.chunk(TOKEN)
        assert await part(client) == TOKEN
    await seen.chunk(DONE)
    await seen.end_stream()
    assert await client._chunks() == (DONE, True)
    await rig.idle()
    connections = rig["d0"].connections

    async def again(seen: Seen) -> None:
        await seen.open_stream()
        await seen.chunk(TOKEN + DONE)
        await seen.end_stream()

    seen.gone.set()
    rig["d0"].script = again
    await client.send(post(chat(stream=True)))
    assert (await client.response()).body == TOKEN + DONE
    assert rig["d0"].connections == connections


async def test_it_comes_back_for_an_event_and_goes_in_again(talking: tuple[Rig, Talk]) -> None:
    rig, talk = talking
    client, seen = await opened(rig, talk)
    for data in (TOKEN, b'data: {"choices":[],"error":null}\n\n', TOKEN, TOKEN):
        await seen.chunk(data)
        assert await part(client) == data
    assert rig.pumped() == 1


async def test_it_does_not_go_in_again_and_again_for_nothing(talking: tuple[Rig, Talk]) -> None:
    """Some streams have usage in every event."""
    rig, talk = talking
    client, seen = await opened(rig, talk)
    for _ in range(2):
        await seen.chunk(TOKEN[:-3] + b',"usage":{"completion_tokens":1}}\n\n')
        assert b'"usage"' in await part(client)
        assert rig.pumped() == 0
    await seen.chunk(TOKEN)
    assert await part(client) == TOKEN
    assert rig.pumped() == 0


@pytest.mark.parametrize(
    ("config", "model"),
    [
        ({"resume": True}, "m"),
        ({"models": [{"name": "m", "aliases": ["gpt-4"]}]}, "gpt-4"),
    ],
    ids=["noted", "renamed"],
)
async def test_a_stream_that_is_read_or_changed_on_its_way_stays_out(
    start: Start, config: dict[str, Any], model: str
) -> None:
    talk = Talk()
    rig = await start(config, p0=prefill_ok, d0=talk)
    client, seen = await opened(rig, talk, in_pump=False, model=model)
    await seen.chunk(TOKEN)
    assert await part(client) == TOKEN
    assert rig.pumped() == 0


async def test_a_client_of_http_1_0_stays_out(talking: tuple[Rig, Talk]) -> None:
    rig, talk = talking
    client = await rig.raw()
    await client.send(post(chat(stream=True), version="1.0"))
    await rig.seen("d0")
    for _ in range(3):
        await talk.seen[0].chunk(TOKEN)
        assert await client.reader.readuntil(b"\n\n")
        assert rig.pumped() == 0


# ----------------------------------------------------------------------------------- the ways out


def _close(client: RawClient) -> None:
    client.close()


def _half(client: RawClient) -> None:
    client.writer.write_eof()


def _reset(client: RawClient) -> None:
    client.reset()


@pytest.mark.parametrize("leave", [_close, _half, _reset])
async def test_a_client_leaves(talking: tuple[Rig, Talk], leave: Callable[[RawClient], None]) -> None:
    """... while its worker says nothing."""
    rig, talk = talking
    client, seen = await opened(rig, talk)
    leave(client)
    await gone(seen)
    await rig.idle()
    assert rig.pumped() == 0
    assert (await rig.client.get("/omni/requests")).json()["ended"][0]["outcome"] == "cancelled"


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("begun", [b"", b"20\r\ndata: "])
async def test_a_worker_dies(talking: tuple[Rig, Talk], how: str, begun: bytes) -> None:
    rig, talk = talking
    client, seen = await opened(rig, talk)
    await seen.chunk(TOKEN)
    assert await part(client) == TOKEN
    if begun:
        await seen.send(begun)
    seen.reset() if how == "reset" else seen.writer.close()
    body, clean = await client._chunks()
    assert (body.startswith(b'data: {"error":'), b"worker_closed" in body, clean) == (True, True, False)
    await rig.idle()
    assert rig.pumped() == 0


async def test_a_worker_says_nothing_more(talking: tuple[Rig, Talk]) -> None:
    """Its time counts from the last token that the pump has moved."""
    rig, talk = talking
    client, seen = await opened(rig, talk)
    (leg,) = rig.edge_exchange().legs.values()
    for _ in range(3):
        before = leg.heard_at()
        await asyncio.sleep(0.02)
        await seen.chunk(TOKEN)
        assert await part(client) == TOKEN
        assert leg.heard_at() > before
    assert rig.pumped() == 1
    rig.gateway.front.edge.limit(EdgeLimits(inter_chunk_s=0.05))
    body, clean = await client._chunks()
    assert (b"worker_timeout" in body, clean) == (True, False)
    await gone(seen)
    await rig.idle()


async def test_a_client_stops_reading(talking: tuple[Rig, Talk]) -> None:
    """What is kept for it is bounded, D is not read from, and in the end it gets all."""
    rig, talk = talking
    client, seen = await opened(rig, talk)
    large, sent = event("x" * 30_000), 0
    client.transport.pause_reading()
    exchange = rig.edge_exchange()
    async with asyncio.timeout(60):
        while exchange.slow_since is None:
            seen.writer.write(b"%x\r\n%b\r\n" % (len(large), large))
            sent += 1
            await asyncio.sleep(0)
    front = exchange.client
    assert isinstance(front, ClientConnection)
    assert rig.pumped() == 0
    assert front.transport.get_write_buffer_size() < 1 << 20
    client.transport.resume_reading()
    body = b""
    while len(body) < sent * len(large):
        body += await part(client)
    assert body == sent * large
    for _ in range(2):
        await seen.chunk(TOKEN)
        assert await part(client) == TOKEN
    await rig.in_pump()


async def test_a_pause_in_the_middle_of_a_chunk(talking: tuple[Rig, Talk]) -> None:
    """Whoever stops a stream that is in the pump gets all of it afterwards."""
    rig, talk = talking
    client, seen = await opened(rig, talk)
    exchange, edge = rig.edge_exchange(), rig.gateway.front.edge
    await seen.chunk(TOKEN)
    assert await part(client) == TOKEN
    framed = b"%x\r\n%b\r\n" % (len(TOKEN), TOKEN)
    await seen.send(framed[:30])
    await asyncio.sleep(0.05)
    edge.client_slow(exchange)
    assert rig.pumped() == 0
    await seen.send(framed[30:])
    await asyncio.sleep(0.05)
    assert not client.reader._buffer  # type: ignore[attr-defined]
    edge.client_ready(exchange)
    assert await part(client) == TOKEN


async def test_nobody_writes_between_what_the_pump_writes(talking: tuple[Rig, Talk]) -> None:
    """Who writes to the client takes the stream out, and it goes on behind what he wrote."""
    rig, talk = talking
    client, seen = await opened(rig, talk)
    rig.edge_exchange().send(b": from us\n\n")
    assert (rig.pumped(), await part(client)) == (0, b": from us\n\n")
    await seen.chunk(TOKEN)
    assert await part(client) == TOKEN


@pytest.mark.parametrize("end", ["abort", "drop", "finished"])
async def test_whoever_ends_the_clients_connection_takes_it_out(talking: tuple[Rig, Talk], end: str) -> None:
    rig, talk = talking
    _, seen = await opened(rig, talk)
    front = rig.edge_exchange().client
    assert isinstance(front, ClientConnection)
    front.finished(close=True) if end == "finished" else getattr(front, end)()
    assert rig.pumped() == 0
    front.transport.abort()
    rig.edge_exchange().client = None
    rig.gateway.front.edge.post(Cancelled(rig.edge_exchange().rid))
    await gone(seen)
    await rig.idle()


async def test_the_end_of_the_gateway(start: Start) -> None:
    """A drain lets it run, and its end takes it out."""
    talk = Talk()
    rig = await start(p0=prefill_ok, d0=talk)
    client, seen = await opened(rig, talk)
    rig.gateway.scheduling.draining = True
    await seen.chunk(TOKEN)
    assert (await part(client), rig.pumped()) == (TOKEN, 1)
    rig.gateway.front.edge.exchanges[rig.edge_exchange().rid].client.drop()  # type: ignore[union-attr]
    assert rig.pumped() == 0
    await rig.idle()
    # The rig ends with another one open.
    await opened(rig, talk)


async def test_a_client_that_has_left_is_never_written_to_again(
    talking: tuple[Rig, Talk], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler, in another process, hears of it later. Until then the worker goes on, and the number of the
    client's socket is soon another one's."""
    rig, talk = talking
    edge, kept = rig.gateway.front.edge, list[Event]()
    client, seen = await opened(rig, talk)
    exchange = rig.edge_exchange()
    front = exchange.client
    assert isinstance(front, ClientConnection)
    number = front.transport.get_extra_info("socket").fileno()
    inode = os.fstat(number).st_ino
    post_at_once = edge.post
    monkeypatch.setattr(edge, "post", kept.append)
    client.close()
    async with asyncio.timeout(20):
        while exchange.client is not None or _inode(number) == inode:
            await asyncio.sleep(0.002)
    assert (rig.pumped(), kept) == (0, [Cancelled(exchange.rid)])
    near, far = socket.socketpair()
    with near, far:
        if _inode(number) is None:
            os.dup2(near.fileno(), number)
        others = [await rig.raw() for _ in range(8)]
        await seen.chunk(event("secret"))
        await asyncio.sleep(0.1)
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)
        assert not any(other.reader._buffer for other in others)  # type: ignore[attr-defined]
        if _inode(number) == os.fstat(near.fileno()).st_ino:
            os.close(number)
    post_at_once(kept[0])
    await gone(seen)
    await rig.idle()


def _inode(number: int) -> int | None:
    """Which file has a number; None: none has."""
    try:
        return os.fstat(number).st_ino
    except OSError:
        return None


async def test_each_client_gets_its_own(talking: tuple[Rig, Talk]) -> None:
    """Clients come and go at every point; numbers of sockets are used again all the time."""
    rig, talk = talking

    async def one(number: int) -> None:
        name, client = f"n{number}", await rig.raw()
        await client.send(post(chat(stream=True, user=name)))
        async with asyncio.timeout(30):
            while (seen := next((s for s in talk.seen if s.json.get("user") == name), None)) is None:
                await asyncio.sleep(0.002)
        await seen.chunk(event(name))
        await client.head()
        for _ in range(number % 7):
            assert await part(client) == event(name)
            await seen.chunk(event(name))
        [client.close, client.reset, seen.reset, seen.writer.close][number % 4]()
        if number % 4 > 1:
            body, clean = await client._chunks()
            error = b'data: {"error":'
            assert (body.partition(error)[0].replace(event(name), b""), clean) == (b"", False)
        await gone(seen)

    for first in range(0, 120, 30):
        await asyncio.gather(*(one(number) for number in range(first, first + 30)))
    await rig.idle()
    assert rig.pumped() == 0


# -------------------------------------------------------------------------------------- counting


@pytest.mark.parametrize(("start", "pumps"), [(True, True), (False, False)], indirect=["start"])
async def test_counts_are_the_same_with_and_without(start: Start, pumps: bool) -> None:
    """Every read with something of the body in it ends a gap, and bytes are the body's."""
    talk = Talk()
    rig = await start(p0=prefill_ok, d0=talk)
    client, seen = await opened(rig, talk, in_pump=pumps)
    exchange, counted, gaps = rig.edge_exchange(), Counted(rig), 0
    framed = b"%x\r\n%b\r\n" % (len(TOKEN), TOKEN)
    for pieces in ([framed], [framed * 3], [framed[:40], framed[40:]], [framed[:2], framed[2:]], [framed + framed[:9]]):
        for piece in pieces:
            await seen.send(piece)
            gaps += len(piece) > 2
            await counted.reach(gaps)
    await seen.send(framed[9:])
    await counted.reach(gaps + 1)
    body = b""
    while len(body) < 8 * len(TOKEN):
        body += await part(client)
    assert body == TOKEN * 8
    client.reset()
    await rig.idle()
    assert (counted.count, exchange.bytes_out) == (gaps + 1, 9 * len(TOKEN))


class Counted:
    """The gaps that a gateway has counted from now on."""

    def __init__(self, rig: Rig) -> None:
        self.count = 0
        self._front = rig.gateway.front
        self._front.edge.news()
        self._front._counted = self._add

    def _add(self, news: EdgeNews) -> None:
        self.count += sum(count for _, count in news.gaps) + news.long_gaps

    async def reach(self, count: int) -> None:
        async with asyncio.timeout(20):
            while self.count < count:
                await asyncio.sleep(0.002)
                self._front._upkeep()
        assert self.count == count
