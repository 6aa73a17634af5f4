"""Calls that operators make to workers through the gateway: sleep, wake up, pause, resume, forget prefixes.

Each chosen worker is called on its own, and what came of it is told for each. One that sleeps or is paused gets no
work: it is taken out before the call and comes back when it was woken. Knows no routes and no clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final, Protocol

import httpx
from msgspec import Struct

from omni_proxy.messages import Role
from omni_proxy.tls import TlsError

TAKES_OUT: Final = frozenset({"/sleep", "/pause"})
BRINGS_BACK: Final = frozenset({"/wake_up", "/resume"})
CONTROLS: Final = TAKES_OUT | BRINGS_BACK | {"/reset_prefix_cache"}
CALL_S: Final = 120.0
"""Waking up loads weights."""
_SHOWN_BYTES: Final = 4096


class ControlResult(Struct, frozen=True):
    """What came of one worker's call. `status` None: there was no answer."""

    worker: str
    role: Role
    ok: bool
    status: int | None
    body: str


class Controlled(Protocol):
    """A worker that can be called, and taken out."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> Role: ...
    async def ask(self, path: str, query: str, body: bytes, timeout_s: float) -> httpx.Response: ...
    def hold(self, reason: str) -> None:
        """Give it no work until `let_go`."""
        ...

    def let_go(self) -> None: ...


async def control(workers: Iterable[Controlled], path: str, query: str, body: bytes) -> list[ControlResult]:
    """Call the same on all of them at once; results in their order."""
    return list(await asyncio.gather(*(_one(worker, path, query, body) for worker in workers)))


async def _one(worker: Controlled, path: str, query: str, body: bytes) -> ControlResult:
    if path in TAKES_OUT:
        worker.hold(f"{path.removeprefix('/')} was asked for")
    status, shown = None, ""
    try:
        answer = await worker.ask(path, query, body, CALL_S)
        status, shown = answer.status_code, answer.text[:_SHOWN_BYTES]
    except httpx.TimeoutException:
        shown = f"no answer within {CALL_S:g} s"
    except (httpx.HTTPError, TlsError) as exc:
        shown = f"cannot be reached ({type(exc).__name__})"
    ok = status is not None and 200 <= status < 300
    awake = ok if path in BRINGS_BACK else not ok and path in TAKES_OUT
    if awake:
        worker.let_go()
    return ControlResult(worker.name, worker.role, ok, status, shown)
