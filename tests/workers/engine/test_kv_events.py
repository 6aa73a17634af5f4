"""The engine tells of every block that its prefix cache stores and forgets: a reader ends up with the same cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import zmq

from omni_proxy.apc.feed import Feed
from omni_proxy.apc.keys import block_keys
from omni_proxy.messages import BlocksRemoved, BlocksStored, CacheCleared
from omni_proxy.workers.engine.blocks import BlockPool
from omni_proxy.workers.engine.cache_log import CacheLog, event_hash
from omni_proxy.workers.engine.engine import Engine
from omni_proxy.workers.engine.kv_events import KvEventPublisher
from omni_proxy.workers.engine.planner import Planner
from omni_proxy.workers.engine.sequence import Sequence
from omni_proxy.workers.engine.types import EngineConfig, EngineRequest, SamplingParams
from tests.workers.engine.helpers import Call, prompt, request


class Reader:
    """A gateway's view of one publisher."""

    def __init__(self) -> None:
        self.feed = Feed("p0", 0)
        self.keys: set[int] = set()

    def hear(self, number: int, payload: bytes) -> None:
        for change in self.feed.hear(number, payload):
            match change:
                case BlocksStored(keys=keys):
                    self.keys.update(keys)
                case BlocksRemoved(keys=keys):
                    self.keys.difference_update(keys)
                case CacheCleared():
                    self.keys.clear()
        assert self.feed.wants is None


def test_a_reader_follows_the_pool_through_random_work() -> None:
    size, log, reader, random = 16, CacheLog(16), Reader(), Random(4)
    pool = BlockPool(24, size, listener=log)
    planner = Planner(pool, max_num_seqs=4, max_num_batched_tokens=64)
    names: dict[int, int] = {}
    """Engine hash -> our key, of everything that was ever stored."""
    number = 0
    for step in range(300):
        if random.random() < 0.5:
            tokens = [random.randrange(2) for _ in range(16)] * random.randrange(1, 8)
            salt = random.choice(["", "", "salt"])
            asked = EngineRequest(f"r{step}", tuple(tokens), SamplingParams(8), cache_salt=salt)
            planner.add(Sequence(asked, size))
        for chunk in planner.plan().chunks:
            planner.advance(chunk, 1 if chunk.samples else None)
        for seq in list(planner):
            whole = seq.tokens[: len(seq.tokens) // size * size]
            keys = block_keys(whole, salt=seq.request.cache_salt)
            names |= {event_hash(k): own for k, own in zip(seq.keys(len(whole)), keys, strict=True)}
            if seq.num_generated >= 4:
                planner.remove(seq.request_id)
        if random.random() < 0.02:
            pool.reset_cache()
        batch = log.take(0.0)
        if batch is not None:
            reader.hear(number, batch)
            number += 1
        assert reader.keys == {names[event_hash(key)] for key in pool._by_key}
    assert reader.feed.translator.unknown_parents == 0
    assert number > 50


@contextmanager
def subscribed(publisher: KvEventPublisher) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    """A subscriber that the publisher has noticed, and a socket for replays."""
    with zmq.Context() as context, context.socket(zmq.SUB) as sub, context.socket(zmq.DEALER) as replay:
        for sock in (sub, replay):
            sock.setsockopt(zmq.RCVTIMEO, 20_000)
            sock.setsockopt(zmq.LINGER, 0)
        sub.subscribe(b"")
        sub.connect(publisher.endpoint)
        replay.connect(publisher.replay_endpoint)
        yield sub, replay


def replayed(replay: zmq.Socket[bytes], first: int) -> list[tuple[int, bytes]]:
    replay.send_multipart((b"", first.to_bytes(8, "big")))
    found: list[tuple[int, bytes]] = []
    while True:
        empty, _, number, payload = replay.recv_multipart()
        assert empty == b""
        if int.from_bytes(number, "big", signed=True) == -1:
            return found
        found.append((int.from_bytes(number, "big"), payload))


def test_batches_are_numbered_and_sent_again_on_request() -> None:
    publisher = KvEventPublisher("127.0.0.1", 0)
    publisher.start()
    try:
        with subscribed(publisher) as (sub, replay):
            for number in range(3):
                publisher.send(b"early %d" % number)
            assert replayed(replay, 1) == [(1, b"early 1"), (2, b"early 2")]
            replay.send_multipart((b"", b"nonsense number"))
            assert replayed(replay, 5) == []
            # PUB drops what comes before it knows of the subscription: send until something arrives.
            deadline, number = time.monotonic() + 20, 3
            while not sub.poll(10):
                assert time.monotonic() < deadline
                publisher.send(b"live")
                number += 1
            topic, heard, payload = sub.recv_multipart()
            assert (topic, payload) == (b"", b"live")
            assert 3 <= int.from_bytes(heard, "big") < number
    finally:
        publisher.stop()
        publisher.stop()


def test_a_port_in_use_is_an_os_error() -> None:
    first = KvEventPublisher("127.0.0.1", 0)
    port = int(first.endpoint.rpartition(":")[2])
    with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
        KvEventPublisher("127.0.0.1", port)
    first.stop()


@pytest.mark.slow
def test_a_running_engine_publishes_what_it_caches(tied: Path) -> None:
    engine = Engine(EngineConfig(str(tied), kv_cache_bytes=1 << 20, threads=1, kv_events_port=0))
    engine.start()
    reader = Reader()
    try:
        (source,) = engine.kv_event_sources()
        assert source["endpoint"].startswith("tcp://127.0.0.1:")
        tokens = prompt(70)
        assert Call(engine, request("a", tokens, 2)).end().cached_tokens == 0
        assert Call(engine, request("b", tokens, 2)).end().cached_tokens == 64
        assert Call(engine, request("c", tokens, 2, cache_salt="s")).end().cached_tokens == 0
        assert engine._events is not None
        with subscribed(engine._events) as (_, replay):
            for number, payload in replayed(replay, 0):
                reader.hear(number, payload)
        assert reader.keys == {*block_keys(tokens), *block_keys(tokens, salt="s")}
        assert engine.reset_prefix_cache()
        with subscribed(engine._events) as (_, replay):
            deadline = time.monotonic() + 20
            while reader.keys and time.monotonic() < deadline:
                for number, payload in replayed(replay, (reader.feed.last or 0) + 1):
                    reader.hear(number, payload)
        assert reader.keys == set()
    finally:
        engine.stop()


def test_an_engine_that_is_not_asked_to_publishes_nothing(tied: Path) -> None:
    engine = Engine(EngineConfig(str(tied), kv_cache_bytes=1 << 20, threads=1))
    assert engine.kv_event_sources() == []
    engine.stop()
