"""Where a worker's KV events are to be heard: what the config says, else what the worker itself says."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from msgspec import structs

from omni_proxy.config import Worker
from omni_proxy.workers.kv_events import Source
from omni_proxy.workers.probe import EventSource

MAX_SOURCES = 256
_ANYWHERE = frozenset({"*", "0.0.0.0", "::", ""})


def sources_of(worker: Worker, told: Sequence[EventSource]) -> list[Source]:
    """One source for each data-parallel rank; none where nothing is published or nobody knows where."""
    wanted = worker.kv_events
    if wanted.endpoint is not None:
        replay = wanted.replay_endpoint
        return [
            Source(
                worker.name,
                _offset(wanted.endpoint, rank),
                None if replay is None else _offset(replay, rank),
                wanted.topic,
                rank,
            )
            for rank in range(max(wanted.ranks, worker.dp_size or 1))
        ]
    if not wanted.discover:
        return []
    host = urlsplit(worker.url).hostname or ""
    found = [_told_source(worker.name, host, source) for source in told[:MAX_SOURCES]]
    sources = [source for source in found if source is not None]
    if len({source.endpoint for source in sources}) < len(sources):  # told as configured, before ranks count it up
        return [_at_rank(source) for source in sources]
    return sources


def by_member(sources: Sequence[Source], worker: str, members: Sequence[str]) -> dict[str, list[Source]]:
    """The sources of each member of a worker: of each rank its own, where every rank is one."""
    found: dict[str, list[Source]] = {name: [] for name in members}
    for source in sources:
        if members == [worker]:
            found[worker].append(source)
        elif source.rank < len(members):
            name = members[source.rank]
            found[name].append(structs.replace(source, worker=name))
    return found


def _at_rank(source: Source) -> Source:
    replay = None if source.replay_endpoint is None else _offset(source.replay_endpoint, source.rank)
    return structs.replace(source, endpoint=_offset(source.endpoint, source.rank), replay_endpoint=replay)


def _told_source(worker: str, host: str, told: EventSource) -> Source | None:
    endpoint = _reachable(told.endpoint, host)
    if endpoint is None:
        return None
    replay = None if told.replay_endpoint is None else _reachable(told.replay_endpoint, host)
    return Source(worker, endpoint, replay, told.topic, told.data_parallel_rank or 0)


def _reachable(endpoint: str, host: str) -> str | None:
    """The endpoint with a host that can be connected to; None where it is no TCP endpoint."""
    scheme, separator, rest = endpoint.partition("://")
    named, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not separator or not colon or not port.isdigit():
        return None
    name = named.strip("[]")
    name = host if name in _ANYWHERE else name
    return f"tcp://[{name}]:{port}" if ":" in name else f"tcp://{name}:{port}"


def _offset(endpoint: str, rank: int) -> str:
    """Ranks publish on consecutive ports."""
    base, _, port = endpoint.rpartition(":")
    return f"{base}:{int(port) + rank}"
