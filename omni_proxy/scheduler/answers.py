"""Which worker makes an answer: the one that should end it first, steps and all. Pure.

How long the answer takes is steps times their length, and steps get longer with sequences and context, on each worker
in its own way. A worker that has to compute the prompt as well begins later by what that takes. What the worker has of
the prompt need not be moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final

from omni_proxy.lifecycle.enums import DECODE_LEG
from omni_proxy.lifecycle.request import Request
from omni_proxy.messages import Placement
from omni_proxy.scheduler.load import WorkerLoad
from omni_proxy.scheduler.placement import has_decode_room, keeps_pace, uncached

LEAST_WEIGHT: Final = 1e-3
_SHOWN: Final = 4


class AnswerChoice:
    """A worker for an answer, with its reasons; `prefill_s` is what it should take for the prompt, 0 after a P."""

    __slots__ = ("cached", "placement", "prefill_s", "worker")

    def __init__(self, worker: WorkerLoad, placement: Placement, cached: int, prefill_s: float) -> None:
        self.worker = worker
        self.placement = placement
        self.cached = cached
        self.prefill_s = prefill_s


def pick_answering(
    request: Request,
    able: Sequence[WorkerLoad],
    answer_tokens: int,
    handoff_s: float,
    now: float,
    step_limit_s: float = inf,
    away_s: Sequence[float] | None = None,
) -> AnswerChoice | None:
    """The worker of those with room that should end the answer first; None when nobody has room.

    `handoff_s`: how long moving a whole prompt takes. `step_limit_s`: a worker whose steps would get longer has no
    room. `away_s`: how much later each is taken to end. A worker with a larger weight seems faster by as much.
    """
    prompt = request.prompt_tokens
    computes = request.handoff_from is None
    best: WorkerLoad | None = None
    best_end, best_begin, best_finish, best_cached = inf, 0.0, 0.0, 0
    shown: list[tuple[float, str]] = []
    for place, worker in enumerate(able):
        have = prompt - uncached(prompt, request.cached.get(worker.name, 0)) if request.cached else 0
        kv_tokens = prompt - have + answer_tokens
        if not has_decode_room(worker, kv_tokens) or not keeps_pace(worker, kv_tokens, step_limit_s):
            continue
        if computes:
            begin = worker.backlog.free_at(now) - now + worker.backlog.cost.seconds(prompt - have, have)
        else:
            begin = handoff_s * (prompt - have) / max(prompt, 1)
        step_s = worker.decoding.cost.step_s(
            worker.seqs + worker.other_seqs + 1, worker.kv_tokens + worker.other_kv_tokens + prompt + answer_tokens
        )
        end = (begin + step_s * answer_tokens) / max(worker.weight, LEAST_WEIGHT)
        if away_s is not None:
            end += away_s[place]
        shown.append((end, worker.name))
        if end < best_end or best is None or (end == best_end and worker.last_granted < best.last_granted):
            best, best_end, best_begin, best_cached = worker, end, begin, have
            best_finish = begin + step_s * answer_tokens
    if best is None:
        return None
    shown.sort()
    placement = Placement(
        best.name,
        DECODE_LEG,
        "its answer ends soonest",
        tuple([(name, end) for end, name in shown[:_SHOWN]]),
        best_begin,
        best_finish,
        best_cached,
    )
    return AnswerChoice(best, placement, best_cached, best_begin if computes else 0.0)
