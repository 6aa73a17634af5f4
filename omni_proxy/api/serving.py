"""Runs the HTTP server of one front: uvicorn with our protocol, its time limits, and the way it ends."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import uvicorn

from omni_proxy.access.gate import Gate
from omni_proxy.api.bounds import Bounds, Crowd
from omni_proxy.api.client import ClientConnection
from omni_proxy.api.edge import Edge
from omni_proxy.api.front import FrontProtocol
from omni_proxy.api.guard import Guard
from omni_proxy.config import Config, ConfigError
from omni_proxy.tls import ServerTls

logger = logging.getLogger(__name__)

SWEEP_S: Final = 0.25
CLOSE_IDLE_S: Final = 1.0


class FrontServer:
    """Serves one edge and one ASGI app on a socket until told to stop."""

    def __init__(
        self,
        config: Config,
        edge: Edge,
        gate: Gate,
        app: Any,
        upkeep: Callable[[], None],
        tls: ServerTls | None = None,
    ) -> None:
        self._config = config
        self._tls = tls
        self._edge = edge
        self._gate = gate
        self._guard = Guard(app, gate)
        self._crowd = Crowd(config.limits.connections_per_client)
        self._guard_as(config)
        self._upkeep = upkeep
        self._server = QuietServer(self._uvicorn_config(self._guard))

    def configure(self, config: Config) -> None:
        """Use other limits and times: for new connections those of requests, for all those of waiting and draining.

        Certificates are loaded again too.
        """
        self._config = config
        self._guard_as(config)
        self._crowd.most = config.limits.connections_per_client
        timeouts, uvicorns = config.timeouts, self._server.config
        uvicorns.timeout_keep_alive = round(timeouts.client_keepalive_s)
        uvicorns.timeout_graceful_shutdown = max(1, round(timeouts.drain_s))
        if self._tls is not None:
            self._tls.refresh(force=True)

    def _guard_as(self, config: Config) -> None:
        access, admin = config.access, config.admin
        tokens = () if admin is None else [*admin.tokens.values(), *([] if admin.token is None else [admin.token])]
        self._guard.use(access.routes, access.open_routes, tokens)

    async def run(self, sock: socket.socket, stop: asyncio.Event, force: asyncio.Event) -> None:
        """Serve until `stop`; then finish what runs, for `drain_s` at most, or until `force`."""
        async with self._tasks():
            stopper = asyncio.create_task(self._stop_when(stop, force), name="stopper")
            try:
                await self._server.serve([sock])
            finally:
                stopper.cancel()
                for exchange in list(self._edge.exchanges.values()):
                    if exchange.client is not None:
                        exchange.client.drop()
                # Lost connections are told in the loop's next turn; leases go home before we do.
                await asyncio.sleep(0)
                await asyncio.sleep(0)

    async def _stop_when(self, stop: asyncio.Event, force: asyncio.Event) -> None:
        await stop.wait()
        self._server.should_exit = True
        await force.wait()
        self._server.force_exit = True

    @contextlib.asynccontextmanager
    async def _tasks(self) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(every(CLOSE_IDLE_S, self._once_a_second), name="once a second"),
            asyncio.create_task(every(SWEEP_S, self._sweep), name="sweep"),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()

    def _sweep(self) -> None:
        self._edge.sweep()
        self._upkeep()

    def _once_a_second(self) -> None:
        self._close_idle()
        if self._tls is not None:
            self._tls.refresh()

    def _close_idle(self) -> None:
        now, timeouts = asyncio.get_running_loop().time(), self._config.timeouts
        for connection in list(self._server.server_state.connections):
            if isinstance(connection, ClientConnection):
                connection.close_if_idle(now - timeouts.client_keepalive_s)
                connection.close_if_too_slow(now)
                connection.drop_if_stuck(now, timeouts.client_send_s)

    def _new_connection(self, **of_uvicorn: Any) -> ClientConnection:
        config = self._config
        bounds = Bounds(
            config.limits.client_max_body_bytes,
            config.limits.client_max_head_bytes,
            config.limits.client_max_headers,
            config.timeouts.client_head_s,
            config.timeouts.client_body_s,
            config.limits.client_min_bytes_per_s,
        )
        among: set[Any] = of_uvicorn["server_state"].connections
        parser_for = partial(FrontProtocol, **of_uvicorn)
        return ClientConnection(self._edge, self._gate, self._guard, bounds, self._crowd, among, parser_for)

    def _uvicorn_config(self, app: Any) -> uvicorn.Config:
        timeouts = self._config.timeouts
        tls = self._tls
        return uvicorn.Config(
            app,
            ssl_context_factory=None if tls is None else lambda _config, _default: tls.context,
            http=self._new_connection,  # type: ignore[arg-type]  # uvicorn calls it like the class that it expects
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            backlog=self._config.listen.backlog,
            timeout_keep_alive=round(timeouts.client_keepalive_s),
            timeout_graceful_shutdown=max(1, round(timeouts.drain_s)),
        )


class QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers: ours say what a first and a second signal mean."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def on_signals(handlers: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Call functions in the event loop when signals come. A fault in one is logged."""
    loop = asyncio.get_running_loop()

    def call(handler: Callable[[], None]) -> None:
        try:
            handler()
        except Exception:
            logger.exception("a signal was not obeyed")

    for number, handler in handlers.items():
        loop.add_signal_handler(number, call, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


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


def listening_socket(host: str, port: int, backlog: int, share_port: bool = False) -> socket.socket:
    """A socket that listens. `share_port`: other processes listen on the same port.

    Raises ConfigError in one line when the address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # Accepted sockets inherit it: tokens must not wait for acknowledgements of the ones before.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
        # Listening at once makes a second gateway on this port fail here and not later.
        sock.listen(backlog)
    except (OSError, OverflowError) as exc:
        sock.close()
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from exc
    return sock


def calm_collector() -> None:
    """For a process that serves from now on: leave what was loaded out of garbage collections, and make them rare.

    Requests leave no cycles behind, so that the collector finds next to nothing; at its default of 700 allocations
    it ran several times in every request and took a fifth of its time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def every(seconds: float, what: Callable[[], None]) -> None:
    """Call something again and again; a fault in it is logged and does not end the series."""
    while True:
        await asyncio.sleep(seconds)
        try:
            what()
        except Exception:
            logger.exception("maintenance failed")
