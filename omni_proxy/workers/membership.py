"""Who is there: the members, what they say of themselves, and whether they answer.

Each member is probed on its own: `/health` decides up or down, `/v1/models` and `/metrics` tell model names, context
length and KV capacity once it is up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import httpx
import msgspec
from msgspec import Raw

from omni_proxy.config import Health, Worker, WorkerTls
from omni_proxy.messages import Event, WorkerAdded, WorkerDown, WorkerDraining, WorkerRemoved, WorkerSpec, WorkerUp
from omni_proxy.tls import ClientFiles
from omni_proxy.workers.connectors.registry import CONNECTORS
from omni_proxy.workers.member import Member
from omni_proxy.workers.probe import Description, ModelInfo, Probe, Unclear

logger = logging.getLogger(__name__)

_UNKNOWN = Description((), (), None, None)


@dataclass(slots=True)
class _Watched:
    config: Worker
    probe: Probe
    task: asyncio.Task[None] | None = None
    up: bool = False
    leaving: bool = False
    """It drains, to be removed."""
    held: str = ""
    """Why it gets no work although it answers; empty: it gets some."""
    description: Description = _UNKNOWN


class Membership:
    """The members by name, and the tasks that watch them."""

    def __init__(self, post: Callable[[Event], None], health: Health) -> None:
        self._post = post
        self._health = health
        self._members: dict[str, _Watched] = {}
        self._described: list[Callable[[Worker, Description], None]] = []
        self._listeners: list[Callable[[tuple[Member, ...]], None]] = []
        self._client = httpx.AsyncClient(timeout=health.timeout_s, trust_env=False)

    def on_described(self, listener: Callable[[Worker, Description], None]) -> None:
        """Have somebody told of what a member says of itself, each time that it comes up."""
        self._described.append(listener)

    def on_change(self, listener: Callable[[tuple[Member, ...]], None]) -> None:
        """Have somebody told of all members whenever one comes, goes or moves; he hears of it before the core."""
        self._listeners.append(listener)

    def probe_as(self, health: Health) -> None:
        """Use other times and limits for the probes from now on."""
        self._health = health
        self._client.timeout = httpx.Timeout(health.timeout_s)

    def members(self) -> tuple[Member, ...]:
        """All members as those who send requests need them."""
        return tuple(_member(watched.config, watched.description) for watched in self._members.values())

    # ------------------------------------------------------------------ changes

    def add(self, worker: Worker) -> None:
        """Take in a member, or one that came back under another address."""
        old = self._members.pop(worker.name, None)
        if old is not None:
            self._stop(old)
        probe = Probe(worker.url, worker.api_key, client_files(worker), self._client, self._health.timeout_s)
        member = self._members[worker.name] = _Watched(worker, probe)
        self._tell()
        self._post(WorkerAdded(_spec(worker, _UNKNOWN)))
        if not worker.down:
            member.task = asyncio.create_task(self._watch(member), name=f"watch {worker.name}")

    def set(self, workers: Iterable[Worker]) -> list[str]:
        """Make these the members, with as little disturbance as can be.

        Returns those that have to leave: they drain, and whoever called calls `remove` when they hold nothing any more.
        """
        wanted = {worker.name: worker for worker in workers}
        for worker in wanted.values():
            member = self._members.get(worker.name)
            if member is None or member.leaving:
                self.add(worker)
            elif worker != member.config:
                self._change(member, worker)
        leaving = [name for name in self._members if name not in wanted]
        for name in leaving:
            self._drain(self._members[name])
        return leaving

    def is_leaving(self, name: str) -> bool:
        """Does a member drain, and has not been taken back meanwhile?"""
        member = self._members.get(name)
        return member is not None and member.leaving

    def _change(self, member: _Watched, worker: Worker) -> None:
        """Another description of the same worker, or another worker under the same name."""
        if worker.down:
            self._drain(member)
            member.config, member.leaving = worker, False
        elif _address(worker) != _address(member.config):
            self.lost(worker.name, "its address or its settings of connecting have changed")
            self.add(worker)
        else:
            member.config = worker
            self._tell()
            if member.up:
                self._tell_up(member)
            else:
                self._post(WorkerAdded(_spec(worker, member.description)))

    def _drain(self, member: _Watched) -> None:
        """No new work, and no probes that would bring it back."""
        if not member.leaving:
            logger.info("worker %s drains", member.config.name)
            self._stop(member)
            member.leaving, member.up = True, False
            self._post(WorkerDraining(member.config.name))

    def lost(self, name: str, reason: str) -> None:
        """Somebody knows that a member is gone (its process ended); probes find out when it is back."""
        member = self._members.get(name)
        if member is not None:
            member.up = False
            self._post(WorkerDown(name, reason))

    def hold(self, name: str, reason: str) -> None:
        """Give a member no work until `let_go`, whatever its probes say."""
        member = self._members.get(name)
        if member is not None and not member.leaving:
            member.held, member.up = reason, False
            self._post(WorkerDown(name, reason))

    def let_go(self, name: str) -> None:
        """A member may be used again as soon as it answers."""
        member = self._members.get(name)
        if member is not None:
            member.held = ""

    def controlled(self) -> list[ControlledMember]:
        """The members as operators' calls need them."""
        return [ControlledMember(self, m.config, m.probe) for m in self._members.values()]

    def remove(self, name: str) -> None:
        """Forget a member."""
        member = self._members.pop(name, None)
        if member is not None:
            self._stop(member)
            self._post(WorkerRemoved(name))
            self._tell()

    async def close(self) -> None:
        """Stop watching."""
        tasks = [m.task for m in self._members.values() if m.task is not None]
        for member in self._members.values():
            self._stop(member)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def models(self) -> list[bytes]:
        """The models of all members that are up, each once, as JSON with all fields that workers gave.

        A model's fields are those of all workers that serve it; where they differ, those of the first.
        """
        found: dict[str, dict[str, Raw]] = {}
        for member in self._members.values():
            for name, fields in _listed(member.config, member.description) if member.up else ():
                found[name] = {**fields, **found.get(name, {})}
        return [msgspec.json.encode(found[name]) for name in sorted(found)]

    def _tell(self) -> None:
        members = self.members()
        for listener in self._listeners:
            listener(members)

    def _stop(self, member: _Watched) -> None:
        if member.task is not None:
            member.task.cancel()

    # ------------------------------------------------------------------- probes

    async def _watch(self, member: _Watched) -> None:
        try:
            await self._probe_again_and_again(member)
        finally:
            await member.probe.close()

    async def _probe_again_and_again(self, member: _Watched) -> None:
        failures = 0
        while True:
            reason = await member.probe.fault()
            if reason is None:
                failures = 0
                if not member.up and not member.held:
                    await self._welcome(member)
            else:
                failures += 1
                if member.up and failures >= self._health.failures_down:
                    logger.warning("worker %s is down: %s", member.config.name, reason)
                    member.up = False
                    self._post(WorkerDown(member.config.name, reason))
            # Until it is there for the first time, look often: somebody waits for it to start.
            await asyncio.sleep(self._health.interval_s if member.up else min(0.2, self._health.interval_s))

    async def _welcome(self, member: _Watched) -> None:
        """Learn what a member is, then let it be used."""
        try:
            member.description = await member.probe.describe()
        except Unclear as exc:
            logger.warning("worker %s does not say what it serves (%s)", member.config.name, exc)
            return
        member.up = True
        logger.info("worker %s (%s) is up", member.config.name, member.config.role.value)
        self._tell()  # who left it out, because of its certificates, can take it in now
        self._tell_up(member)

    def _tell_up(self, member: _Watched) -> None:
        """What a member is, from its config and from itself; both may have changed."""
        for listener in self._described:
            listener(member.config, member.description)
        self._post(WorkerUp(_spec(member.config, member.description)))


class ControlledMember:
    """A member that can be called, and taken out."""

    def __init__(self, membership: Membership, worker: Worker, probe: Probe) -> None:
        self._membership = membership
        self._probe = probe
        self.name = worker.name
        self.role = worker.role

    async def ask(self, method: str, target: str, body: bytes, timeout_s: float) -> httpx.Response:
        """Any question. Raises httpx.HTTPError, TlsError."""
        return await self._probe.ask(method, target, body, timeout_s)

    def hold(self, reason: str) -> None:
        """Give it no work until `let_go`."""
        self._membership.hold(self.name, reason)

    def let_go(self) -> None:
        """It may be used again as soon as it answers."""
        self._membership.let_go(self.name)


def _member(worker: Worker, said: Description) -> Member:
    return Member(
        worker.name,
        worker.url,
        worker.connector,
        worker.api_key,
        worker.bootstrap_port,
        client_files(worker),
        models=_models(worker, said),
        model_names=tuple((ours, theirs) for ours, theirs in worker.model_names.items() if ours != theirs),
        role=worker.role,
    )


def _models(worker: Worker, said: Description) -> tuple[str, ...]:
    """What it serves, by the gateway's names."""
    return said.names if worker.models is None else tuple(worker.models)


def _listed(worker: Worker, said: Description) -> Iterable[tuple[str, dict[str, Raw]]]:
    """The models of a worker with their fields, by the gateway's names."""
    theirs = {msgspec.json.decode(raw, type=ModelInfo).id: raw for raw in said.models}
    for name in _models(worker, said):
        raw = theirs.get(worker.model_names.get(name, name))
        fields = {"object": Raw(b'"model"')} if raw is None else msgspec.json.decode(raw, type=dict[str, Raw])
        yield name, {**fields, "id": Raw(msgspec.json.encode(name))}


def client_files(worker: Worker) -> ClientFiles | None:
    """The files for TLS towards a worker; None where it speaks plain HTTP."""
    if not worker.url.startswith("https:"):
        return None
    tls = worker.tls or WorkerTls()
    ca, certificate, key = (None if path is None else str(path) for path in (tls.ca, tls.certificate, tls.key))
    return ClientFiles(ca, certificate, key, tls.verify, tls.server_name)


def _address(worker: Worker) -> tuple[object, ...]:
    """What makes it another worker, or another way to it."""
    return worker.url, worker.connector, worker.api_key, worker.tls, worker.bootstrap_port, worker.down


def _spec(worker: Worker, said: Description) -> WorkerSpec:
    connector = CONNECTORS[worker.connector]
    return WorkerSpec(
        name=worker.name,
        role=worker.role,
        models=_models(worker, said),
        modes=connector.modes,
        group=worker.group,
        connector=worker.connector,
        max_seqs=worker.max_seqs,
        max_batch_tokens=worker.max_batch_tokens,
        max_model_len=said.max_model_len,
        kv_capacity_tokens=said.kv_capacity_tokens,
        block_tokens=said.block_tokens,
        handoff_reusable=connector.handoff_reusable,
        weight=worker.weight,
        backup=worker.backup,
        slow_start_s=worker.slow_start_s,
        max_fails=worker.max_fails,
        fail_timeout_s=worker.fail_timeout_s,
    )
