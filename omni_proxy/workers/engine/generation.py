"""One API call while it runs: the engine requests it became, their outputs, and their end.

The engine speaks from its own thread; `Inbox` brings its words onto the event loop. Everything else here runs on the
loop. A call ends exactly once, in `Generation.close`, which aborts what still runs and releases KV that nobody was
told about. Knows nothing of HTTP or JSON.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from omni_proxy.workers.engine.choice import Choice, Delta
from omni_proxy.workers.engine.types import Emit, EngineRequest, EngineStats, FinishReason, Output


class EngineFacts(Protocol):
    """What an engine says about itself once its model is loaded."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def side_channel_port(self) -> int: ...


class EngineApi(Protocol):
    """The part of the engine that the server uses. All methods may be called from the event loop's thread."""

    @property
    def info(self) -> EngineFacts: ...
    @property
    def alive(self) -> bool: ...
    def submit(self, request: EngineRequest, emit: Emit) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def release(self, request_id: str) -> None: ...
    def stats(self) -> EngineStats: ...
    @property
    def asleep(self) -> bool: ...
    def reset_prefix_cache(self) -> bool: ...
    def sleep(self) -> bool: ...
    def wake_up(self) -> bool: ...
    def kv_event_sources(self) -> list[dict[str, Any]]: ...


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


class Inbox:
    """Carries outputs from the engine's thread to the event loop, with one wake-up per burst."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._posted: deque[tuple[Callable[[Output], None], Output]] = deque()
        self._woken = False

    def post(self, take: Callable[[Output], None], output: Output) -> None:
        """Have `take(output)` called on the loop soon; from any thread. Dropped once the loop is closed."""
        self._posted.append((take, output))
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                return  # the loop is closed: the process is ending and every client is gone

    def _deliver(self) -> None:
        self._woken = False  # first, so that a post during the loop below wakes again
        while self._posted:
            take, output = self._posted.popleft()
            take(output)


class Generation:
    """The engine requests of one API call, from submission to the end of the last one."""

    def __init__(self, engine: EngineApi, inbox: Inbox) -> None:
        self._engine = engine
        self._inbox = inbox
        self._live: dict[str, Choice] = {}
        self._arrived: list[Output] = []
        self._wake = asyncio.Event()
        self._gone = False
        self._stopping: str | None = None
        self._untold: list[str] = []
        """Ids of finished prefill legs whose handoff has not reached the client."""

    def start(self, choices: Sequence[Choice]) -> None:
        """Submit every choice; raises the engine's InvalidRequest or, once that has stopped, RuntimeError."""
        self.raise_if_gone()
        for choice in choices:
            request = choice.request
            self._live[request.request_id] = choice
            self._engine.submit(request, lambda output: self._inbox.post(self._take, output))

    async def deltas(self) -> list[tuple[Choice, Delta]]:
        """Wait for news, then everything that has come since; empty once all choices have ended.

        Raises ClientGone as soon as the client has left.
        """
        while self._live and not (self._arrived or self._gone or self._stopping):
            self._wake.clear()
            await self._wake.wait()
        self.raise_if_gone()
        arrived, self._arrived = self._arrived, []
        news = [self._apply(output) for output in arrived]
        if self._stopping:
            news += self._stop_all(self._stopping)
        return [item for item in news if item is not None]

    @property
    def ended(self) -> bool:
        """Whether no choice is running any more."""
        return not self._live

    def client_gone(self) -> None:
        """Called when the connection is closed: ends the engine's work now."""
        self._gone = True
        self._abort_live()
        self._wake.set()

    def stop(self, reason: str) -> None:
        """Called when the worker shuts down: every running choice ends with this error."""
        self._stopping = reason
        self._wake.set()

    def raise_if_gone(self) -> None:
        """Raise ClientGone if the connection is closed."""
        if self._gone:
            raise ClientGone

    def told(self) -> None:
        """The answer is out: KV that was kept for a pull is now the client's business, unless it has left."""
        if not self._gone:
            self._untold.clear()

    def close(self) -> None:
        """End whatever has not ended and release KV that nobody was told about. Safe to call twice."""
        self._abort_live()
        for request_id in self._untold:
            self._engine.release(request_id)
        self._untold.clear()
        arrived, self._arrived = self._arrived, []
        for output in arrived:
            self._release_late(output)

    def _take(self, output: Output) -> None:
        if output.request_id in self._live:
            self._arrived.append(output)
            self._wake.set()
        else:
            self._release_late(output)  # it finished while it was being aborted

    def _apply(self, output: Output) -> tuple[Choice, Delta] | None:
        choice = self._live.get(output.request_id)
        if choice is None:  # cut by a stop string earlier in this batch
            self._release_late(output)
            return None
        delta = choice.feed(output)
        if choice.finish_reason is not None:
            self._finish(choice, output)
        return choice, delta

    def _finish(self, choice: Choice, output: Output) -> None:
        request_id = choice.request.request_id
        del self._live[request_id]
        if output.finish_reason is None:
            self._engine.abort(request_id)
        elif choice.handoff is not None:
            self._untold.append(request_id)
        else:
            self._release_late(output)

    def _release_late(self, output: Output) -> None:
        if output.handoff is not None:
            self._engine.release(output.request_id)

    def _stop_all(self, reason: str) -> list[tuple[Choice, Delta] | None]:
        live = list(self._live.values())
        self._abort_live()
        for choice in live:
            choice.finish_reason = FinishReason.ABANDONED.value
        return [(c, Delta(c.index, finish_reason=c.finish_reason, error=reason)) for c in live]

    def _abort_live(self) -> None:
        for request_id in self._live:
            self._engine.abort(request_id)
        self._live.clear()
