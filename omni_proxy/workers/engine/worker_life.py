"""A worker's life on the event loop: ready, serving, draining, gone.

The launcher hears of readiness through `ready_fd`. A first signal drains, a second one forces, and a launcher that is
gone ends the worker at once, so that no orphan holds memory and ports.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import uvicorn

from omni_proxy.workers.engine.calls import CallBuilder
from omni_proxy.workers.engine.generation import EngineApi
from omni_proxy.workers.engine.server import WorkerServer
from omni_proxy.workers.engine.server_metrics import ServerMetrics
from omni_proxy.workers.engine.worker_options import WorkerOptions
from omni_proxy.workers.register import Registration

EXIT_OK: Final = 0
EXIT_FORCED: Final = 1
_LEASE_POLL_S: Final = 0.02
_ENGINE_POLL_S: Final = 0.5
_KEEP_ALIVE_S: Final = 75
"""Idle connections live this long: longer than a gateway keeps them, so that it never sends into a closing one."""
_GRACE_S: Final = 5.0
"""How long a worker whose launcher is gone may take to end by itself."""

_log = logging.getLogger(__name__)


class _HttpServer(uvicorn.Server):
    """Uvicorn that leaves signals to us and says when it serves."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(slots=True)
class LauncherWatch:
    """Watches the launcher's pipe from a thread, so that it works while torch loads or hangs."""

    parent_fd: int | None
    gone: bool = False
    on_gone: Callable[[], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        if self.parent_fd is not None:
            threading.Thread(target=self._watch, name="launcher-watch", daemon=True).start()

    def call_when_gone(self, on_gone: Callable[[], None]) -> None:
        """Have `on_gone` called from the watching thread, or now if it is too late for that."""
        with self._lock:
            self.on_gone = on_gone
            gone = self.gone
        if gone:
            on_gone()

    def _watch(self) -> None:
        assert self.parent_fd is not None
        try:
            while os.read(self.parent_fd, 1024):
                pass
        except OSError as exc:
            _log.warning("cannot watch the launcher: %s", exc)
            return
        with self._lock:
            self.gone = True
            on_gone = self.on_gone
        if on_gone is not None:
            on_gone()
        time.sleep(_GRACE_S)
        os._exit(EXIT_FORCED)


class WorkerLife:
    """From the first accepted connection to the last: readiness, signals, drain."""

    def __init__(
        self, options: WorkerOptions, engine: EngineApi, builder: CallBuilder, launcher: LauncherWatch
    ) -> None:
        self._options = options
        self._engine = engine
        self._builder = builder
        self._launcher = launcher
        self._deadline: float | None = None
        """End of the drain on the loop's clock; set by the first signal."""
        self._forced = False
        self._registering: asyncio.Task[None] | None = None

    async def run(self, sock: socket.socket) -> int:
        """Serve on `sock` until told to stop; returns the exit code."""
        loop = asyncio.get_running_loop()
        metrics = ServerMetrics(self._engine.stats, self._builder.card.names[0])
        worker = WorkerServer(self._engine, self._builder, metrics)
        server = self._http_server(worker, sock)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, worker, server)
        self._launcher.call_when_gone(lambda: _post(loop, self._force, worker, server))
        watch = loop.create_task(self._watch_engine(worker, server))
        self._registering = self._register(sock)
        try:
            await server.serve(sockets=[sock])
            await self._wait_for_leases()
        finally:
            watch.cancel()
            await self._say_goodbye()
        return EXIT_FORCED if self._forced else EXIT_OK

    def _register(self, sock: socket.socket) -> asyncio.Task[None] | None:
        """Tell gateways that it is there, where it was asked to."""
        options = self._options
        if not options.register:
            return None
        host, port = options.advertise or options.host, sock.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        fields: dict[str, object] = {
            "name": options.name or f"{options.role}-{host.replace(':', '-').strip('-')}-{port}",
            "url": f"http://{shown}:{port}",
            "role": options.role,
            "connector": "omni",
            "max_seqs": options.max_num_seqs,
        }
        token_file = None if options.token_file is None else Path(options.token_file)
        return asyncio.create_task(Registration(options.register, token_file, fields).run(), name="registration")

    async def _say_goodbye(self) -> None:
        """Gateways send nothing more."""
        task, self._registering = self._registering, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _http_server(self, worker: WorkerServer, sock: socket.socket) -> _HttpServer:
        config = uvicorn.Config(
            worker.app(),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(self._options.drain_s) + 1,
        )
        return _HttpServer(config, lambda: self._tell_ready(sock))

    def _tell_ready(self, sock: socket.socket) -> None:
        host, port = sock.getsockname()[:2]
        side_port = self._engine.info.side_channel_port
        _log.info("serving %s on %s:%d", self._options.model, host, port)
        if self._options.ready_fd is None:
            return
        line = {"host": host, "port": port, "side_channel_port": side_port, "pid": os.getpid()}
        try:
            with os.fdopen(self._options.ready_fd, "w") as pipe:
                pipe.write(json.dumps(line) + "\n")
        except OSError as exc:
            _log.warning("cannot tell the launcher: %s", exc)

    def _on_signal(self, worker: WorkerServer, server: uvicorn.Server) -> None:
        if self._deadline is not None:
            return self._force(worker, server)
        loop = asyncio.get_running_loop()
        self._deadline = loop.time() + self._options.drain_s
        loop.call_later(self._options.drain_s, worker.stop_all)
        worker.drain()
        server.should_exit = True
        if self._registering is not None:
            self._registering.cancel()  # gateways hear of it before the drain is over

    def _force(self, worker: WorkerServer, server: uvicorn.Server) -> None:
        self._forced = True
        worker.drain()
        worker.stop_all()
        server.should_exit = server.force_exit = True

    async def _watch_engine(self, worker: WorkerServer, server: uvicorn.Server) -> None:
        """A worker whose engine has died ends, so that its launcher starts another."""
        while self._engine.alive:  # noqa: ASYNC110 - a thread that dies tells nobody
            await asyncio.sleep(_ENGINE_POLL_S)
        _log.error("the engine's thread has died: the worker ends")
        self._forced = True
        worker.drain()
        worker.stop_all()
        server.should_exit = True

    async def _wait_for_leases(self) -> None:
        """Let others pull the KV that was promised to them, until the drain is over."""
        clock = asyncio.get_running_loop().time
        while self._deadline is not None and not self._forced and clock() < self._deadline:
            if not self._engine.stats().blocks_leased:
                return
            await asyncio.sleep(_LEASE_POLL_S)


def _post(loop: asyncio.AbstractEventLoop, action: Callable[..., None], *args: object) -> None:
    """Run `action` on the loop from another thread; nothing once the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(action, *args)
