"""Workers behind a DNS name: its addresses (A and AAAA), or the hosts and ports that it lists (SRV).

Asked again when the shortest time to live of the answer has passed, within bounds. dnspython, because the system's
resolver tells no time to live and knows no SRV. A name that does not resolve any more changes nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import dns.asyncresolver
import dns.exception
import dns.resolver

from omni_proxy.workers.discovery.vetting import Candidate, url_of

_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9.-]+")
_RETRY_S: Final = 5.0


class DnsSource:
    """One name. `fields`: of every worker behind it, as in the config; `nameserver`: ADDRESS or ADDRESS:PORT.

    Raises ValueError where the system names no server and none is given.
    """

    def __init__(
        self,
        host: str,
        srv: bool,
        port: int,
        fields: Mapping[str, object],
        least_s: float = 1.0,
        most_s: float = 30.0,
        nameserver: str | None = None,
    ) -> None:
        self.name = f"dns {host}"
        self._host = host
        self._srv = srv
        self._port = port
        self._fields = fields
        self._least_s = least_s
        self._most_s = most_s
        try:
            self._resolver = dns.asyncresolver.Resolver(configure=nameserver is None)
        except dns.resolver.NoResolverConfiguration as exc:
            raise ValueError("this system names no server for DNS") from exc
        if nameserver is not None:
            address, server_port = _server(nameserver)
            self._resolver.nameservers, self._resolver.port = [address], server_port
        self._resolver.lifetime = 5.0

    async def run(self, found: Callable[[Sequence[Candidate]], None], failed: Callable[[str], None]) -> None:
        """Until cancelled."""
        while True:
            try:
                candidates, ttl_s = await (self._services() if self._srv else self._addresses())
                found(candidates)
                wait_s = min(max(ttl_s, self._least_s), self._most_s)
            except (dns.exception.DNSException, OSError) as exc:
                failed(_said(exc, self._host))
                wait_s = min(_RETRY_S, self._most_s)
            await asyncio.sleep(wait_s)

    async def _addresses(self) -> tuple[list[Candidate], float]:
        """One worker for each address; a name may have those of one kind only."""
        answers: list[Any] = []
        fault: Exception | None = None
        for kind in ("A", "AAAA"):
            try:
                answers.append(await self._resolver.resolve(self._host, kind, search=True))
            except dns.resolver.NoAnswer as exc:
                fault = exc
        if not answers:
            assert fault is not None
            raise fault
        addresses = sorted({record.address for answer in answers for record in answer})
        return [self._candidate(a, self._port) for a in addresses], min(answer.rrset.ttl for answer in answers)

    async def _services(self) -> tuple[list[Candidate], float]:
        """One worker for each target; the first priority works, the others are its backups."""
        answer: Any = await self._resolver.resolve(self._host, "SRV", search=True)
        records = sorted(answer, key=lambda r: (r.priority, str(r.target), r.port))
        first = records[0].priority
        mean = sum(record.weight for record in records) / len(records)
        found: list[Candidate] = []
        for record in records:
            candidate = dict(self._candidate(record.target.to_text(omit_final_dot=True), record.port))
            if record.priority != first:
                candidate["backup"] = True
            if record.weight and record.weight != mean and "weight" not in self._fields:
                candidate["weight"] = round(record.weight / mean, 3)
            found.append(candidate)
        return found, answer.rrset.ttl

    def _candidate(self, host: str, port: int) -> Candidate:
        name = _NOT_IN_NAMES.sub("-", f"{host}-{port}").strip("-.")
        scheme = "https" if self._fields.get("tls") is not None else "http"
        return {**self._fields, "name": name, "url": url_of(host, port, scheme)}


def _server(text: str) -> tuple[str, int]:
    """Raises ValueError."""
    try:
        return str(ipaddress.ip_address(text)), 53
    except ValueError:
        host, _, port = text.rpartition(":")
        address = str(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
        if not port.isdigit() or not 1 <= int(port) <= 65535:
            raise ValueError(f"{text}: impossible port") from None
        return address, int(port)


def _said(exc: Exception, host: str) -> str:
    match exc:
        case dns.resolver.NXDOMAIN():
            return f"{host} does not exist"
        case dns.resolver.NoAnswer():
            return f"{host} has no such records"
        case dns.exception.Timeout():
            return f"no answer about {host} in time"
        case _:
            return f"{host} cannot be resolved ({type(exc).__name__})"
