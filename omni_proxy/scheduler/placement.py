"""Which workers may take a leg at all: trusted, with a context that is long enough, with room. Pure.

Which of them does is decided by cost: for prompts in `prefill.py`, for answers in `answers.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from omni_proxy.scheduler.load import WorkerLoad


def trusted(workers: Sequence[WorkerLoad], avoid: frozenset[str], now: float) -> Sequence[WorkerLoad]:
    """Without ejected workers and those that failed this request before, as long as others remain.

    Of the rest, without backups as long as others remain. One that is full is no reason to use a backup: requests wait.
    """
    if not avoid and all(now >= w.ejected_until and not w.spec.backup for w in workers):
        return workers
    fresh = [w for w in workers if w.spec.name not in avoid]
    good = [w for w in fresh if now >= w.ejected_until]
    return [w for w in good if not w.spec.backup] or good or fresh or workers


def fitting(workers: Sequence[WorkerLoad], tokens: int) -> Sequence[WorkerLoad]:
    """Without those whose context is too short for a prompt; all of them when it is too short everywhere.

    In that case the worker says so itself, which is better than to wait for nobody.
    """
    for worker in workers:
        limit = worker.spec.max_model_len
        if limit is not None and tokens >= limit:
            break
    else:
        return workers
    return [w for w in workers if w.spec.max_model_len is None or tokens < w.spec.max_model_len] or workers


def has_decode_room(worker: WorkerLoad, tokens: int) -> bool:
    """Room for one more sequence of `tokens` KV tokens; an idle worker always has room."""
    spec = worker.spec
    seqs = worker.seqs + worker.other_seqs
    if seqs >= worker.max_seqs:
        return False
    capacity = spec.kv_capacity_tokens
    return capacity is None or seqs == 0 or worker.kv_tokens + worker.other_kv_tokens + tokens <= capacity


def keeps_pace(worker: WorkerLoad, kv_tokens: int, limit_s: float) -> bool:
    """Would its steps stay below a limit, and below those of all that it answers, with one more answer?

    An idle worker keeps any pace: nobody else would be faster.
    """
    tightest, seqs = min(limit_s, worker.step_limits.tightest), worker.seqs + worker.other_seqs
    if tightest == inf or seqs == 0:
        return True
    return worker.decoding.cost.step_s(seqs + 1, worker.kv_tokens + worker.other_kv_tokens + kv_tokens) <= tightest


def uncached(tokens: int, cached_tokens: int) -> int:
    """Tokens that are left to compute or to hold: never nothing, as the last token is always computed."""
    return tokens - min(cached_tokens, max(tokens - 1, 0))
