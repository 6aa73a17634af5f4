"""How large, how slow, how many: what a connection may be."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.api.bounds import Bounds, Crowd
from omni_proxy.workers.discovery.targets import why_not
from omni_proxy.workers.discovery.vetting import vet
from tests.relay.conftest import Start
from tests.relay.raw import chat, post


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    "extra",
    ["".join(f"x-{n}: 1\r\n" for n in range(101)), f"x: {'y' * 70_000}\r\n", f"x-{'y' * 70_000}: 1\r\n"],
    ids=["count", "value", "name"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/health"])
async def test_a_head_too_large_is_431(start: Start, extra: str, cut: bool, path: str) -> None:
    rig = await start()
    client = await rig.raw()
    data = post(chat(), extra, path)
    if cut:
        await client.send(data[:40])
        await asyncio.sleep(0.01)
        data = data[40:]
    await client.send(data)
    answer = await client.response()
    assert (answer.status, answer.header("connection"), answer.error["code"]) == (431, "close", "head_too_large")
    assert rig.untouched()


async def test_a_head_without_end_is_ended(start: Start) -> None:
    rig = await start({"limits": {"client_max_head_bytes": 2048}})
    client = await rig.raw()
    await client.send(b"POST /v1/chat/completions HTTP/1.1\r\n")
    for _ in range(5):
        await asyncio.sleep(0.005)
        if not client.transport.is_closing():
            client.writer.write(b"x: " + b"y" * 500 + b"\r\n")
    assert (await client.response()).status == 431


async def test_a_head_that_trickles_in_is_given_up(start: Start) -> None:
    rig = await start({"timeouts": {"client_head_s": 0.3}})
    client = await rig.raw()
    await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nx: ")

    async def trickle() -> None:
        while True:
            client.writer.write(b"y")
            await asyncio.sleep(0.05)

    trickling = asyncio.create_task(trickle())
    async with asyncio.timeout(5):
        answer = await client.response()
    trickling.cancel()
    assert (answer.status, answer.error["code"]) == (408, "request_timeout")


async def test_a_body_that_trickles_in_is_given_up_and_a_steady_one_is_not(start: Start) -> None:
    slow = {"timeouts": {"client_body_s": 0.4}, "limits": {"client_min_bytes_per_s": 1000}}
    rig = await start(slow)
    client, steady = await rig.raw(), await rig.raw()
    body = chat(user="x" * 8000)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    for one in (client, steady):
        await one.send(head)

    async def send(one: Any, size: int) -> None:
        for at in range(0, len(body), size):
            one.writer.write(body[at : at + size])
            await asyncio.sleep(0.05)

    sending = [asyncio.create_task(send(client, 4)), asyncio.create_task(send(steady, 600))]
    async with asyncio.timeout(10):
        assert (await client.response()).status == 408
        assert (await steady.response()).status == 200
    for task in sending:
        task.cancel()
    await rig.idle()


async def test_connections_of_one_address(start: Start) -> None:
    rig = await start({"limits": {"connections_per_client": 3}})
    await rig.client.aclose()
    kept = [await rig.raw() for _ in range(3)]
    for client in kept:
        await client.send(post(chat()))
        assert (await client.response()).status == 200
    one_more = await rig.raw()
    assert await one_more.closed()
    kept[0].close()
    await asyncio.sleep(0.05)
    again = await rig.raw()
    await again.send(post(chat()))
    assert (await again.response()).status == 200


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=40))
def test_a_crowd_counts(moves: list[tuple[str, bool]]) -> None:
    crowd, inside = Crowd(2), {"a": 0, "b": 0, "c": 0}
    for peer, comes in moves:
        if comes:
            inside[peer] += 1
            assert crowd.enter(peer) == (inside[peer] <= 2)
        elif inside[peer]:
            inside[peer] -= 1
            crowd.leave(peer)
    assert all(crowd.enter(peer) == (count < 2) for peer, count in inside.items())


def test_slowness() -> None:
    bounds = Bounds(1, head_s=3, body_s=10, bytes_per_s=100)
    assert [bounds.too_slow(True, s, 10**6) for s in (2.9, 3.1)] == [False, True]
    assert [bounds.too_slow(False, s, got) for s, got in ((9, 0), (12, 199), (12, 201), (10**4, 10**6))] == [
        False, True, False, False,
    ]  # fmt: skip
    assert not Bounds(1, bytes_per_s=0).too_slow(False, 1e9, 0)


# ------------------------------------------------------------------------------------------ targets


@pytest.mark.parametrize(
    "host",
    ["169.254.169.254", "fe80::1", "fe80::1%eth0", "::ffff:169.254.169.254", "0.0.0.0", "::", "224.0.0.1", "ff02::1",
     "240.0.0.1", "255.255.255.255", "100.100.100.200", "168.63.129.16", "fd00:ec2::254", "metadata.google.internal",
     "Metadata.Google.Internal.", "2852039166", "0xa9fea9fe", "169.254.43518", "0251.0376.0251.0376", "0"],
)  # fmt: skip
def test_found_workers_are_never_there(host: str) -> None:
    assert why_not(host, None) is not None


@pytest.mark.parametrize("host", ["10.0.0.1", "127.0.0.1", "::1", "fd12::1", "8.8.8.8", "worker-1.pods", "1a"])
def test_and_may_be_there(host: str) -> None:
    assert why_not(host, None) is None


def test_networks_narrow_it_down() -> None:
    from ipaddress import ip_network

    networks = [ip_network("10.1.0.0/16"), ip_network("169.254.7.0/24"), ip_network("fd12::/16")]
    good, bad = (
        ["10.1.2.3", "169.254.7.9", "fd12::5", "::ffff:10.1.0.1"],
        ["10.2.0.1", "127.0.0.1", "w.pods", "fe80::1"],
    )
    assert [why_not(host, networks) for host in good] == [None] * 4
    assert None not in [why_not(host, networks) for host in bad]
    found = [{"name": f"w{n}", "url": f"http://{h}:1", "role": "mixed"} for n, h in enumerate(("10.1.2.3", "10.2.0.1"))]
    workers, refused = vet("s", found, (), networks)
    assert ([w.name for w in workers], [(r.name, r.reason) for r in refused]) == (
        ["w0"],
        [("w1", "10.2.0.1 is in none of 'networks'")],
    )


@given(st.text(max_size=20))
def test_any_host_is_judged(host: str) -> None:
    assert isinstance(why_not(host, None), str | None)
