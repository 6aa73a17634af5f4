"""Gateways that hear of each other through a real Redis; one dies, Redis dies, Redis comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from omni_proxy.core import Core
from omni_proxy.messages import Arrived, Cancelled, Event, OthersHeard, Tick
from tests.core.steps import core_of, spec
from tests.scaleout.redis_server import RedisServer, needs_redis, redis_server

pytest.importorskip("redis")

from omni_proxy.replicas.account import Account
from omni_proxy.replicas.link import Link

pytestmark = [needs_redis, pytest.mark.e2e, pytest.mark.slow]


class Replica:
    """A core and its link; what the core does is of no interest here."""

    def __init__(self, server: RedisServer, name: str, lease_s: float = 1.0, group: str = "g") -> None:
        self.core: Core = core_of("p0", "p1", "d0")
        self.orders: dict[str, bytes] = {}
        self.account = Account(name, self.core, lambda: self.link.changed())
        self.link = Link(
            *(server.url, group, name, 0.005, lease_s, time.monotonic, self.account.report, self._heard, self._ordered)
        )
        self.events: list[OthersHeard] = []
        self._task: asyncio.Task[None] | None = None

    def _heard(self, event: OthersHeard) -> None:
        self.events.append(event)
        self.core.handle(event, time.monotonic())

    def _ordered(self, orders: object) -> None:
        self.orders = dict(orders)  # type: ignore[call-overload]

    def start(self) -> None:
        self._task = asyncio.create_task(self.link.run())

    def tell(self, event: Event) -> None:
        effects = self.core.handle(event, time.monotonic())
        self.account.heard(event, effects)
        at = self.core.next_wakeup()
        if at is not None and not isinstance(event, Tick):
            asyncio.get_running_loop().call_later(max(0.0, at - time.monotonic()) + 0.001, self.tell, Tick())

    async def die(self) -> None:
        """As by SIGKILL: without a goodbye."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None

    async def close(self) -> None:
        if self._task is not None:
            await self.die()
        await self.link.close()

    def others_seqs(self) -> int:
        return sum(w.other_seqs for w in self.core.workers())


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> float:
    begun = time.monotonic()
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
    return time.monotonic() - begun


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with redis_server(tmp_path) as running:
        yield running


@pytest.fixture
async def pair(server: RedisServer) -> AsyncIterator[tuple[Replica, Replica]]:
    a, b = Replica(server, "a"), Replica(server, "b")
    a.start()
    b.start()
    try:
        await until(lambda: a.link.others.names() == ["b"] and b.link.others.names() == ["a"])
        yield a, b
    finally:
        await a.close()
        await b.close()


async def test_what_one_holds_the_other_sees_and_nothing_else(pair: tuple[Replica, Replica]) -> None:
    a, b = pair
    a.tell(Arrived("r", spec(session="s")))
    await until(lambda: b.others_seqs() == 1)
    assert a.others_seqs() == 0
    assert ("s", next(w.name for w in a.core.workers() if w.seqs)) in [h for e in b.events for h in e.homes]
    a.tell(Cancelled("r"))
    await until(lambda: b.others_seqs() == 0)


async def test_the_leases_of_one_that_dies_are_gone_within_five_seconds(server: RedisServer) -> None:
    a, b = Replica(server, "a", lease_s=3.0), Replica(server, "b", lease_s=3.0)
    a.start()
    b.start()
    try:
        await until(lambda: b.link.others.names() == ["a"])
        a.tell(Arrived("r", spec()))
        await until(lambda: b.others_seqs() == 1)
        await a.die()
        took_s = await until(lambda: b.others_seqs() == 0)
        assert 1.0 < took_s < 5.0
        assert b.link.others.lost == 1
    finally:
        await a.close()
        await b.close()


async def test_a_goodbye_is_heard_at_once(pair: tuple[Replica, Replica]) -> None:
    a, b = pair
    a.tell(Arrived("r", spec()))
    await until(lambda: b.others_seqs() == 1)
    await a.close()
    assert await until(lambda: b.others_seqs() == 0) < 0.9
    assert b.link.others.lost == 0


async def test_one_that_starts_later_knows_what_others_hold(server: RedisServer, pair: tuple[Replica, Replica]) -> None:
    a, _ = pair
    a.tell(Arrived("r", spec()))
    await until(lambda: pair[1].others_seqs() == 1)
    late = Replica(server, "late")
    late.start()
    await until(lambda: late.others_seqs() == 1)
    await late.close()


async def test_without_redis_each_goes_on_alone_and_they_find_each_other_again(
    server: RedisServer, pair: tuple[Replica, Replica]
) -> None:
    a, b = pair
    a.tell(Arrived("r", spec()))
    await until(lambda: b.others_seqs() == 1)
    await server.stop()
    await until(lambda: not a.link.connected and not b.link.connected)
    await until(lambda: b.others_seqs() == 0, 5.0)
    begun = time.monotonic()
    b.tell(Arrived("q", spec()))  # nothing waits for Redis
    assert time.monotonic() - begun < 0.1
    assert b.link.failures > 0
    assert b.link.seconds_alone() > 0
    await server.start()
    await until(lambda: b.others_seqs() == 1 and a.others_seqs() == 1)
    alone_s = b.link.seconds_alone()
    await asyncio.sleep(0.05)
    assert b.link.seconds_alone() == alone_s


async def test_a_redis_that_hangs_is_as_good_as_gone(server: RedisServer, pair: tuple[Replica, Replica]) -> None:
    process = server._process
    assert process is not None
    a, b = pair
    a.tell(Arrived("r", spec()))
    await until(lambda: b.others_seqs() == 1)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        await until(lambda: b.others_seqs() == 0 and not b.link.connected)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    await until(lambda: b.others_seqs() == 1)


async def test_groups_do_not_hear_each_other(server: RedisServer, pair: tuple[Replica, Replica]) -> None:
    a, _ = pair
    stranger = Replica(server, "stranger", group="h")
    stranger.start()
    await until(lambda: stranger.link.connected)
    await asyncio.sleep(0.1)
    assert stranger.link.others.names() == []
    assert a.link.others.names() == ["b"]
    await stranger.close()


async def test_nonsense_on_the_channel_is_counted_and_harms_nobody(
    server: RedisServer, pair: tuple[Replica, Replica]
) -> None:
    from redis.asyncio import Redis

    a, b = pair
    async with Redis.from_url(server.url) as client:
        for data in (b"", b"\xff\xff", b"{}", b"x" * 1000):
            await client.publish("omni:g:reports", data)
        await client.set("omni:g:gateway:odd", b"odd")
    await until(lambda: a.link.malformed >= 4)
    b.tell(Arrived("r", spec()))
    await until(lambda: a.others_seqs() == 1)


async def test_orders_reach_all_and_those_who_come_later(server: RedisServer, pair: tuple[Replica, Replica]) -> None:
    a, b = pair
    assert await a.link.order("p0", b"drain")
    await until(lambda: b.orders == {"p0": b"drain"} and a.orders == {"p0": b"drain"})
    late = Replica(server, "late")
    late.start()
    await until(lambda: late.orders == {"p0": b"drain"})
    assert await late.link.order("p0", None)
    await until(lambda: a.orders == {} and b.orders == {})
    await late.close()
    await server.stop()
    assert not await a.link.order("p0", b"drain")
