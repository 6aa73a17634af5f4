"""Starts processes of ours, watches them, starts them again, and ends them.

Two pipes tie a child to its launcher: one on which it says that it serves, and one that it reads until the launcher's
death closes it. So nothing is left behind, whoever dies first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

START_LIMIT_S: Final = 120.0
BACKOFF_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
STABLE_S: Final = 30.0
"""A process that lived this long starts again without delay."""
TERM_LIMIT_S: Final = 8.0
"""From SIGTERM to SIGKILL, unless told otherwise: more than a worker's own drain."""
_LAST_WORDS_S: Final = 1.0
"""For so long the stderr of a child that was ended is read on: its own children may hold it open."""
_KEPT_LINES: Final = 20


@dataclass(frozen=True, slots=True)
class ProcessPlan:
    """What to start: a name, a role, and the arguments behind `omni-proxy`."""

    name: str
    role: str
    arguments: tuple[str, ...]
    shows_output: bool = False
    """Its standard output is ours; otherwise nobody sees it."""


class Ready(msgspec.Struct):
    """What a child says when it serves."""

    host: str
    port: int
    pid: int
    side_channel_port: int | None = None


class StartFailed(Exception):
    """A process could not start; the text is its own last line."""


class Report:
    """Where a launcher tells what happens; all calls come from the event loop."""

    def __init__(
        self,
        starting: Callable[[ProcessPlan], None],
        serving: Callable[[ProcessPlan, Ready, float], None],
        lost: Callable[[ProcessPlan, str], None],
    ) -> None:
        self.starting = starting
        self.serving = serving
        self.lost = lost


class Launcher:
    """Some processes that live and end together."""

    def __init__(self, plans: Sequence[ProcessPlan], report: Report, term_limit_s: float = TERM_LIMIT_S) -> None:
        self._plans = plans
        self._report = report
        self._term_limit_s = term_limit_s
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._serving: set[str] = set()

    async def run(self) -> None:
        """Keep all processes running until cancelled; then end them, politely at first, and return when all are gone.

        Raises StartFailed when one cannot start the first time.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for plan in self._plans:
                    group.create_task(self._keep(plan), name=f"keep {plan.name}")
        except* StartFailed as failures:
            raise failures.exceptions[0] from None

    def allow(self, term_limit_s: float) -> None:
        """From now on, give processes this long from SIGTERM to SIGKILL."""
        self._term_limit_s = term_limit_s

    def signal(self, number: int, serving_only: bool = False) -> None:
        """Send a signal to every process that runs, or only to those that have said that they serve."""
        for name, process in self._processes.items():
            if serving_only and name not in self._serving:
                continue
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    async def _keep(self, plan: ProcessPlan) -> None:
        failures = 0
        first = True
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            self._report.starting(plan)
            reason, served = await self._run_once(plan, begun)
            if first and not served:
                raise StartFailed(f"{plan.name}: {reason}")
            first = False
            failures = 0 if loop.time() - begun > STABLE_S else failures + 1
            self._report.lost(plan, reason)
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)] if failures else 0.0)

    async def _run_once(self, plan: ProcessPlan, begun: float) -> tuple[str, bool]:
        """One life of a process: why it ended, and whether it served."""
        ready_read, ready_write = os.pipe()
        parent_read, parent_write = os.pipe()
        try:
            process = await self._spawn(plan, ready_write, parent_read)
        finally:
            os.close(ready_write)
            os.close(parent_read)
        self._processes[plan.name] = process
        assert process.stderr is not None
        tail = asyncio.create_task(_pass_on(process.stderr), name=f"stderr of {plan.name}")
        try:
            ready = await _read_ready(ready_read)
            if ready is not None:
                self._serving.add(plan.name)
                self._report.serving(plan, ready, asyncio.get_running_loop().time() - begun)
            code = await process.wait()
            lines = await tail
        except asyncio.CancelledError:
            # Its pipe stays open, and what it says is passed on, until it has ended: else it takes us for dead.
            # A task of its own, because a time limit within one that was cancelled is no TimeoutError in Python 3.11.2.
            await asyncio.create_task(_end(process, self._term_limit_s), name=f"end {plan.name}")
            await asyncio.wait((tail,), timeout=_LAST_WORDS_S)
            raise
        finally:
            os.close(parent_write)
            tail.cancel()
            self._serving.discard(plan.name)
            self._processes.pop(plan.name, None)
        return _why(code, lines), ready is not None

    async def _spawn(self, plan: ProcessPlan, ready_fd: int, parent_fd: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "omni_proxy",
            *plan.arguments,
            f"--ready-fd={ready_fd}",
            f"--parent-fd={parent_fd}",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=None if plan.shows_output else asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(ready_fd, parent_fd),
            # Ctrl-C in a terminal reaches the whole foreground group: children are ended by us, in order.
            start_new_session=True,
        )


async def _read_ready(fd: int) -> Ready | None:
    """A child's word that it serves; None when it ended, or took too long, without a word."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
    )
    try:
        async with asyncio.timeout(START_LIMIT_S):
            line = await reader.readline()
        return msgspec.json.decode(line, type=Ready) if line else None
    except (TimeoutError, msgspec.MsgspecError):
        return None
    finally:
        transport.close()


async def _pass_on(stream: asyncio.StreamReader) -> list[str]:
    """Copy a child's stderr to ours; keep its last lines."""
    kept: list[str] = []
    while line := await stream.readline():
        text = line.decode("utf-8", "replace").rstrip()
        kept = [*kept[1 - _KEPT_LINES :], text]
        sys.stderr.write(text + "\n")
    return kept


async def _end(process: asyncio.subprocess.Process, limit_s: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(limit_s):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _why(code: int, lines: Sequence[str]) -> str:
    how = f"ended by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"{how}: {lines[-1]}" if lines and code > 0 else how
