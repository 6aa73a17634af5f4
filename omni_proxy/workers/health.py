"""Asks one worker whether it lives: one GET a second or so, for hundreds of workers, beside the scheduler.

On the relay's own connections, kept open, because a GET by httpx costs ten times as much.
"""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import urlsplit

from omni_proxy.messages import Failure
from omni_proxy.tls import ClientFiles, ClientTls, TlsError
from omni_proxy.workers.answer import Head
from omni_proxy.workers.http import Ticket, WorkerPool

_IDLE_S: Final = 4.0
"""Shorter than engines keep idle connections."""
_HEALTH: Final = "/health"
_MODELS: Final = "/v1/models"
"""Every OpenAI server has it; some have no `/health` (llama-cpp-python)."""


class _Answer:
    """Waits for the end of an answer; its body is not kept."""

    def __init__(self, outcome: asyncio.Future[int | Failure]) -> None:
        self._outcome = outcome
        self._status = 0

    def on_sent(self) -> None:
        return

    def on_head(self, head: Head) -> None:
        self._status = head.status

    def on_data(self, data: bytes) -> None:
        return

    def on_end(self) -> None:
        if not self._outcome.done():
            self._outcome.set_result(self._status)

    def on_failure(self, failure: Failure) -> None:
        if not self._outcome.done():
            self._outcome.set_result(failure)


class HealthCheck:
    """One worker's `/health`, or its `/v1/models` where it has none.

    Connections are opened when they are needed, and again after `close`.
    """

    def __init__(self, url: str, api_key: str | None, tls: ClientFiles | None) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._files = tls
        key = "" if api_key is None else f"authorization: Bearer {api_key}\r\n"
        self._head = f"host: {parts.netloc}\r\naccept: */*\r\n{key}\r\n"
        self._pool: WorkerPool | None = None

    async def fault(self, timeout_s: float) -> str | None:
        """Why the worker cannot be used, or None."""
        try:
            pool = self._connections()
        except TlsError as exc:
            return str(exc)
        pool.configure(_IDLE_S, 1, timeout_s)
        pool.expire()
        path = _HEALTH
        try:
            async with asyncio.timeout(timeout_s):
                found = await self._ask(pool, path)
                if found == 404:
                    path = _MODELS
                    found = await self._ask(pool, path)
        except TimeoutError:
            return f"no answer to {path} in time"
        if isinstance(found, Failure):
            return f"cannot be reached ({found.detail})"
        return None if found == 200 else f"{path} says {found}"

    async def _ask(self, pool: WorkerPool, path: str) -> int | Failure:
        outcome: asyncio.Future[int | Failure] = asyncio.get_running_loop().create_future()
        question = f"GET {path} HTTP/1.1\r\n{self._head}".encode("latin-1")
        ticket: Ticket = pool.request(question, _Answer(outcome))
        try:
            return await outcome
        finally:
            ticket.abort()  # nothing where it has ended

    def close(self) -> None:
        """Give up its connections."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def _connections(self) -> WorkerPool:
        if self._pool is None:
            tls = None if self._files is None else ClientTls(self._files)
            self._pool = WorkerPool(self._host, self._port, tls)
        return self._pool
