"""Where a leg goes: which workers could take it, and which of them carries the least. Pure.

The policies here are the simplest honest ones: fewest outstanding prompt tokens on P, fewest KV tokens on D. Ties go to
the worker that was used least recently, so that an idle pool is walked round instead of hammered at its first name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from omni_proxy.messages import Leg, Placement
from omni_proxy.scheduler.ledger import WorkerLoad, WorkerView

_NOTHING: Final[Mapping[str, int]] = {}


class Placer(Protocol):
    """Compares workers for one leg; lower is better. `reason` names the measure for people."""

    @property
    def reason(self) -> str: ...

    def load(self, worker: WorkerView, tokens: int) -> float:
        """`tokens`: what this request would add to the worker; what it has cached is left out."""
        ...


class FewestPrefillTokens:
    """Prompt tokens that the worker still has to compute for us."""

    reason = "fewest outstanding prompt tokens"

    def load(self, worker: WorkerView, tokens: int) -> float:
        return worker.prefill_tokens / worker.weight


class FewestUncachedTokens:
    """Prompt tokens that the worker will have to compute for us, those of this request that it has not cached included.

    So a cached prefix draws a request as strongly as the tokens that it saves, and one that all have draws nowhere.
    """

    reason = "fewest prompt tokens to compute"

    def load(self, worker: WorkerView, tokens: int) -> float:
        return (worker.prefill_tokens + tokens) / worker.weight


class FewestKvTokens:
    """KV tokens that the worker holds for us, with those that this request would add."""

    reason = "fewest KV tokens"

    def load(self, worker: WorkerView, tokens: int) -> float:
        return (worker.kv_tokens + tokens) / worker.weight


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


def has_prefill_room(worker: WorkerLoad, tokens: int) -> bool:
    """Room for one more prompt; a prompt larger than the whole allowance goes to an idle worker."""
    spec = worker.spec
    if worker.seqs >= worker.max_seqs:
        return False
    return worker.prefill_tokens == 0 or worker.prefill_tokens + tokens <= spec.max_batch_tokens


def has_decode_room(worker: WorkerLoad, tokens: int) -> bool:
    """Room for one more sequence of `tokens` KV tokens; an idle worker always has room."""
    spec = worker.spec
    if worker.seqs >= worker.max_seqs:
        return False
    capacity = spec.kv_capacity_tokens
    return capacity is None or worker.seqs == 0 or worker.kv_tokens + tokens <= capacity


def pick(
    candidates: Iterable[WorkerLoad],
    placer: Placer,
    leg: Leg,
    tokens: int,
    room: Callable[[WorkerLoad, int], bool],
    cached: Mapping[str, int] = _NOTHING,
) -> Placement | None:
    """The candidate with room that carries the least, or None when nobody has room.

    `tokens` is what the request needs where nothing is cached; `cached` what each worker has of it, in tokens.
    """
    scored = []
    for worker in candidates:
        name = worker.spec.name
        added = uncached(tokens, cached[name]) if name in cached else tokens
        if room(worker, added):
            scored.append((placer.load(worker, added), worker.last_granted, name))
    if not scored:
        return None
    scored.sort()
    return Placement(scored[0][2], leg, placer.reason, tuple([(name, load) for load, _, name in scored[:4]]))


def uncached(tokens: int, cached_tokens: int) -> int:
    """Tokens that are left to compute or to hold: never nothing, as the last token is always computed."""
    return tokens - min(cached_tokens, max(tokens - 1, 0))
