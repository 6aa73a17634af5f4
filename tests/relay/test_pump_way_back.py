"""Streams that the pump has given back and the event loop has not collected yet, in the hands of all who touch them."""

from __future__ import annotations

import asyncio

import pytest

from omni_proxy.api.client import ClientConnection
from omni_proxy.api.edge import EdgeLimits
from omni_proxy.messages import Cancelled
from omni_proxy.relay.pump import BUILT
from tests.relay.conftest import Rig, Start
from tests.relay.raw import RawClient
from tests.relay.scripted import DONE, Seen, event, prefill_ok
from tests.relay.test_pumping import Talk, gone, opened

pytestmark = pytest.mark.skipif(not BUILT, reason="the pump is not built here")

LAST = event("last")
END = b"".join(b"%x\r\n%b\r\n" % (len(data), data) for data in (LAST, DONE)) + b"0\r\n\r\n"


class WayBack:
    """A stream whose end has been read by the pump, in a gateway whose loop does not collect until it is told to."""

    def __init__(self, rig: Rig, client: RawClient, seen: Seen) -> None:
        self.rig = rig
        self.client = client
        self.seen = seen
        self.exchange = rig.edge_exchange()
        self.edge = rig.gateway.front.edge

    @property
    def front(self) -> ClientConnection:
        front = self.exchange.client
        assert isinstance(front, ClientConnection)
        return front

    def collect(self) -> None:
        """What the loop does when it comes to it."""
        pump = self.edge.starter.pump
        assert pump is not None
        pump._moves.collect()


@pytest.fixture
async def back(start: Start) -> WayBack:
    talk = Talk()
    rig: Rig = await start(p0=prefill_ok, d0=talk)
    client, seen = await opened(rig, talk)
    pump = rig.gateway.front.edge.starter.pump
    assert pump is not None
    asyncio.get_running_loop().remove_reader(pump._moves.fileno())
    await seen.send(END)
    await asyncio.sleep(0.05)  # the thread has read it
    assert rig.pumped() == 1
    return WayBack(rig, client, seen)


async def test_it_goes_on_when_it_is_collected(back: WayBack) -> None:
    back.collect()
    assert back.rig.pumped() == 0
    assert await back.client._chunks() == (LAST + DONE, True)
    await back.rig.idle()


async def test_a_pause_brings_its_end(back: WayBack) -> None:
    back.edge.client_slow(back.exchange)
    assert back.rig.pumped() == 0
    body, clean = await back.client._chunks()
    assert (body, clean) == (LAST + DONE, True)
    back.collect()
    await back.rig.idle()
    assert len(back.rig.gateway.front.upstreams["d0"].pool._idle) == 1


async def test_who_writes_to_the_client_writes_behind_it(back: WayBack) -> None:
    passage = back.front.passage
    assert passage is not None
    passage.stop()
    body, clean = await back.client._chunks()
    assert (body, clean) == (LAST + DONE, True)
    await back.rig.idle()


@pytest.mark.parametrize("leave", ["reset", "close"])
async def test_the_client_leaves(back: WayBack, leave: str) -> None:
    getattr(back.client, leave)()
    await gone(back.seen)
    back.collect()
    assert back.rig.pumped() == 0
    await back.rig.idle()


async def test_the_request_is_cancelled(back: WayBack) -> None:
    back.front.drop()
    back.exchange.client = None
    back.edge.post(Cancelled(back.exchange.rid))
    assert back.rig.pumped() == 0
    back.collect()
    await gone(back.seen)
    await back.rig.idle()


async def test_a_time_limit_ends_it(back: WayBack) -> None:
    """It was heard of last when its end was read: whoever waits for longer than allowed has waited for us."""
    back.edge.limit(EdgeLimits(inter_chunk_s=0.01))
    await gone(back.seen)
    back.collect()
    await back.rig.idle()


async def test_the_worker_goes(back: WayBack) -> None:
    back.seen.writer.transport.abort()
    await asyncio.sleep(0.05)
    back.collect()
    body, clean = await back.client._chunks()
    assert (body, clean) == (LAST + DONE, True)
    await back.rig.idle()
