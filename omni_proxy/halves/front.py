"""The half that carries out: clients, workers, tokenizer, access log."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import socket
from collections.abc import Callable
from typing import Any

from omni_proxy.access.gate import Gate
from omni_proxy.access.shared import Counts
from omni_proxy.api.edge import Edge
from omni_proxy.api.ended import Endings
from omni_proxy.api.serving import FrontServer
from omni_proxy.api.trace_context import TraceContexts
from omni_proxy.config import Config, ConfigError
from omni_proxy.messages import Event
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
        self._counted = counted
        self._spans = spans(config)
        self._endings = told = Endings(self._gate, self._spans, access_log(config), rejected)
        self._counter = token_counter(config, post, lambda seconds: self.edge.counted.tokenized(seconds))
        limits, served = edge_limits(config), served_models(config)
        self.edge = Edge(post, self.upstreams, self._counter, limits, told.closed, told.rejected, served=served)
        if self._counter is not None:
            self.edge.intake.answer_with(LocalAnswers(self._counter), told.answered)
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
            if self._endings.log is not None:
                self._endings.log.close()
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
        old, self._endings.log = self._endings.log, opened
        if old is not None:
            old.close()

    def reopen_log(self) -> None:
        """Open the access log again under its name: it was moved away."""
        try:
            if self._endings.log is not None:
                self._endings.log.reopen()
        except OSError as exc:
            logger.error("cannot open the access log again, the old one stays: %s", exc.strerror)

    def _upkeep(self) -> None:
        self.upstreams.expire_idle()
        news = self.edge.news()
        if news is not None:
            self._counted(news)
        if self._endings.log is not None:
            self._endings.log.flush()
