"""The composition root: the only module that names concrete classes and ties them together."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Final

import uvicorn
from prometheus_client import CollectorRegistry

from omni_proxy.api.app import create_app
from omni_proxy.api.edge import Edge, EdgeLimits
from omni_proxy.api.exchange import Exchange
from omni_proxy.api.front import FrontProtocol
from omni_proxy.config import Config, ConfigError, KvCachePolicy, LogFormat
from omni_proxy.core import Core, CoreSettings
from omni_proxy.driver import Driver
from omni_proxy.errors import Rejected
from omni_proxy.lifecycle.retries import RetryPolicy
from omni_proxy.messages import Close, Event, RequestRecord
from omni_proxy.observe.access_log import FLUSH_S, AccessLog, Ending
from omni_proxy.observe.metrics import Live, Metrics
from omni_proxy.observe.timelines import Timelines
from omni_proxy.prompts.chat_template import ChatTemplateError
from omni_proxy.prompts.text_tokenizer import TokenizerError
from omni_proxy.scheduler.admission import Admission
from omni_proxy.scheduler.ledger import WorkerLoad
from omni_proxy.tokenizer import PromptTokenizer, TokenCounter
from omni_proxy.workers.membership import Membership

logger = logging.getLogger(__name__)

SWEEP_S: Final = 0.25


def core_settings(config: Config) -> CoreSettings:
    """The core's share of a config."""
    limits = config.limits
    return CoreSettings(
        schedule_mode=config.schedule_mode.mode,
        prefix_aware=config.kv_cache_policy is KvCachePolicy.APC,
        queue_timeout_s=limits.queue_timeout_s,
        no_worker_timeout_s=limits.no_worker_timeout_s,
        admission=Admission(limits.max_waiting_requests, limits.max_waiting_tokens),
        retries=RetryPolicy(config.retries.max),
        max_fails=config.health.max_fails,
        fail_timeout_s=config.health.fail_timeout_s,
    )


class Gateway:
    """One gateway in one process. Made inside the event loop that it runs on. Raises ConfigError."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.draining = False
        core = Core(core_settings(config))
        self.timelines = Timelines(config.timelines)
        self.metrics = Metrics(Live(lambda: core.workers(), core.waiting, lambda: sum(1 for _ in core.records())))
        self.driver = Driver(core, [self.metrics, self.timelines])
        self.membership = Membership(self.driver.post, config.health, config.timeouts, config.keepalive)
        self._log = _access_log(config)
        self._counter = _token_counter(config, self.driver.post)
        limits = EdgeLimits(config.timeouts.first_byte_s, config.timeouts.inter_chunk_s, config.timeouts.client_send_s)
        self.edge = Edge(self.driver.post, self.membership, self._counter, limits, self._closed, self._rejected)
        self.driver.connect(self.edge.perform)
        registry = CollectorRegistry()
        registry.register(self.metrics)
        self.app = create_app(self, registry)

    # ------------------------------------------------------------- the app's view

    def ready(self) -> bool:
        return not self.draining and self.driver.core.ready()

    def now(self) -> float:
        return self.driver.now()

    def wall_offset(self) -> float:
        return time.time() - self.driver.now()

    def models(self) -> list[bytes]:
        return self.membership.models()

    def workers(self) -> list[WorkerLoad]:
        return list(self.driver.core.workers())

    def find(self, request_id: str) -> RequestRecord | None:
        live = next((r for r in self.live() if request_id in (r.rid, r.external_id)), None)
        return live or self.timelines.find(request_id)

    def live(self) -> list[RequestRecord]:
        return list(self.driver.core.records())

    def last(self, count: int) -> list[RequestRecord]:
        return self.timelines.last(count)

    # -------------------------------------------------------------------- serving

    async def serve(self, sock: socket.socket, stop: asyncio.Event, force: asyncio.Event) -> None:
        """Serve on a bound socket until `stop`; then finish what runs, for `drain_s` at most, or until `force`."""
        for worker in self.config.workers:
            self.membership.add(worker)
        server = _Server(self._uvicorn_config())
        async with self._maintenance(server):
            serving = asyncio.create_task(server.serve([sock]), name="uvicorn")
            stopper = asyncio.create_task(self._stop_when(server, stop, force), name="stopper")
            try:
                await serving
            finally:
                stopper.cancel()
                for exchange in list(self.edge.exchanges.values()):
                    if exchange.client is not None:
                        exchange.client.drop()
                await asyncio.sleep(0)

    async def _stop_when(self, server: uvicorn.Server, stop: asyncio.Event, force: asyncio.Event) -> None:
        await stop.wait()
        self.draining = True
        server.should_exit = True
        await force.wait()
        server.force_exit = True

    def _uvicorn_config(self) -> uvicorn.Config:
        timeouts = self.config.timeouts
        protocol = functools.partial(
            FrontProtocol,
            edge=self.edge,
            max_body_bytes=self.config.limits.client_max_body_bytes,
            body_timeout_s=timeouts.client_body_s,
        )
        return uvicorn.Config(
            self.app,
            http=protocol,  # type: ignore[arg-type]  # uvicorn calls it like the class that it expects
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            backlog=self.config.listen.backlog,
            timeout_keep_alive=round(timeouts.client_keepalive_s),
            timeout_graceful_shutdown=max(1, round(timeouts.drain_s)),
        )

    @contextlib.asynccontextmanager
    async def _maintenance(self, server: uvicorn.Server) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(_every(1.0, functools.partial(self._close_idle, server)), name="close idle clients"),
            asyncio.create_task(_every(SWEEP_S, self._sweep), name="sweep"),
            asyncio.create_task(_every(FLUSH_S, self._flush), name="flush access log"),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await self.membership.close()
            self.driver.close()
            if self._counter is not None:
                self._counter.close()
            if self._log is not None:
                self._log.close()

    def _close_idle(self, server: uvicorn.Server) -> None:
        before = asyncio.get_running_loop().time() - self.config.timeouts.client_keepalive_s
        for connection in list(server.server_state.connections):
            if isinstance(connection, FrontProtocol):
                connection.close_if_idle(before)

    def _sweep(self) -> None:
        self.edge.sweep()
        self.membership.expire_idle()

    def _flush(self) -> None:
        if self._log is not None:
            self._log.flush()

    # ------------------------------------------------------------------ access log

    def _closed(self, exchange: Exchange, close: Close) -> None:
        if self._log is not None:
            self._log.write(_ending(exchange, close.error), close.record, self.driver.now())

    def _rejected(self, exchange: Exchange, rejected: Rejected) -> None:
        self.metrics.rejected_at_edge(exchange.path.decode(), rejected.code.value)
        if self._log is not None:
            self._log.write(_ending(exchange, rejected.code), None, self.driver.now())


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours say what a first and a second signal mean."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def stop_signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Events that SIGTERM and SIGINT set: the first signal `stop`, the second `force`."""
    stop, force = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (force if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop, force
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def listening_socket(host: str, port: int, backlog: int) -> socket.socket:
    """A bound socket. Raises ConfigError in one line when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # Accepted sockets inherit it: tokens must not wait for acknowledgements of the ones before.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        # Listening at once makes a second gateway on this port fail here and not later.
        sock.listen(backlog)
    except (OSError, OverflowError) as exc:
        sock.close()
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from exc
    return sock


def _access_log(config: Config) -> AccessLog | None:
    log = config.access_log
    if log.path is None:
        return None
    try:
        return AccessLog(log.path, log.format is LogFormat.COMBINED)
    except OSError as exc:
        raise ConfigError(f"access_log.path: cannot open {log.path}: {exc.strerror}") from exc


def _token_counter(config: Config, post: Callable[[Event], None]) -> TokenCounter | None:
    path = config.model.path
    if path is None or config.kv_cache_policy is KvCachePolicy.INDEPENDENT:
        return None
    try:
        return TokenCounter(PromptTokenizer.load(path), post)
    except (TokenizerError, ChatTemplateError) as exc:
        raise ConfigError(f"model.path: {exc}") from exc


def _ending(exchange: Exchange, error: str | None) -> Ending:
    return Ending(
        request_id=exchange.request_id.decode(),
        client=exchange.peer,
        method="POST",
        path=exchange.path.decode("ascii", "replace"),
        status=exchange.status or 499,
        bytes_out=exchange.bytes_out,
        user_agent=exchange.user_agent.decode("latin-1"),
        error=None if error is None else str(error),
    )


async def _every(seconds: float, what: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            what()
        except Exception:
            logger.exception("maintenance failed")
