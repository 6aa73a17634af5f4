"""Subscriptions over real sockets: what is lost, doubled, killed or forged leaves the index right, soon."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from random import Random

import httpx
import msgspec
import pytest
import zmq

from omni_proxy.apc.caches import Caches
from omni_proxy.apc.feed import Change, Feed
from omni_proxy.apc.keys import block_keys
from omni_proxy.config import Worker, WorkerKvEvents
from omni_proxy.messages import Role, WorkerSpec
from omni_proxy.workers import kv_events
from omni_proxy.workers.engine.kv_events import KvEventPublisher
from omni_proxy.workers.kv_events import KvEvents, Pace, Source
from omni_proxy.workers.kv_sources import sources_of
from omni_proxy.workers.probe import EventSource, Probe

RIGHT_WITHIN_S = 5.0
"""What the index may need after a loss. Machines that run tests are slow: `benchmarks.apc` takes the time."""


class Gateway:
    """The part of a gateway that hears events, without the rest."""

    def __init__(self) -> None:
        self.caches = Caches()
        self.events = KvEvents(self.caches.heard)
        for name in ("p0", "p1"):
            self.caches.member(WorkerSpec(name, Role.PREFILL))

    async def holds(self, worker: str, expected: Callable[[], set[int]]) -> None:
        """Wait until the index holds for a worker what it should."""
        async with asyncio.timeout(30):
            while self.keys(worker) != expected():
                await asyncio.sleep(0.02)

    def keys(self, worker: str) -> set[int]:
        index = self.caches.index
        return {key for key in index._tiers[0] if worker in index.match((key,))}


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    made = Gateway()
    yield made
    await made.events.close()


class Engine:
    """A cache that publishes what it does; some of its messages never leave."""

    def __init__(self, port: int = 0, seed: int = 0) -> None:
        self.publisher = KvEventPublisher("127.0.0.1", port)
        self.publisher.start()
        self.random = Random(seed)
        self.held: dict[int, list[int]] = {}
        self.serial = 0

    @property
    def source(self) -> Source:
        told = self.publisher.source()
        return Source("p0", told["endpoint"], told["replay_endpoint"])

    def keys(self) -> set[int]:
        return {block_keys(tokens)[-1] for tokens in self.held.values()}

    def work(self, steps: int) -> None:
        for _ in range(steps):
            if len(self.held) > 20:
                name = self.random.choice(list(self.held))
                del self.held[name]
                self.send({"type": "BlockRemoved", "block_hashes": [name]})
            else:
                self.serial += 1
                tokens = [self.random.randrange(1000) for _ in range(16)]
                self.held[self.serial] = tokens
                self.send(
                    {
                        "type": "BlockStored",
                        "block_hashes": [self.serial],
                        "parent_block_hash": None,
                        "token_ids": tokens,
                        "block_size": 16,
                    }
                )

    def send(self, event: dict[str, object]) -> None:
        self.publisher.send(msgspec.msgpack.encode([0.0, [event], 0]))

    def stop(self) -> None:
        self.publisher.stop()


def test_a_loss_is_looked_for_often_enough() -> None:
    assert kv_events.CHECK_S + kv_events.REPLAY_STEP_S < RIGHT_WITHIN_S


class Lossy:
    """Stands between a publisher and the gateway and drops some messages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, share: float) -> None:
        hear, random = Feed.hear, Random(7)
        self.dropped = 0

        def heard(feed: Feed, number: int, payload: bytes) -> list[Change]:
            if random.random() < share:
                self.dropped += 1
                return []
            return hear(feed, number, payload)

        monkeypatch.setattr(Feed, "hear", heard)


@pytest.mark.slow
async def test_events_from_before_and_after_the_subscription_arrive(gateway: Gateway) -> None:
    engine = Engine()
    engine.work(50)
    gateway.events.set("p0", [engine.source])
    await gateway.holds("p0", engine.keys)
    engine.work(200)
    await gateway.holds("p0", engine.keys)
    (subscription,) = gateway.events.subscriptions()
    assert subscription.connected
    assert subscription.feed.counts.malformed == 0
    engine.stop()


@pytest.mark.slow
async def test_one_percent_of_the_events_lost(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    lossy = Lossy(monkeypatch, 0.01)
    engine = Engine()
    gateway.events.set("p0", [engine.source])
    for _ in range(20):
        engine.work(50)
        await asyncio.sleep(0.01)  # lets them arrive in several turns; nothing depends on how many
    await gateway.holds("p0", engine.keys)
    assert lossy.dropped > 0
    engine.stop()


@pytest.mark.slow
async def test_a_last_event_that_was_lost_is_missed_all_the_same(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    gateway.events.set("p0", [engine.source])
    engine.work(10)
    await gateway.holds("p0", engine.keys)
    Lossy(monkeypatch, 1.0)
    engine.work(5)
    await gateway.holds("p0", engine.keys)
    engine.stop()


@pytest.mark.slow
async def test_a_publisher_that_dies_and_comes_back(gateway: Gateway) -> None:
    engine = Engine(seed=1)
    source = engine.source
    gateway.events.set("p0", [Source("p0", source.endpoint, source.replay_endpoint)])
    engine.work(30)
    await gateway.holds("p0", engine.keys)
    engine.stop()
    await gateway.holds("p0", set)
    again = Engine(int(source.endpoint.rpartition(":")[2]), seed=2)
    gateway.events.set("p0", [again.source])
    again.work(40)
    await gateway.holds("p0", again.keys)
    again.stop()


@pytest.mark.slow
async def test_a_restart_that_nobody_noticed_but_the_connection(gateway: Gateway) -> None:
    """The replay socket is not there for the second publisher: only what comes live can be known."""
    engine = Engine(seed=1)
    source = engine.source
    gateway.events.set("p0", [Source("p0", source.endpoint)])
    await until(lambda: gateway.events.subscriptions()[0].connected)
    engine.work(30)
    await gateway.holds("p0", engine.keys)
    engine.stop()
    await gateway.holds("p0", set)
    again = Engine(int(source.endpoint.rpartition(":")[2]), seed=2)
    await until(lambda: gateway.events.subscriptions()[0].connected)
    again.work(10)
    await gateway.holds("p0", again.keys)
    again.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_a_worker_that_is_no_member_any_more_is_forgotten(gateway: Gateway) -> None:
    engine = Engine()
    gateway.events.set("p0", [engine.source])
    engine.work(5)
    await gateway.holds("p0", engine.keys)
    gateway.events.keep([])
    await gateway.holds("p0", set)
    assert gateway.events.subscriptions() == []
    engine.stop()


async def test_an_endpoint_belongs_to_one_worker(gateway: Gateway) -> None:
    engine = Engine()
    gateway.events.set("p0", [engine.source])
    gateway.events.set("p1", [Source("p1", engine.source.endpoint)])
    assert [s.source.worker for s in gateway.events.subscriptions()] == ["p0"]
    assert gateway.events.refused == 1
    engine.stop()


@pytest.mark.slow
async def test_a_peer_that_floods_with_garbage_does_not_stop_the_gateway(gateway: Gateway) -> None:
    """Strange frames, broken batches and huge ones at full speed: counted, and the event loop goes on."""
    with zmq.Context() as context, context.socket(zmq.PUB) as flood:
        flood.setsockopt(zmq.LINGER, 0)
        port = flood.bind_to_random_port("tcp://127.0.0.1")
        gateway.events.set("p0", [Source("p0", f"tcp://127.0.0.1:{port}")])
        (subscription,) = gateway.events.subscriptions()
        await until(lambda: subscription.connected)
        number, turns = 0, 0
        big = msgspec.msgpack.encode([0.0, [["BlockStored", [1], None, list(range(100_000)), 100_000, None]], 0])
        deadline = time.monotonic() + 30
        while subscription.strange < 50 or subscription.feed.counts.malformed < 50:
            assert time.monotonic() < deadline
            for _ in range(200):
                flood.send_multipart((b"",))
                flood.send_multipart((b"", b"short", b"x"))
                flood.send_multipart((b"", number.to_bytes(8, "big"), b"\xc1"))
                number += 1
            flood.send_multipart((b"", number.to_bytes(8, "big"), big))
            number += 1
            await asyncio.sleep(0)
            turns += 1
        assert turns > 1
        assert gateway.keys("p0") == set()


async def test_the_pace_leaves_time_for_others() -> None:
    pace, worked = Pace(share=0.2), 0.0
    begin = time.monotonic()
    for _ in range(15):
        async with pace.slot():
            busy = time.monotonic() + 0.002
            while time.monotonic() < busy:
                pass
            worked += 0.002
    assert worked <= 0.2 * (time.monotonic() - begin) + 2 * kv_events._SLICE_S


# ------------------------------------------------------------------------------------- where to listen


def worker(**kv: object) -> Worker:
    events = WorkerKvEvents(**kv)  # type: ignore[arg-type]
    return Worker(name="p0", url="http://node1:8000", role=Role.PREFILL, kv_events=events)


def test_the_config_names_a_port_for_each_rank() -> None:
    sources = sources_of(worker(endpoint="tcp://h:5557", replay_endpoint="tcp://h:5657", topic="kv", ranks=3), [])
    assert [(s.endpoint, s.replay_endpoint, s.topic, s.rank) for s in sources] == [
        ("tcp://h:5557", "tcp://h:5657", "kv", 0),
        ("tcp://h:5558", "tcp://h:5658", "kv", 1),
        ("tcp://h:5559", "tcp://h:5659", "kv", 2),
    ]


def test_the_worker_is_believed_about_its_ports_not_about_its_wildcards() -> None:
    told = [
        EventSource("tcp://*:5557", "tcp://0.0.0.0:5657", "t", 1),
        EventSource("tcp://[::]:5558"),
        EventSource("tcp://10.0.0.7:5559", None, "", 2),
        EventSource("ipc:///tmp/x"),
        EventSource("tcp://host"),
    ]
    assert [(s.endpoint, s.replay_endpoint, s.topic, s.rank) for s in sources_of(worker(), told)] == [
        ("tcp://node1:5557", "tcp://node1:5657", "t", 1),
        ("tcp://node1:5558", None, "", 0),
        ("tcp://10.0.0.7:5559", None, "", 2),
    ]
    assert sources_of(worker(discover=False), told) == []


def test_ranks_that_are_told_with_one_port_are_counted_up() -> None:
    told = [EventSource("tcp://*:5557", "tcp://*:5657", "", rank) for rank in (0, 1)]
    assert [(s.endpoint, s.replay_endpoint) for s in sources_of(worker(), told)] == [
        ("tcp://node1:5557", "tcp://node1:5657"),
        ("tcp://node1:5558", "tcp://node1:5658"),
    ]


@pytest.mark.parametrize(
    ("answer", "ranks"),
    [
        (
            b'{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:1","hwm":5},"3":{"endpoint":"x"}}',
            [0, 3],
        ),
        (b'[{"data_parallel_rank":2,"endpoint":"tcp://h:1","replay_endpoint":null,"topic":""}]', [2]),
        (b'{"0":{"enable_kv_cache_events":false,"endpoint":"tcp://*:1"}}', []),
        (b'[{"endpoint":"x","publisher":"null"}]', []),
        (b"{}", []),
        (b'{"detail":"Not Found"}', []),
        (b"nonsense", []),
    ],
)
async def test_workers_say_in_two_forms_where_they_publish(answer: bytes, ranks: list[int]) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=answer))
    async with httpx.AsyncClient(transport=transport) as client:
        told = await Probe("http://h:1", None, None, client, 1.0)._event_sources()
    assert [source.data_parallel_rank for source in told] == ranks


@pytest.mark.parametrize("endpoint", ["h:1", "tcp://*:1", "tcp://h", "tcp://h:0", "tcp://h:70000", "tcp://h:x"])
def test_an_impossible_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        worker(endpoint=endpoint)
    with pytest.raises(ValueError, match="no port for each"):
        worker(endpoint="tcp://h:65535", ranks=2)
