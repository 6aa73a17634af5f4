"""A worker under watch: what is known of it, and what follows from that alone."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from omni_proxy.config import ConnectorName, Worker
from omni_proxy.messages import Role
from omni_proxy.workers.described import members, models_of
from omni_proxy.workers.member import Member
from omni_proxy.workers.probe import Description, Probe

_UNKNOWN = Description((), (), None, None)
KNOWN_TO_FRONTS = (Role.ENCODE, Role.MIXED)
"""Whether these can be used is told to those who send requests, too."""


@dataclass(slots=True)
class Watched:
    """A worker as the config has it, and all that its probes and its operators have said."""

    config: Worker
    probe: Probe
    task: asyncio.Task[None] | None = None
    up: bool = False
    leaving: bool = False
    """It drains, to be removed."""
    held: str = ""
    """Why it gets no work although it answers; empty: it gets some."""
    description: Description = _UNKNOWN
    connector: str = ""
    """Empty: not known yet."""
    names: tuple[str, ...] = ()
    """Its members, one for each data-parallel rank."""
    refused: str = ""
    """Why it is not used although it answers."""
    shown: tuple[Member, ...] | None = None
    """Its ranks as those who send requests see them, while nothing about them changes."""


def shown(watched: Watched) -> tuple[Member, ...]:
    """Its ranks as those who send requests see them."""
    if not watched.connector:
        return ()
    if watched.shown is None:
        watched.shown = tuple(members(watched.config, watched.connector, watched.description))
    if watched.up or watched.config.role not in KNOWN_TO_FRONTS:
        return watched.shown
    return tuple(msgspec.structs.replace(member, up=False) for member in watched.shown)


def is_found_by_bootstrap(worker: Worker, connector: str) -> bool:
    """Does D find it by an engine id that is another after each start?"""
    return connector == ConnectorName.VLLM_MOONCAKE and worker.role is Role.PREFILL


def may_exchange(worker: Worker, connector: str, said: Description, other: Watched) -> bool:
    """Might one hand KV to the other?"""
    theirs = other.config
    mine, others = models_of(worker, said), models_of(theirs, other.description)
    return (
        connector == other.connector
        and worker.group == theirs.group
        and {worker.role, theirs.role} == {Role.PREFILL, Role.DECODE}
        and (not mine or not others or not set(mine).isdisjoint(others))
    )


def address(worker: Worker) -> tuple[object, ...]:
    """What makes it another worker, or another way to it."""
    return (
        worker.url,
        worker.connector,
        worker.api_key,
        worker.tls,
        worker.bootstrap_port,
        worker.down,
        worker.kv_address,
        worker.dp_size,
        worker.role,
        worker.checks,
    )
