"""A worker of the config as others see it: its data-parallel ranks, one member each, for the core and for the edge."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Raw

from omni_proxy.config import Worker, WorkerTls
from omni_proxy.messages import WorkerSpec
from omni_proxy.tls import ClientFiles
from omni_proxy.workers.connectors.base import Connector
from omni_proxy.workers.connectors.registry import CONNECTORS
from omni_proxy.workers.facts import Facts
from omni_proxy.workers.member import Member
from omni_proxy.workers.probe import Description, ModelInfo


def rank_names(name: str, size: int) -> list[str]:
    """The members of a worker with so many ranks; `@` cannot be in a configured name."""
    return [name] if size == 1 else [f"{name}@{rank}" for rank in range(size)]


def dp_size(worker: Worker, facts: Facts) -> int:
    """How many ranks there are: as configured, else as the worker says."""
    return worker.dp_size or min(facts.dp_size or 1, 256)


def models_of(worker: Worker, said: Description) -> tuple[str, ...]:
    """What it serves, by the gateway's names."""
    return said.names if worker.models is None else tuple(worker.models)


def listed(worker: Worker, said: Description) -> Iterable[tuple[str, dict[str, Raw]]]:
    """The models of a worker with their fields, by the gateway's names."""
    theirs = {msgspec.json.decode(raw, type=ModelInfo).id: raw for raw in said.models}
    for name in models_of(worker, said):
        raw = theirs.get(worker.model_names.get(name, name))
        fields = {"object": Raw(b'"model"')} if raw is None else msgspec.json.decode(raw, type=dict[str, Raw])
        yield name, {**fields, "id": Raw(msgspec.json.encode(name))}


def members(worker: Worker, connector: str, said: Description) -> list[Member]:
    """The ranks as those who send requests need them."""
    facts, size = said.facts, dp_size(worker, said.facts)
    return [
        Member(
            name=name,
            url=worker.url,
            connector=connector,
            api_key=worker.api_key,
            bootstrap_port=worker.bootstrap_port or facts.bootstrap_port,
            tls=client_files(worker),
            rank=rank if size > 1 else None,
            dp_size=size,
            kv_address=worker.kv_address,
            models=models_of(worker, said),
            model_names=tuple((ours, theirs) for ours, theirs in worker.model_names.items() if ours != theirs),
            role=worker.role,
            engine_id=facts.engine_ids.get(rank, ""),
        )
        for rank, name in enumerate(rank_names(worker.name, size))
    ]


def specs(worker: Worker, connector: str, said: Description) -> list[WorkerSpec]:
    """The ranks as the core needs them. Limits are those of each."""
    spoken, facts, size = CONNECTORS.get(connector), said.facts, dp_size(worker, said.facts)
    return [
        WorkerSpec(
            name=name,
            role=worker.role,
            models=models_of(worker, said),
            modes=spoken.modes if spoken is not None else (),
            group=worker.group,
            connector=connector,
            max_seqs=worker.max_seqs,
            max_batch_tokens=worker.max_batch_tokens,
            max_model_len=said.max_model_len,
            kv_capacity_tokens=said.kv_capacity_tokens,
            block_tokens=said.block_tokens,
            handoff_reusable=spoken is not None and spoken.handoff_reusable,
            kv_lease_s=_kv_lease_s(worker, spoken),
            releases_kv=spoken is not None and spoken.releases_kv,
            weight=worker.weight,
            backup=worker.backup,
            slow_start_s=worker.slow_start_s,
            max_fails=worker.max_fails,
            fail_timeout_s=worker.fail_timeout_s,
            endpoint=worker.name if size > 1 else "",
            engine=f"{facts.engine} {facts.version}".strip(),
        )
        for name in rank_names(worker.name, size)
    ]


def _kv_lease_s(worker: Worker, spoken: Connector | None) -> float | None:
    if worker.kv_lease_s is not None or spoken is None:
        return worker.kv_lease_s
    return spoken.kv_lease_s


def client_files(worker: Worker) -> ClientFiles | None:
    """The files for TLS towards a worker; None where it speaks plain HTTP."""
    if not worker.url.startswith("https:"):
        return None
    tls = worker.tls or WorkerTls()
    ca, certificate, key = (None if path is None else str(path) for path in (tls.ca, tls.certificate, tls.key))
    return ClientFiles(ca, certificate, key, tls.verify, tls.server_name)
