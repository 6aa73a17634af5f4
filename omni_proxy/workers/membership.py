"""Who is there: the members, what they say of themselves, and whether they answer.

Each worker is probed on its own: `/health` decides up or down; once it is up, other routes tell what it is. One that
does not fit its connector or its partners is refused, with the reason, and looked at again. A worker with several
data-parallel ranks is as many members.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

import httpx
import msgspec
from msgspec import Raw

from omni_proxy.config import ConnectorName, Health, Worker
from omni_proxy.messages import Event, WorkerAdded, WorkerDown, WorkerDraining, WorkerRemoved, WorkerUp
from omni_proxy.workers.connectors.registry import CONNECTORS
from omni_proxy.workers.connectors.vllm_mooncake import BOOTSTRAP_PORT
from omni_proxy.workers.described import client_files, dp_size, listed, rank_names, specs
from omni_proxy.workers.fit import Unfit, apart, connector_of, missing_of
from omni_proxy.workers.member import Member
from omni_proxy.workers.probe import Description, Probe, Unclear
from omni_proxy.workers.watched import KNOWN_TO_FRONTS, Watched, address, is_found_by_bootstrap, may_exchange, shown

logger = logging.getLogger(__name__)


class Membership:
    """The members by name, and the tasks that watch them."""

    def __init__(self, post: Callable[[Event], None], health: Health, callbacks: bool = False) -> None:
        self._post = post
        self._callbacks = callbacks
        """Does the gateway listen to workers that ask for their prefill?"""
        self._health = health
        self._members: dict[str, Watched] = {}
        self._described: list[Callable[[Worker, Description], None]] = []
        self._listeners: list[Callable[[tuple[Member, ...]], None]] = []
        self._told: tuple[Member, ...] = ()
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
        return tuple(member for watched in self._members.values() for member in shown(watched))

    # ------------------------------------------------------------------ changes

    def add(self, worker: Worker) -> None:
        """Take in a member, or one that came back under another address."""
        old = self._members.pop(worker.name, None)
        if old is not None:
            self._stop(old)
        probe = Probe(worker.url, worker.api_key, client_files(worker), self._client, self._health.timeout_s)
        member = self._members[worker.name] = Watched(worker, probe)
        member.names = () if old is None else old.names
        named = worker.connector
        member.connector = "" if named is None or named is ConnectorName.AUTO else named.value
        self._tell_added(member)
        if not worker.down:
            member.task = asyncio.create_task(self._watch(member), name=f"watch {worker.name}")

    def set(self, workers: Iterable[Worker]) -> list[str]:
        """Make these the members, with as little disturbance as can be.

        Returns those that have to leave from now on: they drain, and whoever called calls `remove` when they hold
        nothing any more.
        """
        wanted = {worker.name: worker for worker in workers}
        for worker in wanted.values():
            member = self._members.get(worker.name)
            if member is None:
                self.add(worker)
            elif member.leaving or worker != member.config:
                self._change(member, worker)
        leaving = [name for name, member in self._members.items() if name not in wanted and not member.leaving]
        for name in leaving:
            self._drain(self._members[name])
        return leaving

    def config_of(self, name: str) -> Worker | None:
        """A member as it was last asked for."""
        member = self._members.get(name)
        return None if member is None else member.config

    def is_leaving(self, name: str) -> bool:
        """Does a member drain, and has not been taken back meanwhile?"""
        member = self._members.get(name)
        return member is not None and member.leaving

    def _change(self, member: Watched, worker: Worker) -> None:
        """Another description of the same worker, or another worker under the same name."""
        if worker.down:
            self._drain(member)
            member.config, member.leaving = worker, False
        elif member.leaving or member.config.down:
            self._take_back(member, worker)
        elif address(worker) != address(member.config):
            self.lost(worker.name, "its address or its settings of connecting have changed")
            self.add(worker)
        else:
            member.config, member.shown = worker, None
            self._tell()
            if member.up:
                self._tell_up(member)
            else:
                self._tell_added(member)

    def _take_back(self, member: Watched, worker: Worker) -> None:
        """Use one again that drained; what it still does goes on, as what it said of itself holds until it is asked."""
        if address(worker) != address(member.config.model_copy(update={"down": False})):
            self.add(worker)
            return
        member.config, member.leaving, member.shown = worker, False, None
        self._tell_added(member)
        member.task = asyncio.create_task(self._watch(member), name=f"watch {worker.name}")

    def _drain(self, member: Watched) -> None:
        """No new work, and no probes that would bring it back."""
        if not member.leaving:
            logger.info("worker %s drains", member.config.name)
            self._stop(member)
            member.leaving, member.up = True, False
            for name in member.names:
                self._post(WorkerDraining(name))
            self._tell_if_known(member)

    def lost(self, name: str, reason: str) -> None:
        """Somebody knows that a member is gone (its process ended); probes find out when it is back."""
        member = self._members.get(name)
        if member is not None:
            self._down(member, reason)

    def hold(self, name: str, reason: str) -> None:
        """Give a member no work until `let_go`, whatever its probes say."""
        member = self._members.get(name)
        if member is not None and not member.leaving:
            member.held = reason
            self._down(member, reason)

    def let_go(self, name: str) -> None:
        """A member may be used again as soon as it answers."""
        member = self._members.get(name)
        if member is not None:
            member.held = ""

    def controlled(self) -> list[ControlledMember]:
        """The members as operators' calls need them."""
        return [ControlledMember(self, m.config, m.probe, m.connector) for m in self._members.values()]

    def names(self) -> list[str]:
        """How the workers are called in the config or by who found them, whatever ranks they have."""
        return list(self._members)

    def counting_experts(self) -> list[CountingMember]:
        """Those that are up and tell how their experts are loaded."""
        members = self._members.items()
        return [CountingMember(name, m.probe) for name, m in members if m.up and m.description.facts.counts_experts]

    def remove(self, name: str) -> None:
        """Forget a member."""
        member = self._members.pop(name, None)
        if member is not None:
            self._stop(member)
            for each in member.names:
                self._post(WorkerRemoved(each))
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
            for name, fields in listed(member.config, member.description) if member.up else ():
                found[name] = {**fields, **found.get(name, {})}
        return [msgspec.json.encode(found[name]) for name in sorted(found)]

    def _tell(self, again: bool = False) -> None:
        members = self.members()
        if members == self._told and not again:
            return
        self._told = members
        for listener in self._listeners:
            listener(members)

    def _stop(self, member: Watched) -> None:
        if member.task is not None:
            member.task.cancel()

    # ------------------------------------------------------------------- probes

    async def _watch(self, member: Watched) -> None:
        try:
            await self._probe_again_and_again(member)
        finally:
            await member.probe.close()

    async def _probe_again_and_again(self, member: Watched) -> None:
        failures = 0
        while True:
            reason = await member.probe.fault(self._health.timeout_s)
            if reason is None:
                failures = 0
                if not member.held and (not member.up or await self._calls_itself_otherwise(member)):
                    await self._welcome(member)
            else:
                failures += 1
                if (member.up or member.refused) and failures >= self._health.failures_down:
                    logger.warning("worker %s is down: %s", member.config.name, reason)
                    member.refused = ""
                    self._down(member, reason)
            # Until it is there for the first time, look often: somebody waits for it to start.
            settled = member.up or member.refused
            await asyncio.sleep(self._health.interval_s if settled else min(0.2, self._health.interval_s))

    async def _welcome(self, member: Watched) -> None:
        """Learn what a worker is, then let it be used if it fits."""
        worker = member.config
        try:
            said = await member.probe.describe()
            connector = connector_of(worker, said.facts)
            if is_found_by_bootstrap(worker, connector):
                said = await self._with_engine_ids(member, said)
            self._check(member, connector, said)
        except Unclear as exc:
            logger.warning("worker %s does not say what it serves (%s)", worker.name, exc)
            return
        except Unfit as exc:
            self._refuse(member, str(exc))
            return
        if member.held:  # since it was asked
            return
        member.description, member.connector, member.refused, member.shown = said, connector, "", None
        self._rename(member)
        member.up = True
        logger.info("worker %s (%s, %s) is up", worker.name, worker.role.value, connector)
        # Who left it out, because of its certificates or its connector, can take it in now.
        self._tell(again=client_files(worker) is not None)
        self._tell_up(member)

    async def _with_engine_ids(self, member: Watched, said: Description) -> Description:
        ids = await member.probe.engine_ids(member.config.bootstrap_port or BOOTSTRAP_PORT)
        return msgspec.structs.replace(said, facts=msgspec.structs.replace(said.facts, engine_ids=ids))

    async def _calls_itself_otherwise(self, member: Watched) -> bool:
        """Has a P that is found by its engine id got another one? It was started anew, between two probes."""
        if not is_found_by_bootstrap(member.config, member.connector):
            return False
        ids = await member.probe.engine_ids(member.config.bootstrap_port or BOOTSTRAP_PORT)
        return bool(ids) and ids != member.description.facts.engine_ids

    # ------------------------------------------------------------------ who is refused

    def _check(self, member: Watched, connector: str, said: Description) -> None:
        """Raise Unfit for a worker that lacks something, or that cannot exchange KV with those that are up."""
        worker = member.config
        missing = missing_of(worker, connector, said.facts, self._callbacks)
        if missing is not None:
            raise Unfit(missing)
        for other in self._members.values() if worker.checks else ():
            if other is member or not other.up or not other.config.checks:
                continue
            if may_exchange(worker, connector, said, other):
                why = apart(said.facts, other.description.facts)
                if why is not None:
                    raise Unfit(f"it cannot exchange KV with {other.config.name}: {why}")

    def _refuse(self, member: Watched, reason: str) -> None:
        """It answers, but is not used; whoever looks at the workers sees why."""
        if reason != member.refused:
            logger.warning("worker %s is refused: %s", member.config.name, reason)
            self._down(member, f"refused: {reason}")
            member.refused = reason

    # -------------------------------------------------------------------- telling

    def _rename(self, member: Watched) -> None:
        """Take over the names of a worker's ranks; how many there are may have changed."""
        names = tuple(rank_names(member.config.name, dp_size(member.config, member.description.facts)))
        gone = [name for name in member.names if name not in names]
        member.names = names
        for name in gone:
            self._post(WorkerRemoved(name))

    def _down(self, member: Watched, reason: str) -> None:
        member.up = False
        for name in member.names:
            self._post(WorkerDown(name, reason))
        self._tell_if_known(member)

    def _tell_if_known(self, member: Watched) -> None:
        """Fronts choose encode workers, and divide what no mixed one can make: they have to know who can be used."""
        if member.config.role in KNOWN_TO_FRONTS:
            self._tell()

    def _tell_added(self, member: Watched) -> None:
        """A worker is there, or described anew, and cannot be used yet."""
        self._rename(member)
        self._tell()
        for spec in specs(member.config, member.connector, member.description):
            self._post(WorkerAdded(spec))

    def _tell_up(self, member: Watched) -> None:
        """What a worker is, from its config and from itself; both may have changed."""
        for listener in self._described:
            listener(member.config, member.description)
        for spec in specs(member.config, member.connector, member.description):
            self._post(WorkerUp(spec))


class CountingMember:
    """A member that tells how its experts are loaded."""

    def __init__(self, name: str, probe: Probe) -> None:
        self.name = name
        self.experts = probe.experts


class ControlledMember:
    """A member that can be called, and taken out."""

    def __init__(self, membership: Membership, worker: Worker, probe: Probe, connector: str) -> None:
        self._membership = membership
        self._probe = probe
        self._controls = CONNECTORS[connector].controls if connector else {}
        self.name = worker.name
        self.role = worker.role

    async def ask(self, path: str, query: str, body: bytes, timeout_s: float) -> httpx.Response:
        """An operator's call, under the engine's own name of it. Raises httpx.HTTPError, TlsError."""
        theirs = self._controls.get(path)
        if theirs is not None:
            path, body = theirs, body or b"{}"
        return await self._probe.ask("POST", f"{path}?{query}" if query else path, body, timeout_s)

    def hold(self, reason: str) -> None:
        """Give it no work until `let_go`."""
        self._membership.hold(self.name, reason)

    def let_go(self) -> None:
        """It may be used again as soon as it answers."""
        self._membership.let_go(self.name)
