"""`processes: N`: starts one scheduler and N fronts on one port, and keeps them running.

Fronts are stopped before the scheduler, because finishing what runs needs it. A child that dies is started again: a
front's clients are gone with it, a scheduler's requests go on in the fronts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from omni_proxy.api.serving import listening_socket, on_signals, stop_signals
from omni_proxy.config import Config, ConfigError, Listen
from omni_proxy.launcher import Launcher, ProcessPlan, Ready, Report, StartFailed
from omni_proxy.parts import check_usable
from omni_proxy.processes.run_dir import RunDir
from omni_proxy.reload import Reloads, reload_whenever

logger = logging.getLogger(__name__)

MARGIN_S = 5.0
"""From the end of a drain to SIGKILL."""


async def supervise(config: Config, path: Path, log_level: str) -> None:
    """Serve until SIGTERM or SIGINT. Raises ConfigError when the port or a child cannot be had.

    SIGHUP loads the file again and hands it to the children, SIGUSR1 has the access log opened again.
    """
    with _reserved_port(config) as port, tempfile.TemporaryDirectory(prefix="omni-proxy-") as folder:
        run_dir = RunDir(Path(folder))
        listen = config.listen.model_copy(update={"port": port})
        run_dir.write_config(config.model_copy(update={"listen": listen}))
        reloading = _Reloading(Reloads(path, config, check_usable), run_dir, listen)
        with stop_signals() as (stop, force):
            await _run(config, reloading, log_level, stop, force)


class _Reloading:
    """Hands a config that was loaded again to the children."""

    def __init__(self, reloads: Reloads, run_dir: RunDir, listen: Listen) -> None:
        self.reloads = reloads
        self.run_dir = run_dir
        self._listen = listen

    def apply(self, config: Config | None, scheduler: Launcher, fronts: Launcher) -> None:
        """Leave it where they look, and tell those that serve; the others look there when they start."""
        self.run_dir.write_reloads(self.reloads.generation, self.reloads.failed)
        if config is not None:
            self.run_dir.write_config(config.model_copy(update={"listen": self._listen}))
            fronts.allow(config.timeouts.drain_s + MARGIN_S)
        for launcher in (scheduler, fronts):
            launcher.signal(signal.SIGHUP, serving_only=True)

    def serves(self, pid: int) -> None:
        """A child serves from now on; the config may have changed after it read it."""
        if self.reloads.generation > 1:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGHUP)


async def _run(
    config: Config, reloading: _Reloading, log_level: str, stop: asyncio.Event, force: asyncio.Event
) -> None:
    common = (f"--dir={reloading.run_dir.folder}", f"--log-level={log_level}")
    report = _report(reloading.serves)
    scheduler = Launcher([ProcessPlan("scheduler", "scheduler", ("_scheduler", *common))], report)
    plans = [
        ProcessPlan(f"front-{i}", "front", ("_front", *common, f"--slot={i}"), True) for i in range(config.processes)
    ]
    fronts = Launcher(plans, report, config.timeouts.drain_s + MARGIN_S)
    asked = asyncio.Event()
    handlers = {
        signal.SIGHUP: asked.set,
        signal.SIGUSR1: lambda: fronts.signal(signal.SIGUSR1, serving_only=True),
    }
    with on_signals(handlers):
        reloads = reload_whenever(asked, reloading.reloads, lambda new: reloading.apply(new, scheduler, fronts))
        following = asyncio.create_task(reloads, name="reloads")
        try:
            await _keep_running(scheduler, fronts, stop, force)
        finally:
            following.cancel()


async def _keep_running(scheduler: Launcher, fronts: Launcher, stop: asyncio.Event, force: asyncio.Event) -> None:
    tasks = [asyncio.create_task(launcher.run()) for launcher in (scheduler, fronts)]
    stopping = asyncio.create_task(stop.wait())
    forcing = asyncio.create_task(_force(force, fronts))
    try:
        await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in reversed(tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await _raise_start_failure(task)
        stopping.cancel()
        forcing.cancel()


async def _force(force: asyncio.Event, fronts: Launcher) -> None:
    """A second signal to us is a second signal to them."""
    await force.wait()
    fronts.signal(15)


async def _raise_start_failure(task: asyncio.Task[None]) -> None:
    try:
        await task
    except StartFailed as exc:
        raise ConfigError(str(exc)) from exc


def _report(serves: Callable[[int], None]) -> Report:
    def starting(plan: ProcessPlan) -> None:
        logger.info("%s: starting", plan.name)

    def serving(plan: ProcessPlan, ready: Ready, seconds: float) -> None:
        logger.info("%s: ready after %.1f s (pid %d)", plan.name, seconds, ready.pid)
        serves(ready.pid)

    def lost(plan: ProcessPlan, reason: str) -> None:
        logger.warning("%s: %s; starting it again", plan.name, reason)

    return Report(starting, serving, lost)


@contextlib.contextmanager
def _reserved_port(config: Config) -> Iterator[int]:
    """The port to listen on, held by a socket that shares it but takes no connections."""
    listen = config.listen
    # Without sharing first: a port that another gateway uses must fail here.
    with listening_socket(listen.host, listen.port, 1) as probe:
        port = probe.getsockname()[1]
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((listen.host, port))
        yield port
