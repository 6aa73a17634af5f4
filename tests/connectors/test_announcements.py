"""Workers that announce themselves over ZeroMQ: they come, serve, move and go."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from omni_proxy.config import Announcements, ConfigError, Worker, parse
from omni_proxy.workers.announcements import AnnouncedWorkers
from omni_proxy.workers.roster import CONFIG, Roster
from tests.relay.conftest import FAST, running
from tests.relay.scripted import ScriptedWorker, decode_stream, prefill_ok


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


class Speaker:
    """What vLLM's connector sends, from a socket of its own."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._sock = self._context.socket(zmq.DEALER)
        self._sock.setsockopt(zmq.LINGER, 0)
        self._sock.connect(endpoint)

    async def say(self, message: Any, *before: bytes) -> None:
        raw = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
        await self._sock.send_multipart((*before, raw))

    def close(self) -> None:
        self._context.destroy(linger=0)


class Listener:
    """The socket alone, and what it found."""

    def __init__(self, expire_s: float) -> None:
        self.found: list[list[Worker]] = []
        config = Announcements(listen=f"tcp://127.0.0.1:{free_port()}", expire_s=expire_s, group="g", max_seqs=5)
        self.announced = AnnouncedWorkers(config, lambda workers: self.found.append(list(workers)))
        self.speaker = Speaker(self.announced.endpoint)

    async def until(self, count: int) -> list[list[Worker]]:
        async with asyncio.timeout(5):
            while len(self.found) < count:
                await asyncio.sleep(0.005)
        return self.found


@pytest.fixture
async def listener(request: pytest.FixtureRequest) -> AsyncIterator[Listener]:
    one = Listener(getattr(request, "param", 30.0))
    task = asyncio.create_task(one.announced.run())
    yield one
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    one.speaker.close()


def hello(kind: str, port: int, zmq_port: int) -> dict[str, str]:
    return {"type": kind, "http_address": f"10.0.0.1:{port}", "zmq_address": f"10.0.0.1:{zmq_port}"}


async def test_who_announces_himself_is_a_worker(listener: Listener) -> None:
    await listener.speaker.say(hello("P", 20001, 21001))
    await listener.speaker.say(hello("P", 20001, 21001))  # a heartbeat changes nothing
    await listener.speaker.say(hello("D", 20002, 21002), b"")
    found = await listener.until(2)
    assert [len(workers) for workers in found] == [1, 2]
    p, d = found[1]
    assert (p.name, p.url, p.role, p.kv_address) == (
        "p2p-10-0-0-1-20001",
        "http://10.0.0.1:20001",
        "prefill",
        "10.0.0.1:21001",
    )
    assert (d.role, d.group, d.max_seqs, d.connector) == ("decode", "g", 5, "vllm-p2p-nccl")


async def test_one_that_moved_its_kv_address_is_told_anew(listener: Listener) -> None:
    await listener.speaker.say(hello("P", 20001, 21001))
    await listener.speaker.say(hello("P", 20001, 29999))
    assert [workers[0].kv_address for workers in await listener.until(2)] == ["10.0.0.1:21001", "10.0.0.1:29999"]


@pytest.mark.parametrize("listener", [0.2], indirect=True)
async def test_who_is_silent_has_gone(listener: Listener) -> None:
    await listener.speaker.say(hello("P", 20001, 21001))
    assert (await listener.until(2))[-1] == []


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xc1",
        b"\x93" * 2000,
        [1, 2],
        {"type": "X", "http_address": "h:1", "zmq_address": "h:2"},
        {"type": "P", "http_address": "h:1"},
        {"type": "P", "http_address": "h:1/path", "zmq_address": "h:2"},
        {"type": "P", "http_address": "user@h:1", "zmq_address": "h:2"},
        {"type": "P", "http_address": "h:99999", "zmq_address": "h:2"},
        {"type": "P", "http_address": "", "zmq_address": "h:2"},
        {"type": "P", "http_address": "h:1", "zmq_address": "h"},
        {"type": "P", "http_address": "h:1", "zmq_address": "h:2", "more": b"x" * 5000},
    ],
)
async def test_what_is_no_announcement_changes_nothing(listener: Listener, message: Any) -> None:
    await listener.speaker.say(message)
    again = Speaker(listener.announced.endpoint)  # one that is too large ends its connection
    await again.say(hello("P", 1, 2))
    found = await listener.until(1)
    assert [w.url for w in found[0]] == ["http://10.0.0.1:1"]
    again.close()


def worker(name: str, port: int, **more: Any) -> Worker:
    return Worker.model_validate({"name": name, "url": f"http://h:{port}", "role": "prefill", **more})


def test_the_config_goes_before_what_was_found() -> None:
    heard: list[list[Worker]] = []
    roster = Roster([worker("p0", 1, max_seqs=3)], heard.append)
    roster.set("found", [worker("x", 1, kv_address="h:9"), worker("p0", 2), worker("y", 3)])
    assert [(w.name, w.url, w.kv_address) for w in heard[-1]] == [("p0", "http://h:1", "h:9"), ("y", "http://h:3", "")]
    assert heard[-1][0].max_seqs == 3
    roster.set(CONFIG, [])
    assert [w.name for w in heard[-1]] == ["x", "p0", "y"]


def test_an_endpoint_that_cannot_be() -> None:
    bad = {"announcements": {"listen": "tcp://*:30001"}}
    with pytest.raises(ConfigError, match=r"announcements\.listen: must be tcp://HOST:PORT"):
        parse(bad, "c")


async def test_a_pair_that_announces_itself_serves() -> None:
    """No worker is configured. They come, serve by addresses that they told, stay over a reload, and go."""
    p, d = ScriptedWorker(prefill_ok), ScriptedWorker(decode_stream)
    await p.start()
    await d.start()
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    config = parse(
        {"schedule_mode": "parallel", "announcements": {"listen": endpoint, "expire_s": 0.6}, "health": FAST}, "test"
    )
    async with running(config, {"p0": p, "d0": d}) as rig:
        speaker = Speaker(endpoint)

        async def speak() -> None:
            while True:
                for kind, each, zmq_port in (("P", p, 7001), ("D", d, 7002)):
                    address = f"127.0.0.1:{each.port}"
                    await speaker.say({"type": kind, "http_address": address, "zmq_address": f"127.0.0.1:{zmq_port}"})
                await asyncio.sleep(0.1)

        speaking = asyncio.create_task(speak())
        await rig.up()
        async with asyncio.timeout(5):
            while sum(w.up for w in rig.gateway.scheduling.workers()) < 2:
                await asyncio.sleep(0.01)
        rig.gateway.scheduling.configure(config)
        assert (await rig.chat()).status_code == 200
        ids = {w.seen[0].headers["x-request-id"] for w in (p, d)}
        assert len(ids) == 1
        assert ids.pop().startswith("___prefill_addr_127.0.0.1:7001___decode_addr_127.0.0.1:7002_")
        speaking.cancel()
        async with asyncio.timeout(5):
            while rig.gateway.scheduling.workers():
                await asyncio.sleep(0.01)
        speaker.close()
    await p.stop()
    await d.stop()
