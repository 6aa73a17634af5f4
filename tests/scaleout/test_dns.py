"""Workers behind names, from a DNS server of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import cast

import pytest

from omni_proxy.config import ConfigError, parse
from omni_proxy.workers.discovery.vetting import Candidate, vet

pytest.importorskip("dns")

import dns.flags
import dns.message
import dns.rcode
import dns.rrset

from omni_proxy.workers.discovery.dns import DnsSource

FIELDS = {"role": "prefill", "connector": "sglang"}


class Server(asyncio.DatagramProtocol):
    """Answers what it is told to; a name that it does not know does not exist."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], tuple[int, list[str]]] = {}
        self.asked = 0
        self.silent = False
        self.transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.asked += 1
        if self.silent:
            return
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, kind = question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)
        answer = dns.message.make_response(query)
        found = self.records.get((name, kind))
        if found is not None:
            answer.answer.append(dns.rrset.from_text(question.name, found[0], "IN", kind, *found[1]))
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        assert self.transport is not None
        self.transport.sendto(answer.to_wire(), addr)


class Found:
    def __init__(self) -> None:
        self.lists: list[Sequence[Candidate]] = []
        self.faults: list[str] = []

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def following(server: Server, host: str, srv: bool = False, **more: float) -> AsyncIterator[Found]:
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: server, ("127.0.0.1", 0))
    port = transport.get_extra_info("sockname")[1]
    source = DnsSource(host, srv, 0 if srv else 8000, FIELDS, nameserver=f"127.0.0.1:{port}", **more)
    found = Found()
    task = asyncio.create_task(source.run(found.lists.append, found.faults.append))
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        transport.close()


async def test_addresses_of_both_kinds_are_workers_and_asked_for_again() -> None:
    server = Server()
    server.records = {("w.test", "A"): (60, ["10.0.0.2", "10.0.0.1"]), ("w.test", "AAAA"): (1, ["fd00::1"])}
    async with following(server, "w.test.", least_s=0.05, most_s=0.1) as found:
        await found.until(lambda: len(found.lists) > 0)
        assert [c["url"] for c in found.lists[0]] == [
            "http://10.0.0.1:8000",
            "http://10.0.0.2:8000",
            "http://[fd00::1]:8000",
        ]
        workers, refused = vet("dns", found.lists[0])
        assert not refused
        assert [w.name for w in workers] == ["10.0.0.1-8000", "10.0.0.2-8000", "fd00-1-8000"]
        assert {w.role.value for w in workers} == {"prefill"}
        server.records[("w.test", "A")] = (60, ["10.0.0.3"])
        await found.until(lambda: "http://10.0.0.3:8000" in [c["url"] for c in found.lists[-1]])
        assert not found.faults


async def test_the_time_to_live_is_kept() -> None:
    server = Server()
    server.records = {("w.test", "A"): (1000, ["10.0.0.1"])}
    async with following(server, "w.test.", least_s=0.01, most_s=500.0) as found:
        await found.until(lambda: len(found.lists) > 0)
        asked = server.asked
        await asyncio.sleep(0.3)
        assert (server.asked, len(found.lists)) == (asked, 1)


async def test_a_service_names_hosts_ports_and_backups() -> None:
    server = Server()
    srv = ["0 100 8001 a.test.", "0 300 8002 b.test.", "10 200 8003 c.test."]
    server.records = {("_llm._tcp.test", "SRV"): (60, srv)}
    async with following(server, "_llm._tcp.test.", srv=True) as found:
        await found.until(lambda: len(found.lists) > 0)
    workers, refused = vet("dns", found.lists[0])
    assert not refused
    assert [(w.name, w.url, w.weight, w.backup) for w in workers] == [
        ("a.test-8001", "http://a.test:8001", 0.5, False),
        ("b.test-8002", "http://b.test:8002", 1.5, False),
        ("c.test-8003", "http://c.test:8003", 1.0, True),
    ]


async def test_a_name_that_stops_resolving_says_why_and_names_nobody_new() -> None:
    server = Server()
    server.records = {("w.test", "A"): (1, ["10.0.0.1"])}
    async with following(server, "w.test.", least_s=0.02, most_s=0.02) as found:
        await found.until(lambda: len(found.lists) > 0)
        server.records = {("w.test", "TXT"): (1, ["x"])}
        await found.until(lambda: "w.test. has no such records" in found.faults)
        server.records = {}
        await found.until(lambda: "w.test. does not exist" in found.faults)
        assert all(len(candidates) == 1 for candidates in found.lists), "no empty list was told"
        server.records = {("w.test", "A"): (1, ["10.0.0.9"])}
        await found.until(lambda: found.lists[-1][0]["url"] == "http://10.0.0.9:8000")


@pytest.mark.parametrize(
    ("dns", "said"),
    [
        ({"name": "x", "worker": {"role": "prefill"}}, "'port' is needed"),
        ({"name": "x", "record": "srv", "port": 1, "worker": {"role": "prefill"}}, "'port' is needed"),
        ({"name": "x", "record": "mx", "port": 1, "worker": {"role": "prefill"}}, "record"),
        ({"name": "x", "port": 1, "worker": {"role": "baker"}}, "worker.role"),
        ({"name": "x", "port": 1, "worker": {}}, "worker.role"),
        ({"name": "x", "port": 1, "worker": {"role": "prefill"}, "least_s": 60}, "least_s"),
        ({"name": "", "port": 1, "worker": {"role": "prefill"}}, "name"),
    ],
)
def test_bad_config_is_named(dns: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse({"discovery": {"dns": [dns]}}, "x")


@pytest.mark.parametrize("nameserver", ["ns.test", "10.0.0.1:x", "10.0.0.1:70000", ":53"])
def test_a_bad_nameserver_is_named(nameserver: str) -> None:
    from omni_proxy.workers.discovery.sources import discovery_sources

    dns = {"name": "x", "port": 1, "worker": {"role": "prefill"}, "nameserver": nameserver}
    with pytest.raises(ConfigError, match=r"discovery.dns\[0\].nameserver"):
        discovery_sources(parse({"discovery": {"dns": [dns]}}, "x").discovery, None)
