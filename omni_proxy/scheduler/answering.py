"""Which worker makes an answer, and whose turn it is among those that wait for one. Pure.

Who waits with KV ready on a P goes before new prompts: that KV takes the P's memory until it is pulled. Among them the
shortest expected answer goes first, as it gives its place back first; who is starved goes before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from omni_proxy.apc.index import PrefixIndex
from omni_proxy.lifecycle.enums import AGGREGATED
from omni_proxy.lifecycle.request import Request
from omni_proxy.scheduler.answers import AnswerChoice, pick_answering
from omni_proxy.scheduler.booking import Booking
from omni_proxy.scheduler.buckets import Buckets
from omni_proxy.scheduler.load import WorkerLoad
from omni_proxy.scheduler.pools import Pool, Pools, domain_of
from omni_proxy.scheduler.queue import WaitingQueue
from omni_proxy.scheduler.settings import SchedulingSettings


class AnswerPlan:
    """Places the D legs of prefilled requests, the only legs of others, and the D side of pairs."""

    def __init__(self, booking: Booking, pools: Pools, queue: WaitingQueue, index: PrefixIndex) -> None:
        self._booking = booking
        self._pools = pools
        self._queue = queue
        self._index = index
        self._starvation_timeout_s = inf
        self._buckets = Buckets((), 0.0)
        self._ranks = True

    def configure(self, settings: SchedulingSettings, buckets: Buckets) -> None:
        """Use these settings from now on."""
        self._starvation_timeout_s = settings.starvation_timeout_s
        self._buckets = buckets
        self._ranks = "answers" not in settings.without

    def walk(self, now: float) -> Iterator[Request]:
        """Grant what can be granted; yields each request after its lease is booked."""
        starved_before = now - self._starvation_timeout_s

        def rank(request: Request) -> tuple[int, float, int]:
            turn = self._queue.waits[request.rid].turn
            if turn < 0:
                return 0, 0.0, turn
            if request.queued_at <= starved_before:
                return 1, request.queued_at, turn
            return 2, float(self._booking.learning.answer_tokens(request)), turn

        for request in self._queue.fronts(rank if self._ranks else None):
            if request.block_keys:  # caches have changed since it came
                request.match(self._index.match(request.block_keys), now)
            if self.place(request, now):
                self._queue.remove(request)
                yield request

    def place(self, request: Request, now: float) -> bool:
        """Grant the D leg of a prefilled request, or the only leg of an aggregated one."""
        pool = self._pools.of(request.model)
        if pool is None:
            return False
        choice = self.pick(request, self._answering(request, pool), now)
        if choice is None:
            return False
        self.grant(request, choice, now)
        return True

    def pick(self, request: Request, able: Sequence[WorkerLoad], now: float) -> AnswerChoice | None:
        """The best of some workers for an answer, or None when nobody may take it now."""
        booking = self._booking
        able = booking.candidates(able, request, now)
        return pick_answering(
            request,
            able,
            booking.learning.answer_tokens(request),
            booking.learning.handoff_s,
            now,
            booking.targets.tpot_s(request.spec),
            self._buckets.away_s(request.prompt_tokens, able),
        )

    def grant(self, request: Request, choice: AnswerChoice, now: float) -> None:
        """Book an answer, and its prompt where nobody has computed that."""
        prefill_tokens = 0
        if request.handoff_from is None:
            request.mode = AGGREGATED
            prefill_tokens = request.prompt_tokens - choice.cached
            request.predicted_first_at = now + choice.prefill_s
        lease = self._booking.grant_decode(request, choice.placement, prefill_tokens)
        if prefill_tokens:
            choice.worker.backlog.granted(lease, prefill_tokens, choice.cached, now)

    def _answering(self, request: Request, pool: Pool) -> Sequence[WorkerLoad]:
        """Those that can make the answer: from P's KV where it waits for them, else on their own."""
        if request.handoff_from is None:
            if request.alone:
                return pool.alone
            return pool.decode if pool.mode is AGGREGATED else ()
        peer = self._booking.ledger.get(request.handoff_from)
        return () if peer is None else pool.receivers.get(domain_of(peer.spec), ())
