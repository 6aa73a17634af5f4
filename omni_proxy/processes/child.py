"""What both kinds of child processes do around their work: say that they serve, and end with their supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import uvloop

from omni_proxy.api.serving import calm_collector, listening_socket, on_signals, stop_signals
from omni_proxy.launcher import Ready
from omni_proxy.processes.front_process import FrontProcess
from omni_proxy.processes.run_dir import RunDir
from omni_proxy.processes.scheduler_process import SchedulerProcess


def run_scheduler(folder: Path, ready_fd: int, parent_fd: int) -> int:
    """The command `_scheduler`."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_scheduler(RunDir(folder), ready_fd, parent_fd))
    return 0


def run_front(folder: Path, ready_fd: int, parent_fd: int, slot: int) -> int:
    """The command `_front`. `slot`: which of the fronts it is, from 0 on."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_front(RunDir(folder), ready_fd, parent_fd, slot))
    return 0


async def _scheduler(run_dir: RunDir, ready_fd: int, parent_fd: int) -> None:
    for path in (run_dir.link, run_dir.app):
        path.unlink(missing_ok=True)
    with stop_signals() as (stop, _):
        watcher = await _end_with_parent(parent_fd, stop)
        process = SchedulerProcess(run_dir.read_config())
        process.scheduling.tallies.config_reloaded(*run_dir.read_reloads())
        process.scheduling.reload_by(lambda: os.kill(os.getppid(), signal.SIGHUP))  # the supervisor reads the file
        calm_collector()

        def reload() -> None:
            process.scheduling.tallies.config_reloaded(*run_dir.read_reloads())
            process.scheduling.configure(run_dir.read_config())

        with on_signals({signal.SIGHUP: reload}):
            serving = asyncio.create_task(process.serve(run_dir, stop))
            _say_ready(ready_fd, 0)
            await serving
        watcher.close()


async def _front(run_dir: RunDir, ready_fd: int, parent_fd: int, slot: int) -> None:
    config = run_dir.read_config()
    listen = config.listen
    with stop_signals() as (stop, force):
        watcher = await _end_with_parent(parent_fd, stop, force)
        process = FrontProcess(config, run_dir, slot)
        calm_collector()
        # Our part of the port's clients comes to us only once somebody can schedule them.
        linking = asyncio.create_task(process.keep_linked(), name="link")
        front = process.front
        handlers = {
            signal.SIGHUP: lambda: front.configure(run_dir.read_config()),
            signal.SIGUSR1: front.reopen_log,
        }
        try:
            await process.linked()
            with (
                on_signals(handlers),
                listening_socket(listen.host, listen.port, listen.backlog, share_port=True) as sock,
            ):
                _say_ready(ready_fd, listen.port)
                await process.serve(sock, stop, force)
        finally:
            linking.cancel()
            watcher.close()


def _say_ready(fd: int, port: int) -> None:
    with os.fdopen(fd, "wb") as pipe:
        pipe.write(msgspec.json.encode(Ready("", port, os.getpid())) + b"\n")


async def _end_with_parent(fd: int, *events: asyncio.Event) -> asyncio.BaseTransport:
    """Set events when the supervisor is gone: its death closes the pipe."""

    class Watch(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            for event in events:
                event.set()

    transport, _ = await asyncio.get_running_loop().connect_read_pipe(Watch, os.fdopen(fd, "rb", buffering=0))
    return transport
