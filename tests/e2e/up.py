"""`omni-proxy up` as a user starts it: a process of its own, its output read line by line."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path

START_LIMIT_S = 90.0


class Up:
    """A running `omni-proxy up`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        self._changed = asyncio.Event()

    async def read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            self.lines.append(line.decode().rstrip())
            self._changed.set()
        self.lines.append("<end>")
        self._changed.set()

    async def line(self, pattern: str, after: int = 0) -> str:
        """The first line that matches, waiting for it."""
        async with asyncio.timeout(START_LIMIT_S):
            while True:
                for line in self.lines[after:]:
                    if re.search(pattern, line):
                        return line
                assert "<end>" not in self.lines, f"ended without {pattern!r}: {self.lines}"
                self._changed.clear()
                await self._changed.wait()

    @property
    def worker_pids(self) -> dict[str, int]:
        """The last pid that was told for each worker."""
        found = {}
        for line in self.lines:
            if match := re.match(r"(\S+): ready on .*\(pid (\d+)\)", line):
                found[match[1]] = int(match[2])
        return found

    @property
    def worker_urls(self) -> dict[str, str]:
        found = {}
        for line in self.lines:
            if match := re.match(r"(\S+): ready on (\S+) ", line):
                found[match[1]] = f"http://{match[2]}"
        return found


@contextlib.asynccontextmanager
async def up(*arguments: str, environment: dict[str, str] | None = None) -> AsyncIterator[Up]:
    """Start it on a free port; end it by SIGTERM, and insist that this works."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "omni_proxy", "up", "--port", "0", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
    )
    running = Up(process)
    reader = asyncio.create_task(running.read())
    try:
        running.url = (await running.line(r"Omni Proxy is ready: (\S+)")).split()[4]
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        async with asyncio.timeout(40):
            await process.wait()
        await reader


def is_alive(pid: int) -> bool:
    """Does a process run (a zombie does not)?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
