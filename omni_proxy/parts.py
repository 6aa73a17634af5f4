"""What a config becomes: settings, limits, and what has to be opened for it. Those that open raise ConfigError."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from omni_proxy.access.gate import Allowance
from omni_proxy.access.keys import read_hash
from omni_proxy.api.callbacks import CallbackServer
from omni_proxy.api.edge import Edge, EdgeLimits
from omni_proxy.api.resumable import ResumeRule
from omni_proxy.api.served import ServedModel, ServedModels
from omni_proxy.config import Config, ConfigError, KvCachePolicy, LogFormat, Model, Prewarm
from omni_proxy.core import CoreSettings
from omni_proxy.flow.prewarm_settings import PrewarmSettings
from omni_proxy.lifecycle.retries import RetryPolicy
from omni_proxy.messages import Event
from omni_proxy.observe.access_log import AccessLog
from omni_proxy.observe.recorder import Recorder
from omni_proxy.prompts.chat_template import ChatTemplateError
from omni_proxy.prompts.text_tokenizer import TokenizerError
from omni_proxy.scheduler.admission import Admission
from omni_proxy.scheduler.settings import LengthBucket, SchedulingSettings
from omni_proxy.tls import ServerFiles, ServerTls, TlsError, client_context
from omni_proxy.tokenizer import PromptTokenizer, TokenCounter, TokenCounters
from omni_proxy.workers.announcements import AnnouncedWorkers
from omni_proxy.workers.described import client_files
from omni_proxy.workers.discovery.sources import discovery_sources
from omni_proxy.workers.roster import Roster

if TYPE_CHECKING:
    from omni_proxy.observe.otel import Spans

logger = logging.getLogger(__name__)


def core_settings(config: Config) -> CoreSettings:
    """The core's share of a config."""
    limits = config.limits
    scheduling = config.scheduling.model_dump() | {"order": config.scheduling.order.value}
    modes = {m.name: m.schedule_mode.value for m in config.models if m.schedule_mode is not None}
    below = {m.name: m.aggregate_below_tokens for m in config.models if m.aggregate_below_tokens is not None}
    scheduling["length_buckets"] = tuple(LengthBucket(**bucket) for bucket in scheduling["length_buckets"])
    return CoreSettings(
        scheduling=SchedulingSettings(**scheduling, model_modes=modes, model_aggregate_below_tokens=below),
        schedule_mode=config.schedule_mode.mode,
        prefix_aware=config.kv_cache_policy is KvCachePolicy.APC,
        queue_timeout_s=limits.queue_timeout_s,
        no_worker_timeout_s=limits.no_worker_timeout_s,
        admission=Admission(limits.max_waiting_requests, limits.max_waiting_tokens),
        retries=RetryPolicy(config.retries.max),
        max_fails=config.health.max_fails,
        fail_timeout_s=config.health.fail_timeout_s,
        prewarm=_prewarm_settings(config),
    )


def prewarm_of(config: Config) -> Prewarm | None:
    wanted = config.prewarm
    if isinstance(wanted, bool):
        return Prewarm() if wanted else None
    return wanted


def _prewarm_settings(config: Config) -> PrewarmSettings | None:
    wanted = prewarm_of(config)
    return None if wanted is None else PrewarmSettings(**wanted.model_dump(exclude={"priority"}))


def tenants(config: Config) -> dict[str, tuple[Allowance, list[bytes]]]:
    return {
        name: (
            Allowance(name, tenant.requests_per_minute, tenant.tokens_per_minute, tenant.concurrent),
            [read_hash(key) for key in tenant.keys],
        )
        for name, tenant in config.access.tenants.items()
    }


def edge_limits(config: Config) -> EdgeLimits:
    timeouts = config.timeouts
    return EdgeLimits(timeouts.first_byte_s, timeouts.inter_chunk_s, timeouts.client_send_s)


def resume_rule(config: Config) -> ResumeRule:
    on = config.resume
    return ResumeRule(on) if isinstance(on, bool) else ResumeRule(models=frozenset(on))


def prewarm_priority(config: Config) -> int | None:
    wanted = prewarm_of(config)
    return None if wanted is None else wanted.priority


def connections(config: Config) -> tuple[float, int, float]:
    return config.keepalive.idle_s, config.keepalive.max_idle, config.timeouts.connect_s


def check_usable(config: Config) -> None:
    """Raise ConfigError where what a config names cannot be used: certificates, sources of workers, the access log."""
    check_certificates(config)
    discovery_sources(config.discovery, None)
    log = access_log(config)
    if log is not None:
        log.close()


def spans(config: Config) -> Spans | None:
    """Who makes and sends spans, where the config wants some. Raises ConfigError."""
    wanted = config.tracing
    if wanted is None:
        return None
    try:
        from omni_proxy.observe.otel import Spans, exporter
    except ImportError as exc:
        raise ConfigError(f"tracing: needs the extra [otel]: pip install 'omni-proxy[otel]' ({exc})") from exc
    return Spans(wanted.service_name, exporter(wanted.endpoint, wanted.headers, wanted.timeout_s))


def callback_server(config: Config, edge: Edge) -> CallbackServer | None:
    wanted = config.callbacks
    if wanted is None:
        return None
    host = wanted.listen_host or wanted.host
    try:
        server = CallbackServer(edge.starter.asked, host, wanted.port, wanted.host)
    except OSError as exc:
        raise ConfigError(f"callbacks: cannot listen on {host}:{wanted.port}: {exc.strerror or exc}") from exc
    edge.starter.callback_url = server.url
    return server


def announcing(config: Config, roster: Roster) -> asyncio.Task[None] | None:
    """Listens to workers that announce themselves, where the config says so."""
    wanted = config.announcements
    if wanted is None:
        return None
    try:
        announced = AnnouncedWorkers(wanted, lambda workers: roster.set("announcements", workers))
    except OSError as exc:
        raise ConfigError(f"announcements: cannot listen on {wanted.listen}: {exc.strerror or exc}") from exc
    task = asyncio.create_task(announced.run(), name="announcements")
    task.add_done_callback(report_end)
    return task


def own_addresses(config: Config) -> list[tuple[str, int]]:
    """Under which a source might name this very gateway."""
    hosts = {config.listen.host, "127.0.0.1", "::1", "localhost", socket.gethostname()}
    with contextlib.suppress(OSError):
        hosts.update(str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None))
    return [(host, config.listen.port) for host in sorted(hosts)]


def report_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("%s have ended", task.get_name(), exc_info=task.exception())


def recorder(config: Config, settings: CoreSettings) -> Recorder | None:
    if config.record is None:
        return None
    try:
        return Recorder(config.record, settings)
    except OSError as exc:
        raise ConfigError(f"record: cannot open {config.record}: {exc.strerror}") from exc


def access_log(config: Config) -> AccessLog | None:
    log = config.access_log
    if log.path is None:
        return None
    try:
        return AccessLog(log.path, log.format is LogFormat.COMBINED)
    except OSError as exc:
        raise ConfigError(f"access_log.path: cannot open {log.path}: {exc.strerror}") from exc


def server_tls(config: Config) -> ServerTls | None:
    tls = config.listen.tls
    if tls is None:
        return None
    certificate, key, client_ca = (None if p is None else str(p) for p in (tls.certificate, tls.key, tls.client_ca))
    assert certificate is not None
    try:
        return ServerTls(ServerFiles(certificate, key, client_ca))
    except TlsError as exc:
        raise ConfigError(f"listen.tls: {exc}") from exc


def check_certificates(config: Config) -> None:
    """Raise ConfigError where certificates or keys that a config names cannot be loaded."""
    check_worker_tls(config)
    server_tls(config)


def check_worker_tls(config: Config) -> None:
    """Raise ConfigError where the certificates for a worker cannot be loaded."""
    for worker in config.workers:
        files = client_files(worker)
        try:
            if files is not None:
                client_context(files)
        except TlsError as exc:
            raise ConfigError(f"worker {worker.name}: tls: {exc}") from exc


def token_counter(config: Config, post: Callable[[Event], None], took: Callable[[float], None]) -> TokenCounters | None:
    """A counter for each model that has a folder; one for all others, if they have."""
    if config.kv_cache_policy is KvCachePolicy.INDEPENDENT:
        return None
    named = [
        (name, _one_counter(m, f"model {m.name}", post, took)) for m in config.models for name in (m.name, *m.adapters)
    ]
    counters = {name: counter for name, counter in named if counter is not None}
    others = _one_counter(config.model, "model", post, took)
    return TokenCounters(counters, others) if counters or others else None


def _one_counter(
    model: Model, place: str, post: Callable[[Event], None], took: Callable[[float], None]
) -> TokenCounter | None:
    if model.path is None:
        return None
    try:
        tokenizer = PromptTokenizer.load(model.path, frozenset(model.adapters))
        return TokenCounter(tokenizer, post, model.send_token_ids, took)
    except (TokenizerError, ChatTemplateError) as exc:
        raise ConfigError(f"{place}.path: {exc}") from exc


def served_models(config: Config) -> ServedModels:
    """The models as clients see them; an adapter is a model of its own."""
    models: list[ServedModel] = []
    for m in config.models:
        thinking = m.thinking
        for name in (m.name, *m.adapters):
            aliases = m.aliases if name == m.name else ()
            models.append(
                ServedModel(name, aliases, m.priority, thinking.default, thinking.budget_tokens, m.path is not None)
            )
    return ServedModels(models, config.model.path is not None)
