"""One pretending worker process, from options to exit code: ports, readiness, signals, drain.

A first signal drains, a second one forces, and a launcher that is gone ends the worker.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Final

import prometheus_client
import uvloop

from omni_proxy.config import ConfigError
from omni_proxy.sim.http.server import Connection
from omni_proxy.sim.pretend.options import PretendOptions
from omni_proxy.sim.pretend.routes import Routes
from omni_proxy.sim.pretend.worker import PretendWorker

if TYPE_CHECKING:
    from omni_proxy.sim.pretend.kv_events import KvEvents

EXIT_OK: Final = 0
EXIT_FORCED: Final = 1
_POLL_S: Final = 0.02
_LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"

logger = logging.getLogger(__name__)


def run_pretend(options: PretendOptions) -> int:
    """Serve until told to stop; 0 drained, 1 forced. Raises ConfigError where it cannot start."""
    logging.basicConfig(level=options.log_level.upper(), format=_LOG_FORMAT, stream=sys.stderr)
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    with ExitStack() as stack:
        sockets = [stack.enter_context(_bound(options.host, options.port))]
        if options.bootstrap_port is not None:
            sockets.append(stack.enter_context(_bound(options.host, options.bootstrap_port)))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Life(options).run(sockets))


def _bound(host: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(4096)
    except (OSError, OverflowError) as exc:
        sock.close()
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else exc
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from exc
    return sock


class _Life:
    def __init__(self, options: PretendOptions) -> None:
        self._options = options
        self._stop = asyncio.Event()
        self._forced = False

    async def run(self, sockets: list[socket.socket]) -> int:
        loop = asyncio.get_running_loop()
        address = sockets[0].getsockname()[:2]
        events = self._publisher()
        worker = PretendWorker(self._options, address, events)
        live: set[Connection] = set()
        factory = partial(Connection, Routes(worker, int(time.time())), live)
        servers = [await loop.create_server(factory, sock=sock) for sock in sockets]
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        self._watch_launcher(loop)
        self._tell_ready(*address)
        await self._stop.wait()
        await self._drain(worker, live)
        for server in servers:
            server.close()
        await worker.close()
        if events is not None:
            events.close()
        return EXIT_FORCED if self._forced else EXIT_OK

    def _publisher(self) -> KvEvents | None:
        options = self._options
        if options.kv_events_port is None:
            return None
        try:
            from omni_proxy.sim.pretend.kv_events import KvEvents
        except ImportError as exc:
            raise ConfigError(f"--kv-events-port needs pyzmq: pip install 'omni-proxy[worker]' ({exc})") from exc
        try:
            return KvEvents(options.host, options.kv_events_port, options.block_size)
        except OSError as exc:
            raise ConfigError(f"--kv-events-port: {exc}") from exc

    def _on_signal(self) -> None:
        self._forced = self._stop.is_set()
        self._stop.set()

    def _watch_launcher(self, loop: asyncio.AbstractEventLoop) -> None:
        fd = self._options.parent_fd
        if fd is None:
            return

        def readable() -> None:
            if not os.read(fd, 1024):
                loop.remove_reader(fd)
                self._forced = True
                self._stop.set()

        loop.add_reader(fd, readable)

    def _tell_ready(self, host: str, port: int) -> None:
        options = self._options
        line = {"host": host, "port": port, "side_channel_port": port, "pid": os.getpid()}
        if options.ready_fd is None:
            sys.stderr.write(f"pretending to be {options.preset} ({options.role}) on {host}:{port}\n")
            return
        with os.fdopen(options.ready_fd, "w") as pipe:
            pipe.write(json.dumps(line) + "\n")

    async def _drain(self, worker: PretendWorker, live: set[Connection]) -> None:
        """Finish what runs, for `drain_s` at most; then end it with an error."""
        worker.draining = True
        deadline = time.monotonic() + self._options.drain_s
        while worker.busy() and not self._forced and time.monotonic() < deadline:  # noqa: ASYNC110 - also a deadline
            await asyncio.sleep(_POLL_S)
        worker.stop_all()
        for connection in list(live):
            connection.close_when_answered()
        await asyncio.sleep(0)
