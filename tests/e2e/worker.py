"""One `omni-proxy worker` as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def worker(*arguments: str) -> AsyncIterator[str]:
    """Start a worker on a free port; gives its address, ends it by SIGTERM."""
    async with worker_process(*arguments) as (url, _):
        yield url


@contextlib.asynccontextmanager
async def worker_process(*arguments: str) -> AsyncIterator[tuple[str, int]]:
    """... gives its address and its pid."""
    read, write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "omni_proxy", "worker", *arguments, f"--ready-fd={write}"), pass_fds=(write,)
    )
    os.close(write)
    try:
        with os.fdopen(read, "rb") as pipe:
            line = await asyncio.wait_for(asyncio.to_thread(pipe.readline), 90)
        ready = json.loads(line)
        yield f"http://{ready['host']}:{ready['port']}", ready["pid"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        async with asyncio.timeout(30):
            await process.wait()
