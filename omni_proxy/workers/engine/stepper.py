"""Computes the chunks of a plan and books what they gave. In the engine's thread, which owns all that it changes.

Knows neither arrivals and commands nor who waits for outputs: those are the engine's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import omni_kernels as ops
from omni_kernels import StepProgress
from omni_proxy.workers.engine.bursts import LONGEST_S, Bursts
from omni_proxy.workers.engine.counters import Counters
from omni_proxy.workers.engine.drafting import LearningDrafts, count_burst, learn, learn_burst
from omni_proxy.workers.engine.expert_parallel.wire import RankLost
from omni_proxy.workers.engine.kv_pusher import Computing, KvPusher
from omni_proxy.workers.engine.outputs import output_of, say
from omni_proxy.workers.engine.planner import Chunk, Plan, Planner
from omni_proxy.workers.engine.runner import Runner
from omni_proxy.workers.engine.sampler import Drawn
from omni_proxy.workers.engine.sequence import Sequence
from omni_proxy.workers.engine.speculation import Drafter
from omni_proxy.workers.engine.types import FinishReason, Output

log = logging.getLogger(__name__)


class Finish(Protocol):
    """The one end of a request."""

    def __call__(
        self, seq: Sequence, reason: FinishReason, drawn: tuple[Drawn, ...] = (), error: str | None = None
    ) -> None: ...


_Result = tuple[list[tuple[Drawn, ...]], Seq[Seq[tuple[int, int]]]]
"""What each chunk drew, and how the drafts of several steps fared."""


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

    def compute(self, plan: Plan) -> None:
        """Compute a plan's chunks and tell what was drawn. If that fails, all of them end.

        Raises RankLost: no step will work again, the engine ends, and its worker with it.
        """
        try:
            drawn, fared = self._burst(plan) if plan.steps > 1 else self._step(plan.chunks)
        except RankLost:
            raise
        except Exception as exc:
            log.exception("a step of %d sequences failed", len(plan.chunks))
            for chunk in plan.chunks:
                self._outlet.finish(chunk.seq, FinishReason.ERROR, error=say(exc))
            return
        for chunk, tokens, drafts in zip(plan.chunks, drawn, fared, strict=True):
            count_burst(self._counters, drafts, self._accept(chunk, tokens))

    def _step(self, chunks: tuple[Chunk, ...]) -> _Result:
        begun = time.thread_time()  # what neighbours take from the machine is no cost of a draft
        drawn = self._runner.run(chunks, self._begin_pushes(chunks))
        seconds = time.thread_time() - begun
        self._pusher.computed()
        if all(chunk.count == 1 and not chunk.draft for chunk in chunks):
            self._bursts.took(len(chunks), seconds)
        if self._drafter is not None:
            learn(self._drafter, self._counters, chunks, [len(tokens) for tokens in drawn], seconds)
        return drawn, [()] * len(chunks)

    def _burst(self, plan: Plan) -> _Result:
        """Several steps in one call; a draft of the text is found and checked within."""
        chunks, count = plan.chunks, len(plan.chunks)
        drafts, most, drafter = None, [plan.steps] * count, self._drafter
        if isinstance(drafter, Drafter) and not all(drafter.rests(chunk.seq, plan.steps) for chunk in chunks):
            most = [min(drafter.reach(chunk.seq, plan.steps), _capacity(chunk.seq)) for chunk in chunks]
            drafts = self._drafts(drafter, plan)
        burst = self._runner.burst(chunks, plan.steps, most, drafts)
        self._pusher.computed()
        if burst.plain_steps:
            self._bursts.took(count, burst.plain_s / burst.plain_steps)
        if isinstance(drafter, Drafter):
            learn_burst(drafter.costs, count, burst)
        return [tuple(map(Drawn, tokens)) for tokens in burst.tokens], burst.fared

    def _drafts(self, drafter: Drafter, plan: Plan) -> ops.Drafts:
        lucks = [drafter.luck(chunk.seq) for chunk in plan.chunks]
        for chunk, luck in zip(plan.chunks, lucks, strict=True):
            luck.text.extend(chunk.seq.tokens[len(luck.text) :])
        return ops.Drafts(drafter.policy(len(lucks), shared=True), lucks, plan.draft_rows, LONGEST_S)

    def _begin_pushes(self, chunks: tuple[Chunk, ...]) -> StepProgress | None:
        """Say which of the chunks' KV others wait for; what the step must tell them, if any."""
        parts = [
            Computing(chunk.seq.request_id, tuple(chunk.seq.blocks), chunk.seq.kv_len, chunk.start + chunk.count)
            for chunk in chunks
            if chunk.seq.request.room is not None
        ]
        return self._pusher.computing(parts) if parts else None

    def _accept(self, chunk: Chunk, drawn: tuple[Drawn, ...]) -> int:
        """Book what a chunk gave; a token that ends the sequence is the last, whatever was drawn after it.

        Returns how many tokens were taken.
        """
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
        return taken


def _capacity(seq: Sequence) -> int:
    """Tokens that may be drawn in the blocks that a sequence has: the last needs none."""
    return len(seq.blocks) * seq.block_size - len(seq.tokens) + 1
