"""The half that decides: the core, its observers, the watch over the members, and what shows them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from zlib import crc32

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from omni_proxy.api.admin import AdminServer, create_admin_app
from omni_proxy.api.admin_workers import add_worker_routes
from omni_proxy.api.app import create_app, worker_json
from omni_proxy.api.registration import create_registration_app
from omni_proxy.api.served import with_aliases
from omni_proxy.config import Admin, Config, ConfigError, Worker
from omni_proxy.core import Core
from omni_proxy.driver import Driver, Watcher
from omni_proxy.flow.settings import fields_of
from omni_proxy.halves.replicas import replica_link, replica_name
from omni_proxy.messages import Event, Reconfigured, RequestRecord, Role
from omni_proxy.observe.audit import Audit
from omni_proxy.observe.discovery import DiscoveryMetrics
from omni_proxy.observe.expert_loads import ExpertLoad, ExpertLoads
from omni_proxy.observe.experts import ExpertMetrics
from omni_proxy.observe.metrics import Live, Metrics
from omni_proxy.observe.prefixes import PrefixMetrics
from omni_proxy.observe.prewarming import PrewarmMetrics
from omni_proxy.observe.replicas import ReplicaMetrics
from omni_proxy.observe.tallies import Tallies
from omni_proxy.observe.timelines import Timelines
from omni_proxy.parts import announcing, core_settings, own_addresses, recorder, report_end, served_models
from omni_proxy.scheduler.load import WorkerLoad
from omni_proxy.ui.feed import Feed
from omni_proxy.ui.points import Limits as PageLimits
from omni_proxy.ui.routes import create_router, is_open
from omni_proxy.ui.sampler import Sampler, Sources
from omni_proxy.ui.watched import Watched
from omni_proxy.workers.changes import Changes
from omni_proxy.workers.control import ControlResult, control
from omni_proxy.workers.described import dp_size, rank_names
from omni_proxy.workers.discovery.finder import Finder, SourceState
from omni_proxy.workers.discovery.registered import RegisteredSource
from omni_proxy.workers.discovery.sources import discovery_sources
from omni_proxy.workers.discovery.vetting import Refused
from omni_proxy.workers.expert_reader import ExpertReader
from omni_proxy.workers.kv_events import KvEvents
from omni_proxy.workers.kv_sources import by_member, sources_of
from omni_proxy.workers.membership import Membership
from omni_proxy.workers.operations import Operations
from omni_proxy.workers.orders import Orders
from omni_proxy.workers.probe import Description
from omni_proxy.workers.roster import CONFIG, Roster

logger = logging.getLogger(__name__)

RELOAD_S = 10.0
"""So long an operator's call waits for the config to be loaded again."""


class Scheduling:
    """The half that decides, and the app that shows what it knows."""

    def __init__(self, config: Config) -> None:
        self.draining = False
        self._aliases = served_models(config).aliases()
        name = replica_name(config)
        settings = replace(core_settings(config), seed=crc32(name.encode()))
        self.core = core = Core(settings)
        self.timelines = Timelines(config.timelines)
        self.tallies = Tallies()
        self.metrics = Metrics(Live(core.workers, core.waiting, core.live_count), self.tallies)
        self.kv_events = KvEvents(self.post) if core.caches is not None else None
        self.prefixes = PrefixMetrics(lambda: core.caches, self.kv_events)
        self.recorder = recorder(config, settings)
        recorders = [self.recorder] if self.recorder is not None else []
        watched = Watched()
        watchers: list[Watcher] = [self.tallies, self.timelines, self.prefixes, watched]
        self.replicas = replica_link(config, name, self, watchers)
        self.driver = Driver(core, watchers, recorders)
        self.membership = Membership(self.driver.post, config.health, config.callbacks is not None)
        self._orders = orders = Orders()
        self._changes = changes = Changes(self.membership, lambda: _busy(core.workers()))
        self.roster = Roster(config.workers, lambda workers: changes.use(orders.applied(workers)))
        share = None if self.replicas is None else self.replicas.order
        self.operations = Operations(
            self.roster, orders, core.workers, own_addresses(config), share, networks=config.discovery.networks
        )
        self._hearing: set[asyncio.Task[None]] = set()
        self._announcing = announcing(config, self.roster)
        own, registering = own_addresses(config), config.discovery.registration
        self._discovery = config.discovery
        self._registered = registered = None if registering is None else RegisteredSource(registering.expire_s, own)
        self.registration = _registration(config, registered)
        sources = discovery_sources(config.discovery, registered)
        self.finder = Finder(sources, self.roster.set, own, config.discovery.networks)
        self._finding = asyncio.create_task(self.finder.run(), name="discovery")
        self._finding.add_done_callback(report_end)
        if self.kv_events is not None:
            self.membership.on_described(self._described)
            self.membership.on_change(self.kv_events.keep)
        self.expert_loads = ExpertLoads()
        every_s = config.health.experts_interval_s
        self._experts = ExpertReader(self.membership.counting_experts, self.expert_loads.read, every_s)
        self._reading_experts = asyncio.create_task(self._experts.run(), name="expert counters")
        self._reading_experts.add_done_callback(report_end)
        self.membership.on_change(lambda _: self.expert_loads.keep(self.membership.names()))
        self.registry = _registry(self)
        self._keeping_in_touch: asyncio.Task[None] | None = None
        if self.replicas is not None:
            self._keeping_in_touch = asyncio.create_task(self.replicas.run(), name="replicas")
        self.app: FastAPI = create_app(self, self.registry)
        self.page = _page_feed(config, self, watched)
        self._ask_reload: Callable[[], None] | None = None
        self.audit = _audit(config)
        self.admin = _admin_server(config, self)

    def configure(self, config: Config) -> None:
        """Use another config: limits, scheduling, members and how they are probed. Who has to leave drains first."""
        self.driver.post(Reconfigured(fields_of(core_settings(config))))
        self._aliases = served_models(config).aliases()
        self.membership.probe_as(config.health)
        self._experts.interval_s = config.health.experts_interval_s
        self.roster.set(CONFIG, config.workers)
        if config.discovery != self._discovery:
            self._discovery = config.discovery
            sources = discovery_sources(config.discovery, self._registered)
            self.finder.follow(sources, config.discovery.networks)

    def ordered(self, shared: Mapping[str, bytes]) -> None:
        """Operators of this or another gateway have ordered something."""
        task = asyncio.create_task(self._hear(shared), name="operators' orders")
        self._hearing.add(task)
        task.add_done_callback(self._hearing.discard)

    async def _hear(self, shared: Mapping[str, bytes]) -> None:
        for name in await self.operations.heard(shared):
            logger.warning("an order about worker %s makes no sense and is not obeyed", name)

    def reload_by(self, ask: Callable[[], None]) -> None:
        """Who has the config file read again: `ask` comes back at once, and what came of it is in the tallies."""
        self._ask_reload = ask

    async def reload(self) -> tuple[bool, int] | None:
        """Have the config read again: is another in force now, and the how-manieth; None: no answer in time."""
        before = self.tallies.config
        if self._ask_reload is None:
            return None
        self._ask_reload()
        deadline = self.now() + RELOAD_S
        while self.tallies.config == before:
            if self.now() >= deadline:
                return None
            await asyncio.sleep(0.02)
        return self.tallies.config[0] > before[0], self.tallies.config[0]

    @contextlib.asynccontextmanager
    async def serving_admin(self) -> AsyncIterator[None]:
        """Serve the ports of operators and of workers that register, for as long as the context lasts."""
        async with contextlib.AsyncExitStack() as stack:
            for server in (self.admin, self.registration):
                if server is not None:
                    await stack.enter_async_context(server.serving())
            yield

    async def control(
        self, path: str, query: str, body: bytes, names: Sequence[str], role: Role | None
    ) -> list[ControlResult] | None:
        """Carry an operator's call to workers; None: a name is nobody's."""
        members = self.membership.controlled()
        if not set(names) <= {member.name for member in members}:
            return None
        chosen = [m for m in members if (not names or m.name in names) and role in (None, m.role)]
        return await control(chosen, path, query, body)

    async def close(self) -> None:
        """No more probes, no more ticks."""
        self.page.close()
        self._changes.close()
        for task in self._hearing:
            task.cancel()
        for task in (self._finding, self._reading_experts):
            task.cancel()
        await asyncio.gather(self._finding, self._reading_experts, return_exceptions=True)
        if self._announcing is not None:
            self._announcing.cancel()
            await asyncio.gather(self._announcing, return_exceptions=True)
        await self.membership.close()
        if self.replicas is not None and self._keeping_in_touch is not None:
            self._keeping_in_touch.cancel()
            await asyncio.gather(self._keeping_in_touch, return_exceptions=True)
            await self.replicas.close()
        if self.kv_events is not None:
            await self.kv_events.close()
        self.driver.close()
        if self.recorder is not None:
            self.recorder.close()
        self.audit.close()

    def post(self, event: Event) -> None:
        """Bring an event to the core."""
        self.driver.post(event)

    def _described(self, worker: Worker, said: Description) -> None:
        if self.kv_events is not None:
            names = rank_names(worker.name, dp_size(worker, said.facts))
            for name, sources in by_member(sources_of(worker, said.event_sources), worker.name, names).items():
                self.kv_events.set(name, sources)

    # ------------------------------------------------------------- the app's view

    def ready(self) -> bool:
        return not self.draining and self.core.ready()

    def now(self) -> float:
        return self.driver.now()

    def wall_offset(self) -> float:
        return time.time() - self.driver.now()

    def models(self) -> list[bytes]:
        return with_aliases(self.membership.models(), self._aliases)

    def workers(self) -> list[WorkerLoad]:
        return list(self.core.workers())

    def discovery(self) -> tuple[list[SourceState], list[Refused]]:
        """How sources of workers stand, and whom they named in vain."""
        return list(self.finder.states.values()), self.finder.refused()

    def experts(self) -> list[ExpertLoad]:
        """How the experts of each worker that tells are loaded."""
        return self.expert_loads.all()

    def find(self, request_id: str) -> RequestRecord | None:
        live = next((r for r in self.live() if request_id in (r.rid, r.external_id)), None)
        return live or self.timelines.find(request_id)

    def live(self) -> list[RequestRecord]:
        return list(self.core.records())

    def last(self, count: int) -> list[RequestRecord]:
        return self.timelines.last(count)


def _registry(scheduling: Scheduling) -> CollectorRegistry:
    """All that `/metrics` shows of this half."""
    registry = CollectorRegistry()
    registry.register(scheduling.metrics)
    registry.register(scheduling.prefixes)
    registry.register(DiscoveryMetrics(scheduling.discovery))
    registry.register(ExpertMetrics(scheduling.experts))
    registry.register(PrewarmMetrics(scheduling.core.prewarms))
    if scheduling.replicas is not None:
        registry.register(ReplicaMetrics(scheduling.replicas))
    return registry


def _page_feed(config: Config, scheduling: Scheduling, watched: Watched) -> Feed:
    """What the web page is fed with, while somebody looks."""
    core, wanted = scheduling.core, config.scheduling
    sources = Sources(
        now=scheduling.now,
        wall_offset=scheduling.wall_offset,
        ready=scheduling.ready,
        workers=core.workers,
        describe=worker_json,
        waiting=core.waiting,
        live_count=core.live_count,
        live=core.records,
        last=scheduling.timelines.last,
        experts=scheduling.experts,
    )
    usual = PageLimits()
    limits = PageLimits(wanted.ttft_target_s or usual.ttft_s, wanted.tpot_limit_s or usual.tpot_s)
    sampler = Sampler(sources, watched, limits, controls=config.admin is not None)
    return Feed(sampler, lambda: scheduling.draining)


def _admin_server(config: Config, scheduling: Scheduling) -> AdminServer | None:
    """The operators' port, and the page on it; without one the page is on the clients' port, to be looked at only."""
    router = create_router(scheduling.page, scheduling)
    if config.admin is None:
        scheduling.app.include_router(router)
        return None
    app = create_admin_app(scheduling, scheduling.audit)
    add_worker_routes(app, scheduling.operations, scheduling, scheduling.audit)
    app.include_router(router)
    return AdminServer(config.admin, app, is_open)


def _busy(loads: Iterable[WorkerLoad]) -> set[str]:
    """The workers, by the names of their config, that hold something."""
    return {w.spec.endpoint or w.spec.name for w in loads if w.seqs or w.kv_tokens != w.stranded_tokens}


def _audit(config: Config) -> Audit:
    path = None if config.admin is None else config.admin.audit_log
    try:
        return Audit(path)
    except OSError as exc:
        raise ConfigError(f"admin.audit_log: cannot open {path}: {exc.strerror}") from exc


def _registration(config: Config, source: RegisteredSource | None) -> AdminServer | None:
    """The port at which workers register. Raises ConfigError."""
    wanted = config.discovery.registration
    if wanted is None or source is None:
        return None
    guard = Admin(host=wanted.host, port=wanted.port, token=wanted.token)
    return AdminServer(guard, create_registration_app(source))
