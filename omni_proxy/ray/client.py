"""The gateway's side of the process that places workers: starts it, hears it, starts it again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Final

import msgspec

from omni_proxy.ray.pools import Plan
from omni_proxy.ray.wire import Fault, Message, Serving

BACKOFF_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
STOP_LIMIT_S: Final = 20.0
"""For workers to end and to be taken off the cluster."""


class PlacementFailed(Exception):
    """The workers could not be placed, or one could not start; the text says why."""


class PlacerClient:
    """Workers of one plan, for as long as `run` does."""

    def __init__(self, plan: Plan, hear: Callable[[Message], None], say: Callable[[str], None]) -> None:
        self._plan = plan
        self._hear = hear
        self._say = say
        self._served = False
        """Has a worker served? From then on, faults are waited out."""

    async def run(self) -> None:
        """Until cancelled; the workers end with it. Raises PlacementFailed while none has served yet."""
        failures = 0
        while True:
            fault = await self._run_once()
            if not self._served:
                raise PlacementFailed(fault)
            self._say(f"The process that places workers has ended ({fault}); starting it again. Workers run on.")
            await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
            failures += 1

    async def _run_once(self) -> str:
        """One life of the process: why it ended."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "omni_proxy.ray.placer"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={"RAY_USAGE_STATS_ENABLED": "0", **os.environ},
            limit=1 << 20,
            start_new_session=True,  # Ctrl-C in a terminal is ours to hear, the workers drain first
        )
        assert process.stdin is not None
        assert process.stdout is not None
        fault = "it was killed"
        try:
            process.stdin.write(msgspec.json.encode(self._plan) + b"\n")
            while line := await process.stdout.readline():
                message = msgspec.json.decode(line, type=Message)
                if isinstance(message, Fault):
                    fault = message.reason
                else:
                    self._take(message)
            await process.wait()
        finally:
            await _end(process)
        return fault

    def _take(self, message: Message) -> None:
        self._served = self._served or isinstance(message, Serving)
        self._hear(message)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(STOP_LIMIT_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
