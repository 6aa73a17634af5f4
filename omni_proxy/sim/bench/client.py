"""Sends the requests of a workload at their instants (open loop) or so many at a time (closed loop), and listens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from omni_proxy.sim.bench.measure import Seen
from omni_proxy.sim.bench.prompts import Prompts
from omni_proxy.sim.bench.stream import StreamReader
from omni_proxy.sim.http.client import Exchange, HttpPool
from omni_proxy.sim.workload import SimRequest, Workload

REJECTED: Final = frozenset({429, 503})
_MAX_ERROR_BYTES: Final = 1 << 16
_MAX_WRITTEN_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """How a workload is sent. `concurrency` None: open loop."""

    model: str
    chat: bool
    stream: bool
    concurrency: int | None
    timeout_s: float
    speed: float = 1.0
    headers: str = ""
    ignore_eos: bool = True


class _Answer:
    """Listens to one answer."""

    __slots__ = ("_body", "_client", "_due", "_number", "_request", "_sent", "exchange", "reader", "status", "timer")

    def __init__(self, client: BenchClient, number: int, request: SimRequest, due: float) -> None:
        self._client = client
        self._number = number
        self._request = request
        self._due = due
        self._sent = client.now()
        self._body: list[bytes] = []
        self.status = 0
        self.reader = StreamReader()
        self.exchange: Exchange | None = None
        self.timer: asyncio.TimerHandle | None = None

    def on_head(self, status: int) -> None:
        self.status = status

    def on_data(self, data: bytes) -> None:
        if self.status == 200 and self._client.plan.stream:
            self.reader.feed(data, self._client.now())
        else:
            self._body.append(data)

    def on_end(self) -> None:
        reader = self.reader
        if self.status != 200:
            outcome = "rejected" if self.status in REJECTED else "error"
            self._ended(outcome, b"".join(self._body)[:_MAX_ERROR_BYTES].decode("utf-8", "replace")[:200])
            return
        if not self._client.plan.stream:
            reader.whole(b"".join(self._body), self._client.now())
        if reader.error is not None:
            self._ended("error", reader.error)
        elif not reader.done:
            self._ended("cut", "the stream ended without [DONE]")
        elif reader.first_at is None:
            self._ended("error", "an answer without content")
        else:
            self._ended("completed", "")

    def on_fault(self, fault: str) -> None:
        self._ended("cut" if self.status else "error", fault)

    def on_timeout(self) -> None:
        if self.exchange is not None:
            self.exchange.abort()
        self._ended("timeout", f"no end within {self._client.plan.timeout_s:g} s")

    def _ended(self, outcome: str, detail: str) -> None:
        if self.timer is not None:
            self.timer.cancel()
        reader = self.reader
        self._client.ended(
            Seen(
                number=self._number,
                due=self._due,
                sent=self._sent,
                ended=self._client.now(),
                status=self.status,
                outcome=outcome,
                detail=detail,
                prompt_tokens=self._request.prompt_tokens,
                first=reader.first_at,
                last=reader.last_at,
                completion_tokens=reader.completion_tokens,
                cached_tokens=reader.cached_tokens,
                chunks=reader.chunks,
            )
        )


class BenchClient:
    """One run of one workload against one server."""

    def __init__(self, pool: HttpPool, workload: Workload, prompts: Prompts, plan: BenchPlan) -> None:
        self.plan = plan
        self._pool = pool
        self._workload = workload
        self._prompts = prompts
        self._loop = asyncio.get_running_loop()
        self._zero = 0.0
        self._seen: list[Seen] = []
        self._written: dict[int, bytes] = {}
        self._done = asyncio.Event()
        self._left = len(workload.requests)
        self._followers: dict[int, list[int]] = {}
        self._path = "/v1/chat/completions" if plan.chat else "/v1/completions"
        self._queue = iter(range(0))
        self._on_progress: Callable[[int], None] = lambda left: None

    def now(self) -> float:
        """Seconds since the beginning of the run."""
        return time.perf_counter() - self._zero  # the loop's own clock counts milliseconds

    async def run(self, on_progress: Callable[[int], None] | None = None) -> list[Seen]:
        """Send everything; what was seen, in the workload's order."""
        if on_progress is not None:
            self._on_progress = on_progress
        self._write_ahead()
        self._zero = time.perf_counter()
        for number, request in enumerate(self._workload.requests):
            if request.after is not None:
                self._followers.setdefault(request.after, []).append(number)
        if self.plan.concurrency is None:
            feeder = self._loop.create_task(self._feed(), name="feed")
            await self._done.wait()
            await feeder
        else:
            firsts = [n for n, r in enumerate(self._workload.requests) if r.after is None]
            self._queue = iter(firsts)
            for _ in range(self.plan.concurrency):
                self._send_next()
            await self._done.wait()
        return sorted(self._seen, key=lambda seen: seen.number)

    def ended(self, seen: Seen) -> None:
        """A request has ended; those that waited for it get their turn."""
        self._seen.append(seen)
        self._left -= 1
        self._on_progress(self._left)
        followers = self._followers.pop(seen.number, ())
        for number in followers:
            wait = self._workload.requests[number].arrival_s / self.plan.speed
            due = self.now() + wait
            self._loop.call_later(wait, self._send, number, due)
        if self.plan.concurrency is not None and not followers:
            self._send_next()
        if self._left == 0:
            self._done.set()

    def _write_ahead(self) -> None:
        """Write bodies before the clock starts, as many as may be kept: to write one takes milliseconds."""
        kept = 0
        for number in range(len(self._workload.requests)):
            self._written[number] = self._write(number)
            kept += len(self._written[number])
            if kept > _MAX_WRITTEN_BYTES:
                return

    async def _feed(self) -> None:
        """Open loop: every request at its instant, whatever became of the others."""
        requests = self._workload.requests
        for number, request in enumerate(requests):
            if request.after is not None:
                continue
            due = request.arrival_s / self.plan.speed
            body = self._body(number)  # before it is due
            if (wait := due - self.now()) > 0:
                await asyncio.sleep(wait)
            self._send(number, due, body)

    def _send_next(self) -> None:
        number = next(self._queue, None)
        if number is not None:
            body = self._body(number)
            self._send(number, self.now(), body)

    def _send(self, number: int, due: float, body: bytes | None = None) -> None:
        body = self._body(number) if body is None else body
        answer = _Answer(self, number, self._workload.requests[number], due)
        answer.timer = self._loop.call_later(self.plan.timeout_s, answer.on_timeout)
        answer.exchange = self._pool.request("POST", self._path, body, answer, self.plan.headers)

    def _body(self, number: int) -> bytes:
        written = self._written.pop(number, None)
        return self._write(number) if written is None else written

    def _write(self, number: int) -> bytes:
        plan, request = self.plan, self._workload.requests[number]
        fields = {
            "model": plan.model,
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            **self._prompts.body(request, number, plan.chat),
        }
        if plan.ignore_eos:
            fields["ignore_eos"] = True
        if plan.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if request.priority:
            fields["priority"] = request.priority
        return msgspec.json.encode(fields)


async def send_all(url: str, workload: Workload, prompts: Prompts, plan: BenchPlan) -> list[Seen]:
    """Send a workload to a server. Raises ValueError for a URL that names none."""
    pool = HttpPool(url)
    try:
        return await BenchClient(pool, workload, prompts, plan).run()
    finally:
        await pool.close()
