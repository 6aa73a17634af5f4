"""What a source may say: candidates become workers, or are refused with a reason. No IO.

A source is not trusted to make sense. What is wrong with one candidate harms no other; a flood, or a source that cannot
be read, changes nothing at all: the last good state stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct
from pydantic import ValidationError

from omni_proxy.config import Worker
from omni_proxy.workers.discovery.targets import Network, why_not

MOST_WORKERS: Final = 2000
"""Of one source; more is taken for a fault of the source."""

Candidate = Mapping[str, object]


class Refused(Struct, frozen=True):
    """A candidate that is not used, and why."""

    source: str
    name: str
    reason: str


class Unusable(Exception):
    """A source said something that cannot be used at all; what it said before stays."""


def vet(
    source: str,
    candidates: Sequence[Candidate],
    own: Iterable[tuple[str, int]] = (),
    networks: Sequence[Network] | None = None,
) -> tuple[list[Worker], list[Refused]]:
    """The workers among the candidates, and who is none. `own`: where this gateway listens. Raises Unusable."""
    if len(candidates) > MOST_WORKERS:
        raise Unusable(f"{len(candidates)} workers at once; more than {MOST_WORKERS} are taken for a fault")
    refused: list[Refused] = []
    workers: list[Worker] = []
    ours = frozenset(own)
    for candidate in candidates:
        name = str(candidate.get("name", "?"))
        try:
            worker = Worker.model_validate(candidate)
        except ValidationError as exc:
            refused.append(Refused(source, name, _fault(exc)))
            continue
        if address(worker.url) in ours:
            refused.append(Refused(source, name, f"{worker.url} is this gateway's own address"))
            continue
        reason = why_not(address(worker.url)[0], networks)
        if reason is not None:
            refused.append(Refused(source, name, reason))
            continue
        workers.append(worker)
    good = _without_contradictions(source, workers, refused)
    return good, refused


def _without_contradictions(source: str, workers: list[Worker], refused: list[Refused]) -> list[Worker]:
    """Of equal ones the first; of two that contradict each other neither, as nobody knows which is right."""
    same: dict[str, list[Worker]] = {}
    for worker in workers:
        same.setdefault(worker.url, []).append(worker)
        same.setdefault(worker.name, []).append(worker)  # no name looks like a URL
    good: dict[str, Worker] = {}
    for worker in workers:
        other = next((w for w in (*same[worker.url], *same[worker.name]) if w != worker), None)
        if other is not None:
            refused.append(Refused(source, worker.name, _contradiction(worker, other)))
        else:
            good.setdefault(worker.name, worker)
    return list(good.values())


def _contradiction(worker: Worker, other: Worker) -> str:
    if worker.url == other.url and worker.role != other.role:
        return f"{worker.url} has two roles: {worker.role.value} and {other.role.value}"
    if worker.url == other.url:
        return f"{worker.url} is named twice: {worker.name} and {other.name}"
    return f"the name stands for two workers: {worker.url} and {other.url}"


def address(url: str) -> tuple[str, int]:
    """Host and port of a worker's URL."""
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def url_of(host: str, port: int, scheme: str = "http") -> str:
    """The URL of a host name or an address, also one of IPv6."""
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _fault(exc: ValidationError) -> str:
    first = exc.errors()[0]
    place = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}: {message} (got {first['input']!r})"[:300] if place else message[:300]
