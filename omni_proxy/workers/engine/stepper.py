"""Computes the chunks of a plan and books what they gave. In the engine's thread, which owns all that it changes.

Knows neither arrivals and commands nor who waits for outputs: those are the engine's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from omni_kernels import StepProgress
from omni_proxy.workers.engine.bursts import Bursts
from omni_proxy.workers.engine.counters import Counters
from omni_proxy.workers.engine.drafting import LearningDrafts, learn
from omni_proxy.workers.engine.expert_parallel.wire import RankLost
from omni_proxy.workers.engine.kv_pusher import Computing, KvPusher
from omni_proxy.workers.engine.outputs import output_of, say
from omni_proxy.workers.engine.planner import Chunk, Planner
from omni_proxy.workers.engine.runner import Runner
from omni_proxy.workers.engine.sampler import Drawn
from omni_proxy.workers.engine.sequence import Sequence
from omni_proxy.workers.engine.types import FinishReason, Output

log = logging.getLogger(__name__)


class Finish(Protocol):
    """The one end of a request."""

    def __call__(
        self, seq: Sequence, reason: FinishReason, drawn: tuple[Drawn, ...] = (), error: str | None = None
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Outlet:
    """Where a step's results go."""

    end_of: Callable[[Sequence], FinishReason | None]
    """Whether the last drawn token ends the sequence."""
    emit: Callable[[Output], None]
    finish: Finish


class Stepper:
    """One step after the other, as planned."""

    def __init__(
        self,
        runner: Runner,
        planner: Planner,
        pusher: KvPusher,
        counters: Counters,
        bursts: Bursts,
        drafter: LearningDrafts | None,
        outlet: Outlet,
    ) -> None:
        self._runner = runner
        self._planner = planner
        self._pusher = pusher
        self._counters = counters
        self._bursts = bursts
        self._drafter = drafter
        self._outlet = outlet

    def compute(self, chunks: tuple[Chunk, ...], steps: int) -> None:
        """Compute chunks `steps` times and tell what was drawn. If that fails, all of them end.

        Raises RankLost: no step will work again, the engine ends, and its worker with it.
        """
        try:
            begun = time.thread_time()  # what neighbours take from the machine is no cost of a draft
            if steps > 1:
                drawn = self._runner.burst(chunks, steps)
            else:
                drawn = self._runner.run(chunks, self._begin_pushes(chunks))
            seconds = time.thread_time() - begun
            self._pusher.computed()
        except RankLost:
            raise
        except Exception as exc:
            log.exception("a step of %d sequences failed", len(chunks))
            for chunk in chunks:
                self._outlet.finish(chunk.seq, FinishReason.ERROR, error=say(exc))
            return
        self._learn(chunks, drawn, steps, seconds)
        for chunk, tokens in zip(chunks, drawn, strict=True):
            self._accept(chunk, tokens)

    def _learn(self, chunks: tuple[Chunk, ...], drawn: list[tuple[Drawn, ...]], steps: int, seconds: float) -> None:
        if all(chunk.count == 1 for chunk in chunks):
            self._bursts.took([chunk.draft for chunk in chunks], len(chunks), steps, seconds)
        if self._drafter is not None:
            learn(self._drafter, self._counters, chunks, [len(tokens) for tokens in drawn], steps, seconds)

    def _begin_pushes(self, chunks: tuple[Chunk, ...]) -> StepProgress | None:
        """Say which of the chunks' KV others wait for; what the step must tell them, if any."""
        parts = [
            Computing(chunk.seq.request_id, tuple(chunk.seq.blocks), chunk.seq.kv_len, chunk.start + chunk.count)
            for chunk in chunks
            if chunk.seq.request.room is not None
        ]
        return self._pusher.computing(parts) if parts else None

    def _accept(self, chunk: Chunk, drawn: tuple[Drawn, ...]) -> None:
        """Book what a chunk gave; a token that ends the sequence is the last, whatever was drawn after it."""
        seq, end_of = chunk.seq, self._outlet.end_of
        self._planner.advance(chunk, drawn[0].token_id if drawn else None)
        reason = end_of(seq) if drawn else None
        taken = min(1, len(drawn))
        while reason is None and taken < len(drawn):
            self._planner.confirm(seq, drawn[taken].token_id)
            reason = end_of(seq)
            taken += 1
        self._counters.computed(chunk, taken)
        if reason is not None:
            self._outlet.finish(seq, reason, drawn[:taken])
        elif drawn:
            self._outlet.emit(output_of(seq, drawn))
