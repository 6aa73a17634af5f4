"""A scripted engine and a server around it on a real socket, for tests that need no model."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn

from omni_proxy.prompts.chat_template import load_chat_template
from omni_proxy.workers.engine.calls import CallBuilder
from omni_proxy.workers.engine.generation import EngineApi
from omni_proxy.workers.engine.model_card import ModelCard
from omni_proxy.workers.engine.server import WorkerServer
from omni_proxy.workers.engine.server_metrics import ServerMetrics
from omni_proxy.workers.engine.text import ModelTokenizer
from omni_proxy.workers.engine.types import (
    Emit,
    EngineInfo,
    EngineRequest,
    EngineStats,
    FinishReason,
    Handoff,
    InvalidRequest,
    Output,
    TokenLogprob,
)

BLOCK_SIZE = 4
NUM_BLOCKS = 64
EOS = 0


def echo(request: EngineRequest) -> list[int]:
    """The default script: the prompt's tokens, over and over."""
    prompt = request.prompt_token_ids
    return [prompt[at % len(prompt)] for at in range(request.sampling.max_tokens)]


@dataclass
class _Run:
    request: EngineRequest
    emit: Emit
    tokens: list[int]
    at: int = 0


@dataclass
class FakeEngine:
    """Emits what `script` says, `per_step` tokens of every request per step, with the real engine's endings.

    While `gate` is clear nothing moves; a request that has `hold_at` tokens waits for it. `fail_at` is the number of
    tokens after which every request fails, `fail_as` how.
    """

    info: EngineInfo
    script: Callable[[EngineRequest], Sequence[int]] = echo
    per_step: int = 1
    fail_at: int | None = None
    fail_as: FinishReason = FinishReason.ERROR
    hold_at: int | None = None
    submitted: list[EngineRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    leased: set[str] = field(default_factory=set)
    generated: int = 0
    asleep: bool = False

    def __post_init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self._runs: dict[str, _Run] = {}
        self._news = threading.Condition()
        self._stop = False
        self._thread = threading.Thread(target=self._loop, daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.gate.set()
        with self._news:
            self._stop = True
            self._news.notify_all()
        self._thread.join()

    def reset(self) -> None:
        """As new, for the next test; counters go on."""
        self.script, self.per_step, self.fail_at, self.hold_at = echo, 1, None, None
        self.fail_as = FinishReason.ERROR
        self.submitted, self.aborted, self.released, self.leased = [], [], [], set()
        self._runs.clear()
        self.gate.set()

    def submit(self, request: EngineRequest, emit: Emit) -> None:
        blocks = -(-len(request.prompt_token_ids) // BLOCK_SIZE)
        if blocks > NUM_BLOCKS:
            raise InvalidRequest("prompt", f"needs {blocks} KV blocks, there are {NUM_BLOCKS}")
        with self._news:
            self.submitted.append(request)
            self._runs[request.request_id] = _Run(request, emit, list(self.script(request)))
            self._news.notify_all()

    def abort(self, request_id: str) -> None:
        with self._news:
            self.aborted.append(request_id)
            self._runs.pop(request_id, None)

    def take_over(self, request_id: str) -> Emit:
        """Have the test end a request instead of the script."""
        with self._news:
            return self._runs.pop(request_id).emit

    def finish(self, request: EngineRequest, emit: Emit) -> None:
        """End a request as a full prefill leg does."""
        done, handoff = FinishReason.LENGTH, self._handoff(request)
        emit(Output(request.request_id, (5,), None, done, 0, handoff))

    def release(self, request_id: str) -> None:
        self.released.append(request_id)
        self.leased.discard(request_id)

    def kv_event_sources(self) -> list[dict[str, Any]]:
        return []

    def reset_prefix_cache(self) -> bool:
        return not self._runs

    def sleep(self) -> bool:
        self.asleep = self.asleep or not self._runs
        return self.asleep

    def wake_up(self) -> bool:
        self.asleep = False
        return True

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._runs),
            waiting=0,
            blocks_total=NUM_BLOCKS,
            blocks_used=16,
            blocks_leased=len(self.leased),
            block_size=BLOCK_SIZE,
            block_bytes=1024,
            prompt_tokens_computed=sum(len(r.prompt_token_ids) for r in self.submitted),
            prompt_tokens_cached=3,
            prompt_tokens_pulled=5,
            generation_tokens=self.generated,
            prefix_queries=7,
            prefix_hits=3,
            preemptions=2,
            kv_bytes_sent=1024,
            kv_bytes_received=2048,
            kv_transfers=1,
            kv_transfer_failures=1,
            kv_leases_expired=4,
            expert_tokens=((1, 2), (3, 4)),
        )

    def _loop(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._runs or self._stop)
                if self._stop:
                    return
            self.gate.wait()
            for run in list(self._runs.values()):
                self._step(run)

    def _step(self, run: _Run) -> None:
        if self._runs.get(run.request.request_id) is not run:
            return  # it left, or belongs to the test before: its hold would be nobody's to lift
        if run.at == self.hold_at:
            self.gate.clear()
            self.gate.wait()
        sampling = run.request.sampling
        chunk: list[int] = []
        finish = None
        while len(chunk) < self.per_step and finish is None:
            if self.fail_at is not None and run.at >= self.fail_at:
                finish = self.fail_as
                break
            token = run.tokens[run.at]
            run.at += 1
            chunk.append(token)
            finish = self._finish(run, token)
        self.generated += len(chunk)
        if finish is not None:
            with self._news:
                if self._runs.pop(run.request.request_id, None) is None:
                    return
        logprobs = None
        if sampling.logprobs is not None:
            logprobs = tuple(_logprob(token, sampling.logprobs) for token in chunk)
        error = "the fake engine failed" if finish is FinishReason.ERROR else None
        handoff = self._handoff(run.request) if finish is FinishReason.LENGTH else None
        run.emit(Output(run.request.request_id, tuple(chunk), logprobs, finish, 2, handoff, error))

    def _finish(self, run: _Run, token: int) -> FinishReason | None:
        sampling = run.request.sampling
        stops = token in sampling.stop_token_ids or (token == EOS and not sampling.ignore_eos)
        if stops and run.at >= sampling.min_tokens:
            return FinishReason.STOP
        ended = run.at >= min(sampling.max_tokens, len(run.tokens))
        return FinishReason.LENGTH if ended else None

    def _handoff(self, request: EngineRequest) -> Handoff | None:
        if not request.keep_kv:
            return None
        tokens = len(request.prompt_token_ids)
        blocks = tuple(range(1, 1 - (-tokens // BLOCK_SIZE)))
        self.leased.add(request.request_id)
        return Handoff("E0", request.request_id, "127.0.0.1", 5601, blocks, tokens, 2, 30.0)


def _logprob(token: int, count: int) -> TokenLogprob:
    other = token - 1 if token else 1
    return TokenLogprob(token, -0.5, ((token, -0.5), (other, float("-inf")))[:count])


class LiveServer:
    """A worker's server in a thread of its own, on a port that the system chose."""

    def __init__(self, engine: EngineApi, folder: Path) -> None:
        self.engine = engine
        self.tokenizer = ModelTokenizer.load(folder)
        info = engine.info
        card = ModelCard(
            ("tiny", "alias"), str(folder), info.max_model_len, info.vocab_size, 1, eos_token_ids=info.eos_token_ids
        )
        self.builder = CallBuilder(card, self.tokenizer, load_chat_template(folder))
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        metrics = ServerMetrics(self.engine.stats, "tiny")
        self.server = WorkerServer(self.engine, self.builder, metrics)
        config = uvicorn.Config(self.server.app(), http="httptools", ws="none", lifespan="off", log_config=None)
        self._uvicorn = uvicorn.Server(config)
        self.loop.call_soon(self._ready.set)
        await self._uvicorn.serve(sockets=[self._sock])

    @contextmanager
    def serving(self) -> Iterator[LiveServer]:
        self._thread.start()
        self._ready.wait()
        try:
            yield self
        finally:
            self._uvicorn.force_exit = self._uvicorn.should_exit = True
            self._thread.join()
            self.builder.close()

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` on the server's loop."""
        self.loop.call_soon_threadsafe(function)
