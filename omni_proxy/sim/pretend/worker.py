"""The pretending worker: takes calls, runs them on the simulated engine, and writes its answers as time passes."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from omni_proxy.sim.engine import Engine
from omni_proxy.sim.http.server import Incoming, Reply, chunked
from omni_proxy.sim.job import Job, Where
from omni_proxy.sim.notices import Notice, Notices
from omni_proxy.sim.pretend.answers import DONE
from omni_proxy.sim.pretend.block_runs import block_runs
from omni_proxy.sim.pretend.calls import CHAT, COMPLETIONS, Call, read_call
from omni_proxy.sim.pretend.clock import EngineClock
from omni_proxy.sim.pretend.holds import Holds
from omni_proxy.sim.pretend.metrics import PretendMetrics
from omni_proxy.sim.pretend.options import PretendOptions
from omni_proxy.sim.pretend.peers import KvGone, Peers
from omni_proxy.workers.engine.kv_params import handoff_params
from omni_proxy.workers.engine.openai_api import ApiError
from omni_proxy.workers.engine.types import Handoff

logger = logging.getLogger(__name__)

GENERATING: Final = frozenset({CHAT, COMPLETIONS})
_HANDED_BLOCKS: Final = 4
"""Blocks named in a handoff: their numbers mean nothing here, so there need not be thousands."""


class Events(Protocol):
    """Where stored and evicted blocks are told; see `kv_events`."""

    def stored(self, keys: Sequence[int], parent: int | None, tokens: Sequence[int]) -> None: ...

    def removed(self, keys: Sequence[int]) -> None: ...

    def cleared(self) -> None: ...

    def sources(self) -> list[dict[str, Any]]: ...


@dataclass(slots=True)
class _Running:
    """A call at work."""

    call: Call
    reply: Reply
    arrived: float
    """In simulated seconds."""
    made: int = 0
    pulling: asyncio.Task[None] | None = None


class PretendWorker:
    """One worker; lives on one event loop."""

    def __init__(self, options: PretendOptions, address: tuple[str, int], events: Events | None = None) -> None:
        self.options = options
        self._address = address
        """Where others reach it: what it writes into a handoff."""
        self._events = events
        model = options.model
        self.engine = Engine(model, options.max_seqs, options.block_size, self._stored, self._removed, every_token=True)
        self.clock = EngineClock(self.engine, options.speed, self._hear)
        self.metrics = PretendMetrics(self.engine, options.served_model_name[0], model.kv_bytes_per_token)
        self.holds = Holds()
        self.draining = False
        self._peers = Peers()
        self._runs: dict[Job, _Running] = {}
        self._link_free = 0.0
        self._serial = 0
        self._group: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------- calls

    def generate(self, incoming: Incoming) -> None:
        """One of the generating routes. Raises ApiError before the answer has begun."""
        if self.draining:
            raise ApiError(503, "the worker is shutting down")
        self._serial += 1
        given = incoming.headers.get(b"x-request-id", b"").decode("latin-1")
        rid = f"{given or uuid.uuid4().hex}-{self._serial:x}"
        call = read_call(incoming.path, incoming.body, rid, self._serial, int(time.time()), self.options)
        if not self.engine.can_ever_hold(call.job):
            raise ApiError(400, "the request is larger than the whole KV cache", "prompt")
        run = _Running(call, incoming.reply, self.clock.now())
        call.job.tag = run
        self._runs[call.job] = run
        incoming.reply.on_gone = lambda: self._client_gone(run)
        self.clock.submit(call.job)

    def kv_event_sources(self) -> list[dict[str, Any]]:
        """Where blocks are told; nowhere if they are not."""
        return [] if self._events is None else self._events.sources()

    def busy(self) -> int:
        """Calls at work."""
        return len(self._runs)

    def stop_all(self) -> None:
        """End what still runs with an error that its client can read."""
        for run in list(self._runs.values()):
            self._fail(run, 503, "the worker is shutting down")

    def reset_cache(self) -> bool:
        """Forget cached blocks; what is in use stays."""
        self.engine.cache.clear()
        if self._events is not None:
            self._events.cleared()
        return True

    def release(self, name: str) -> bool:
        """Free held KV; False where none is held under the name."""
        job = self.holds.take(name)
        if job is None or job.where is not Where.HELD:
            return False
        self.metrics.held -= 1
        self.clock.release(job)
        return True

    async def close(self) -> None:
        """No more steps, no more transfers."""
        self.clock.close()
        for task in list(self._group):
            task.cancel()
        await self._peers.close()

    # ----------------------------------------------------------------- the engine tells

    def _hear(self, notices: Notices) -> None:
        for notice, job in notices:
            run = job.tag
            assert isinstance(run, _Running)
            if notice is Notice.TOKEN:
                self._token(run, job)
            elif notice is Notice.FIRST:
                self._first(run, job)
            elif notice is Notice.FINISHED:
                self._finished(run, job)
            elif notice is Notice.PREFILLED:
                self._prefilled(run, job)
            else:
                self._pull(run, job)

    def _first(self, run: _Running, job: Job) -> None:
        self.metrics.ttft.observe(self.clock.now() - run.arrived)
        if run.call.answer.stream:
            run.reply.begin_stream()
            first = run.call.answer.first_chunk()
            if first:
                run.reply.write(first)
        self._token(run, job)

    def _token(self, run: _Running, job: Job) -> None:
        run.made += 1
        # The last token goes out with the reason why the answer ends.
        if run.call.answer.stream and run.made < job.output_tokens:
            run.reply.write(run.call.answer.token)

    def _finished(self, run: _Running, job: Job) -> None:
        answer = run.call.answer
        answer.cached_tokens = job.cached_tokens
        self._ended(run, "length")
        if answer.stream:
            run.reply.end_stream(answer.last_chunks(run.made))
        else:
            run.reply.send(200, answer.whole(run.made))

    def _prefilled(self, run: _Running, job: Job) -> None:
        call, answer = run.call, run.call.answer
        self.metrics.held += 1
        self.holds.put(call.rid, job, None if call.room is None else call.room.number)
        self.clock.after(self.options.kv_lease_s, lambda: self._lease_ended(call.rid))
        answer.cached_tokens = job.cached_tokens
        if call.room is None:
            answer.kv_params = self._handoff(call)
        self._ended(run, "length")
        if answer.stream:
            run.reply.begin_stream()
            run.reply.end_stream(answer.first_chunk() + answer.last_chunks(1))
        else:
            run.reply.send(200, answer.whole(1))

    def _handoff(self, call: Call) -> dict[str, Any]:
        host, port = self._address
        blocks = tuple(range(min(_HANDED_BLOCKS, 1 + len(call.job.keys))))
        lease_s = self.options.kv_lease_s / self.options.speed
        job = call.job
        handoff = Handoff(host, call.rid, host, port, blocks, job.prompt_tokens, job.cached_tokens, lease_s)
        return handoff_params(handoff, time.time())

    def _lease_ended(self, name: str) -> None:
        if self.release(name):
            self.metrics.leases_expired += 1

    # ------------------------------------------------------------------------ transfers

    def _pull(self, run: _Running, job: Job) -> None:
        task = asyncio.create_task(self._fetch_kv(run, job), name=f"pull {job.rid}")
        run.pulling = task
        self._group.add(task)
        task.add_done_callback(self._group.discard)

    async def _fetch_kv(self, run: _Running, job: Job) -> None:
        try:
            host, port, name = await self._source(run.call)
            await self._transfer(job)
            await self._peers.release(host, port, name)
        except KvGone as exc:
            self.metrics.transfer_failures += 1
            self._fail(run, 500, str(exc))
            return
        self.metrics.transfers += 1
        self.clock.pulled(job)

    async def _source(self, call: Call) -> tuple[str, int, str]:
        if call.pull is not None:
            return call.pull.host, call.pull.port, call.pull.request_id
        assert call.room is not None
        room = call.room
        return room.host, room.port, await self._peers.await_room(room.host, room.port, room.number)

    async def _transfer(self, job: Job) -> None:
        """Spend the time of moving what is not here yet; one transfer after another over this worker's link."""
        model, now = self.options.model, self.clock.now()
        self._link_free = max(now, self._link_free) + model.transfer_s(job.target - job.cached_tokens)
        await asyncio.sleep((self._link_free + model.link_s - now) / self.options.speed)

    # ----------------------------------------------------------------------------- ends

    def _client_gone(self, run: _Running) -> None:
        if self._runs.pop(run.call.job, None) is None:
            return
        self._drop(run)
        self.metrics.ended("abort")

    def _fail(self, run: _Running, status: int, message: str) -> None:
        if self._runs.pop(run.call.job, None) is None:
            return
        self._drop(run)
        self.metrics.ended("error")
        error = ApiError(status, message).body()
        if run.reply.open:
            run.reply.end_stream(chunked(b"data: %b\n\n" % msgspec.json.encode(error)) + DONE)
        else:
            run.reply.send(status, msgspec.json.encode(error))

    def _drop(self, run: _Running) -> None:
        if run.pulling is not None and run.pulling is not asyncio.current_task():
            run.pulling.cancel()
        self.clock.abort(run.call.job)

    def _ended(self, run: _Running, reason: str) -> None:
        self._runs.pop(run.call.job, None)
        run.reply.on_gone = None
        self.metrics.ended(reason)
        self.metrics.e2e.observe(self.clock.now() - run.arrived)

    # -------------------------------------------------------------------------- blocks

    def _stored(self, job: Job, keys: list[int]) -> None:
        if self._events is None:
            return
        run = job.tag
        assert isinstance(run, _Running)
        size = self.options.block_size
        for begin, end in block_runs(job.keys, keys):
            parent = job.keys[begin - 1] if begin else None
            self._events.stored(job.keys[begin:end], parent, run.call.tokens[begin * size : end * size])

    def _removed(self, keys: list[int]) -> None:
        if self._events is not None:
            self._events.removed(keys)
