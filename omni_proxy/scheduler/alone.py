"""Conditional disaggregation: which prompts go to a decode worker whole, without a handoff. Pure.

A prompt in the steps of a decode worker makes them longer, and all answers made there wait for as long as it takes. Who
promised an answer a token each so many seconds (`tpot_limit_s`) has time to spare, as steps are quicker than that: the
reader of an answer that is ahead of its limit by a second misses nothing in a pause of a second.

    tokens                      ╱ made          a prompt is computed in here: nothing is made
      │                   ___╱‾               ↙
      │                ╱‾‾   ┊ ╱ limit: what the reader was promised
      │             ╱     ╱‾
      │          ╱  ╱‾‾              an answer is ahead by the distance between the two in time
      └───────╱‾‾──────────────────

So what decode workers do not need becomes room for prompts, as much as answers can do without and no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Final

from omni_proxy.lifecycle.request import Request
from omni_proxy.scheduler.answering import AnswerPlan
from omni_proxy.scheduler.answers import AnswerChoice
from omni_proxy.scheduler.booking import Booking
from omni_proxy.scheduler.load import WorkerLoad
from omni_proxy.scheduler.pools import Pool, Pools
from omni_proxy.scheduler.queue import WaitingQueue
from omni_proxy.scheduler.settings import SchedulingSettings

LOOKED_AT: Final = 8
"""So many prompts that wait are compared with decode workers in one walk."""
_AGAIN_S: Final = 0.05
_MOST_ADDED: Final = 0.5
"""Of a decode worker's step, that a prompt may make it longer where answers have no limit."""
_MOST_PAUSE_S: Final = 1.0
"""A prompt takes no longer, however far ahead answers are."""


class AlonePlan:
    """Says whether a prompt goes to a decode worker whole, and books it there."""

    def __init__(self, booking: Booking, pools: Pools, answers: AnswerPlan, queue: WaitingQueue) -> None:
        self._booking = booking
        self._pools = pools
        self._answers = answers
        self._queue = queue
        self._below: int | None = 0
        self._below_of: Mapping[str, int] = {}

    def configure(self, settings: SchedulingSettings) -> None:
        """Use these settings from now on."""
        self._below = settings.aggregate_below_tokens
        self._below_of = settings.model_aggregate_below_tokens

    def spare_s(self, now: float) -> float:
        """So much time a prompt may take at the decode worker that has most to spare; 0: none may go there now."""
        if self._below is not None or self._queue.waits:
            return 0.0
        limit_s, most_s = self._booking.targets.loosest_tpot_s, 0.0
        for worker in self._booking.ledger:
            if not worker.prefills and worker.takes_work and not _computes(worker):
                most_s = max(most_s, self._most_added_s(limit_s, worker, now))
        return most_s

    @property
    def again_s(self) -> float:
        """After so long answers may be far enough ahead of their limits for a prompt that waits; infinite: never."""
        return _AGAIN_S if self._below is None and self._booking.targets.loosest_tpot_s < inf else inf

    def limit(self, model: str) -> int | None:
        """Prompts with fewer tokens to compute need no handoff; 0: all are handed over; None: that depends on cost."""
        return self._below_of.get(model, self._below) if self._below_of else self._below

    def place(self, request: Request, computed_at: float, behind: float, now: float) -> bool:
        """Grant a decode worker a prompt for which a handoff is not worth it; False where it is, or for no room.

        `computed_at`: the instant at which a P should have computed it; `behind`: how many prompts wait for each P.
        """
        limit, pool = self.limit(request.model), self._pools.of(request.model)
        if limit == 0 or pool is None or not pool.alone or self._queue.waits:
            return False
        choice = self._answers.pick(request, pool.alone, now)
        if choice is None:
            return False
        if limit is not None:
            worth = request.prompt_tokens - choice.cached < limit
        else:
            worth = self._is_worth_it(request, choice, pool, computed_at, behind, now)
        if worth:
            added_s = choice.worker.backlog.cost.added_s(request.prompt_tokens - choice.cached, choice.cached)
            choice.worker.decoding.paused(added_s)
            self._answers.grant(request, choice, now)
        return worth

    def _is_worth_it(
        self, request: Request, choice: AnswerChoice, pool: Pool, computed_at: float, behind: float, now: float
    ) -> bool:
        """Is it ready sooner there, and others behind it, by more than it holds up answers?"""
        worker, tokens = choice.worker, request.prompt_tokens - choice.cached
        if _computes(worker):
            return False
        cost = worker.backlog.cost
        added_s, unlimited = cost.added_s(tokens, choice.cached), worker.seqs - len(worker.step_limits)
        if added_s > self._most_added_s(self._booking.targets.tpot_s(request.spec), worker, now):
            return False
        if not pool.prefill:
            return True
        sooner_s = computed_at - now + self._booking.learning.handoff_s - choice.prefill_s
        gained_s = sooner_s + behind * cost.seconds(tokens, choice.cached)
        # Whose first token is still to come is not ahead of anything; answers that have a limit count as one.
        held_up = max(min(1, worker.seqs), unlimited, worker.seqs - len(worker.decoding))
        return gained_s > added_s * held_up

    def _most_added_s(self, limit_s: float, worker: WorkerLoad, now: float) -> float:
        """So much time a prompt may take there whose answer has this limit.

        Answers with a limit must keep it, others lose half a step at most.
        """
        seqs, kv_tokens = worker.seqs + worker.other_seqs, worker.kv_tokens + worker.other_kv_tokens
        step_s = worker.decoding.cost.step_s(seqs, kv_tokens)
        limit_s = min(limit_s, worker.step_limits.tightest)
        if limit_s == inf:
            return _MOST_ADDED * step_s
        most_s = max(limit_s - step_s, min(_MOST_PAUSE_S, worker.decoding.ahead_s(limit_s, step_s, now)))
        return most_s if worker.seqs == len(worker.step_limits) else min(most_s, _MOST_ADDED * step_s)


def _computes(worker: WorkerLoad) -> bool:
    """Has it a prompt? One at a time: what the first takes is not seen yet."""
    return worker.prefill_tokens + worker.other_prefill_tokens > 0
