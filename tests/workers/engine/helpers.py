"""What the engine's tests share: a caller that collects outputs, and small builders."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import torch

from omni_proxy.workers.engine.engine import Engine
from omni_proxy.workers.engine.types import (
    EngineConfig,
    EngineRequest,
    Handoff,
    Output,
    PullFrom,
    SamplingParams,
)

WAIT_S = 20.0


def prompt(length: int, seed: int = 0, vocab: int = 256) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab, (length,), generator=generator).tolist())


def greedy(max_tokens: int, **kwargs: Any) -> SamplingParams:
    return SamplingParams(max_tokens, temperature=0.0, **{"ignore_eos": True, **kwargs})


def request(request_id: str, tokens: Sequence[int], max_tokens: int = 8, **kwargs: Any) -> EngineRequest:
    sampling = kwargs.pop("sampling", None) or greedy(max_tokens)
    return EngineRequest(request_id, tuple(tokens), sampling, **kwargs)


class Call:
    """One submitted request and what came back."""

    def __init__(self, engine: Engine, asked: EngineRequest) -> None:
        self.queue: Queue[Output] = Queue()
        self.outputs: list[Output] = []
        self.engine = engine
        self.asked = asked
        engine.submit(asked, self.queue.put)

    def next(self) -> Output:
        self.outputs.append(self.queue.get(timeout=WAIT_S))
        return self.outputs[-1]

    def end(self) -> Output:
        """Wait for the last output."""
        while not self.outputs or self.outputs[-1].finish_reason is None:
            self.next()
        return self.outputs[-1]

    @property
    def tokens(self) -> list[int]:
        self.end()
        return [token for output in self.outputs for token in output.token_ids]


def generate(engine: Engine, request_id: str, tokens: Sequence[int], max_tokens: int = 8, **kw: Any) -> list[int]:
    call = Call(engine, request(request_id, tokens, max_tokens, **kw))
    last = call.end()
    assert last.error is None, last.error
    return call.tokens


def pull_from(handoff: Handoff | None, **changes: Any) -> PullFrom:
    assert handoff is not None
    fields = ("engine_id", "request_id", "host", "port", "block_ids", "num_tokens")
    return PullFrom(**{**{name: getattr(handoff, name) for name in fields}, **changes})


@contextmanager
def running(model: Path, **config: Any) -> Iterator[Engine]:
    """A started engine with blocks of 4 tokens unless `config` says otherwise; no block may be lost at its end."""
    engine = Engine(EngineConfig(str(model), **{"block_size": 4, "kv_cache_bytes": 1 << 20, "threads": 1, **config}))
    engine.start()
    try:
        yield engine
        until(lambda: engine.stats().running == engine.stats().waiting == 0)
    finally:
        engine.stop()
    engine._planner.check()


def until(holds: Callable[[], bool], what: str = "condition") -> None:
    """Wait for another thread to bring something about."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not come true"
        time.sleep(0.002)
