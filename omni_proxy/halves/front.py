"""The half that carries out: clients, workers, tokenizer, access log."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from omni_proxy.access.gate import Gate
from omni_proxy.access.shared import Counts
from omni_proxy.api.edge import Edge
from omni_proxy.api.ended import ending_of
from omni_proxy.api.exchange import Exchange
from omni_proxy.api.serving import FrontServer
from omni_proxy.api.trace_context import TraceContexts
from omni_proxy.config import Config, ConfigError
from omni_proxy.errors import Rejected
from omni_proxy.messages import Close, Event
from omni_proxy.observe.edge_news import EdgeNews
from omni_proxy.parts import (
    access_log,
    callback_server,
    check_worker_tls,
    connections,
    edge_limits,
    prewarm_of,
    prewarm_priority,
    resume_rule,
    served_models,
    server_tls,
    spans,
    tenants,
    token_counter,
)
from omni_proxy.token_routes import LocalAnswers
from omni_proxy.workers.upstream import Upstreams

logger = logging.getLogger(__name__)
STREAM_BYTES_PER_TOKEN = 150
"""For answers that ended before anybody counted their tokens: a stream's event is about as long."""


class Front:
    """The half that carries out. `post` brings events to the core, `app` serves what is not hot. Raises ConfigError."""

    def __init__(
        self,
        config: Config,
        post: Callable[[Event], None],
        app: Any,
        rejected: Callable[[str, str], None],
        counted: Callable[[EdgeNews], None],
        counts: Counts | None = None,
        pumps: bool = True,
    ) -> None:
        self._pumps = pumps
        check_worker_tls(config)
        self._gate = Gate(counts or Counts())
        self._gate.use(config.access.asks_for_keys, tenants(config))
        self._config = config
        self.upstreams = Upstreams(*connections(config))
        self._count_rejected = rejected
        self._counted = counted
        self._log = access_log(config)
        self._counter = token_counter(config, post, lambda seconds: self.edge.counted.tokenized(seconds))
        limits, served = edge_limits(config), served_models(config)
        self.edge = Edge(post, self.upstreams, self._counter, limits, self._closed, self._rejected, served=served)
        if self._counter is not None:
            self.edge.intake.answer_with(LocalAnswers(self._counter), self._answered)
        self._spans = spans(config)
        if config.tracing is not None:
            self.edge.traces = TraceContexts(config.tracing.share, random.Random(secrets.randbits(128)))
        self._callbacks = callback_server(config, self.edge)
        self.edge.resume(resume_rule(config))
        self.edge.foresee(prewarm_of(config) is not None, prewarm_priority(config))
        self._server = FrontServer(config, self.edge, self._gate, app, self._upkeep, server_tls(config))

    async def serve(self, sock: socket.socket, stop: asyncio.Event, force: asyncio.Event) -> None:
        """Serve on a listening socket until `stop`, then drain; `force` ends that early."""
        try:
            if self._pumps:
                self.edge.start_pump()
            if self._callbacks is not None:
                await self._callbacks.start()
            await self._server.run(sock, stop, force)
        finally:
            if self._callbacks is not None:
                self._callbacks.close()
            self.upstreams.close()
            self.edge.stop_pump()
            if self._counter is not None:
                self._counter.close()
            if self._log is not None:
                self._log.close()
            if self._spans is not None:
                await asyncio.to_thread(self._spans.close)

    def configure(self, config: Config) -> None:
        """Use another config: time limits, connections, access log; certificates are loaded again."""
        if config.access_log != self._config.access_log:
            self._change_log(config)
        self._config = config
        self._gate.use(config.access.asks_for_keys, tenants(config))
        self.upstreams.configure(*connections(config))
        self.edge.limit(edge_limits(config))
        self.edge.intake.serve(served_models(config))
        self.edge.resume(resume_rule(config))
        self.edge.foresee(prewarm_of(config) is not None, prewarm_priority(config))
        self._server.configure(config)

    def _change_log(self, config: Config) -> None:
        try:
            opened = access_log(config)
        except ConfigError as exc:
            logger.error("%s; the old access log stays", exc)
            return
        old, self._log = self._log, opened
        if old is not None:
            old.close()

    def reopen_log(self) -> None:
        """Open the access log again under its name: it was moved away."""
        try:
            if self._log is not None:
                self._log.reopen()
        except OSError as exc:
            logger.error("cannot open the access log again, the old one stays: %s", exc.strerror)

    def _upkeep(self) -> None:
        self.upstreams.expire_idle()
        news = self.edge.counted.take()
        if news is not None:
            self._counted(news)
        if self._log is not None:
            self._log.flush()

    def _closed(self, exchange: Exchange, close: Close) -> None:
        if exchange.tenant and close.record.placements:
            self._gate.spent(exchange.tenant, _tokens_used(exchange, close))
        trace = exchange.trace
        if trace is not None and self._spans is not None:
            ids = trace.trace_id, trace.parent_id, trace.span_id
            self._spans.ended(*ids, close.record, exchange.status or 499, time.monotonic())
        if self._log is not None:
            self._log.write(ending_of(exchange, close.error), close.record, time.monotonic())

    def _answered(self, exchange: Exchange) -> None:
        """Without a worker, and so without a record."""
        if self._log is not None:
            self._log.write(ending_of(exchange, None), None, time.monotonic())

    def _rejected(self, exchange: Exchange, rejected: Rejected) -> None:
        self._count_rejected(exchange.path.decode(), rejected.code.value)
        if self._log is not None:
            self._log.write(ending_of(exchange, rejected.code), None, time.monotonic())


def _tokens_used(exchange: Exchange, close: Close) -> int:
    answer = close.record.completion_tokens
    if answer is None:
        answer = exchange.bytes_out // STREAM_BYTES_PER_TOKEN if close.record.stream else 0
    return close.record.prompt_tokens + answer
