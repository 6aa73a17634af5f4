"""What a prompt's P has to do with its D: which P workers it may go to, and what comes after each of them. Pure.

KV moves within a domain only, so with the P the set of D workers is chosen. Where there are several domains, a P is
compared with what the best D of its domain adds until the first token. In parallel mode both legs are booked at once or
none is: a P without a D that has room, and keeps its pace, is no choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from omni_proxy.lifecycle.enums import AGGREGATED, PARALLEL
from omni_proxy.lifecycle.request import Request
from omni_proxy.scheduler.booking import Booking
from omni_proxy.scheduler.buckets import Buckets
from omni_proxy.scheduler.load import WorkerLoad
from omni_proxy.scheduler.placement import uncached
from omni_proxy.scheduler.pools import Domain, Pool, Pools, domain_of


class Pairs:
    """The choice of P as far as it depends on anything but the P."""

    def __init__(self, booking: Booking, pools: Pools) -> None:
        self._booking = booking
        self._pools = pools
        self._buckets = Buckets((), 0.0)

    def configure(self, buckets: Buckets) -> None:
        """Use these settings from now on."""
        self._buckets = buckets

    def able(self, request: Request, now: float) -> Sequence[WorkerLoad]:
        """The prefill workers that a request may go to: in parallel mode those one of whose partners has room."""
        pool = self._pools.of(request.model)
        if pool is None or pool.mode is AGGREGATED:
            return ()
        able = self._booking.candidates(pool.prefill, request, now)
        if pool.mode is not PARALLEL:
            return able
        tokens = self._booking.learning.kv_tokens(request)
        domains = {
            domain
            for domain, partners in pool.partners.items()
            if any(
                self._booking.can_answer(w, request, tokens) for w in self._booking.candidates(partners, request, now)
            )
        }
        return able if len(domains) == len(pool.partners) else [w for w in able if domain_of(w.spec) in domains]

    def extra_s(self, request: Request, able: Sequence[WorkerLoad], now: float) -> list[float] | None:
        """By how much the first token follows each P's answer, and later outside its bucket; None: alike."""
        away = self._buckets.away_s(request.prompt_tokens, able)
        pool = self._pools.of(request.model)
        if pool is None or len(pool.partners) < 2:
            return away
        after = {domain: self._after_s(request, pool, domain, now) for domain in pool.partners}
        extra = [after[domain_of(worker.spec)] for worker in able]
        return extra if away is None else [a + b for a, b in zip(extra, away, strict=True)]

    def _after_s(self, request: Request, pool: Pool, domain: Domain, now: float) -> float:
        """From a P's answer to the first token from the best D of its domain.

        Where none has room now, one should have when the next of its answers ends.
        """
        booking, prompt, soonest = self._booking, request.prompt_tokens, inf
        answer = booking.learning.answer_tokens(request)
        for worker in booking.candidates(pool.partners[domain], request, now):
            missing = uncached(prompt, request.cached.get(worker.name, 0))
            seqs, kv_tokens = worker.seqs + worker.other_seqs, worker.kv_tokens + worker.other_kv_tokens
            step_s = worker.decoding.cost.step_s(seqs + 1, kv_tokens + prompt + answer)
            seconds = booking.learning.handoff_s * missing / max(prompt, 1) + step_s
            if not booking.can_answer(worker, request, missing + answer):
                seconds += step_s * answer / max(seqs, 1)
            soonest = min(soonest, seconds)
        return soonest if soonest < inf else 0.0
