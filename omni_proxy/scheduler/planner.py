"""Gives waiting requests their workers: walks the queues and grants leases while there is room. Pure.

It decides and books in one step, so that the next decision of the same walk sees the load of the one before. Where
prompts go is decided in `prefill`, where answers go in `answering`; here the two are tied together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from omni_proxy.apc.homes import Homes
from omni_proxy.apc.index import NoIndex, PrefixIndex
from omni_proxy.lifecycle.enums import AGGREGATED, DECODE_WAITING, PARALLEL
from omni_proxy.lifecycle.request import Request
from omni_proxy.messages import Lease, Placement, RequestSpec, Stage
from omni_proxy.scheduler.alone import AlonePlan
from omni_proxy.scheduler.answering import AnswerPlan
from omni_proxy.scheduler.answers import AnswerChoice
from omni_proxy.scheduler.booking import Booking
from omni_proxy.scheduler.buckets import Buckets
from omni_proxy.scheduler.instants import sooner
from omni_proxy.scheduler.learning import Learning
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.pairs import Pairs
from omni_proxy.scheduler.pools import Pools, domain_of
from omni_proxy.scheduler.prefill import Choice, PrefillPlan
from omni_proxy.scheduler.queue import WaitingQueue
from omni_proxy.scheduler.registry import make_lineup
from omni_proxy.scheduler.roles import Roles
from omni_proxy.scheduler.settings import SchedulingSettings
from omni_proxy.scheduler.targets import Targets


class Planner:
    """Placement of both legs over one ledger."""

    def __init__(
        self,
        ledger: Ledger,
        pools: Pools,
        settings: SchedulingSettings,
        index: PrefixIndex | None = None,
        homes: Homes | None = None,
    ) -> None:
        self.ledger = ledger
        self.pools = pools
        self.prefill_queue = WaitingQueue()
        self.decode_queue = WaitingQueue()
        self.learning = Learning(ledger)
        index = NoIndex() if index is None else index
        self._booking = Booking(ledger, self.learning, Targets(settings))
        self._pairs = Pairs(self._booking, pools)
        self._roles = Roles(ledger, self.prefill_queue, self.decode_queue)
        self.answers = AnswerPlan(self._booking, pools, self.decode_queue, index)
        self._alone = AlonePlan(self._booking, pools, self.answers, self.decode_queue)
        self._lineup = make_lineup(settings)
        self.prefill = PrefillPlan(
            ledger,
            self.prefill_queue,
            index,
            homes,
            self._lineup,
            self._pairs,
            self._alone,
            self._grant_prefill,
        )
        self._changed = False
        """Has anything happened since the last walk that could let one of those that wait go?"""
        self._opening: float | None = None
        self.configure(settings)

    def configure(self, settings: SchedulingSettings) -> None:
        """Use these settings from now on."""
        buckets = Buckets(settings.length_buckets, settings.overflow_s)
        self._booking.targets = Targets(settings)
        self._pairs.configure(buckets)
        self.answers.configure(settings, buckets)
        self._alone.configure(settings)
        self._lineup = make_lineup(settings)
        self.prefill.configure(self._lineup, settings.without)
        self._roles.configure(settings.elastic_roles, settings.tpot_limit_s)
        self.pools.changed()
        self._changed = True

    def ttft_target_s(self, spec: RequestSpec) -> float | None:
        """In so many seconds after its arrival the first token of a request should come; None: nobody says."""
        return self._booking.targets.ttft_s(spec)

    def members_changed(self) -> None:
        """A member came, went or changed."""
        self._roles.members_changed()
        self.pools.changed()

    def review(self, now: float) -> None:
        """Let mixed workers change sides where that is due."""
        if self._roles.elastic and self._roles.review(now):
            self.pools.changed()
            self._changed = True

    def place_at_once(self, request: Request, now: float) -> bool:
        """Grant leases to a request that has not lined up yet, as `plan` would if it was the last in its queue.

        False when nobody has room, or others whose turn may be earlier wait.
        """
        for_decode = request.stage is DECODE_WAITING
        if self.decode_queue.waits or (self.prefill_queue.waits and not for_decode):
            self._changed = True
            return False
        self.ledger.start_slowly(now)
        placed = self.answers.place(request, now) if for_decode else self.prefill.place_at_once(request, now)
        if not placed:
            self._opening = self.ledger.next_opening(now)
        return placed

    def wait(self, request: Request, deadline: float, first: bool = False) -> None:
        """Line up: for P, in parallel mode P and D; or for D, behind those only who want the same D workers."""
        line: tuple[str, ...] = (request.model,)
        if request.stage is Stage.PREFILL_WAITING:
            now = request.marks[-1][1]  # it has just entered its stage
            self._lineup.lines_up(self.drain_s(now), now)
            request.work_s = self._work_s(request)
            self.prefill_queue.push(request, line, deadline, first)
            return
        if request.handoff_from is not None and (peer := self.ledger.get(request.handoff_from)) is not None:
            line += domain_of(peer.spec)
        self.decode_queue.push(request, line, deadline, first)

    def leave(self, request: Request) -> float:
        """Take a waiting request out of its line; returns the instant at which its wait would have been over."""
        queue = self.prefill_queue if request.rid in self.prefill_queue else self.decode_queue
        deadline = queue.deadline(request)
        queue.remove(request)
        return deadline

    def strayed(self) -> list[Request]:
        """Those whose line leads nowhere since a member changed: the mode is another, or their KV is gone."""
        strayed = [r for r in self.prefill_queue.requests() if self._goes_alone(r)]
        for request in self.decode_queue.requests():
            prefilled = request.prefill_done_at is not None and not request.alone
            if not (self._can_be_pulled(request) if prefilled else self._goes_alone(request)):
                strayed.append(request)
        return strayed

    def _goes_alone(self, request: Request) -> bool:
        pool = self.pools.of(request.model)
        return request.alone or (pool is not None and pool.mode is AGGREGATED)

    def _can_be_pulled(self, request: Request) -> bool:
        """P is there, and so is somebody to pull, if not now then later; or there is nothing better to do."""
        peer = None if request.handoff_from is None else self.ledger.get(request.handoff_from)
        pool = self.pools.of(request.model)
        if peer is None:
            return False
        return pool is None or not pool.ready or domain_of(peer.spec) in pool.receivers

    def changed(self) -> None:
        """Something came free, or somebody came."""
        self._changed = True

    def served_elsewhere(self, served: Sequence[tuple[str, int]]) -> None:
        """Other gateways computed so many prompt tokens for these tenants."""
        for tenant, tokens in served:
            self._lineup.took_elsewhere(tenant, tokens)

    def next_wakeup(self) -> float | None:
        """The instant at which to plan again though nothing else happens, or None."""
        at = sooner(self._opening, self._roles.look_at)
        return sooner(self.prefill.wake_at, at) if self.prefill_queue.waits else at

    def is_due(self, now: float) -> bool:
        """Has anything happened that could let one of those that wait go?"""
        return self._changed or ((at := self.next_wakeup()) is not None and at <= now)

    def plan(self, now: float) -> Iterator[Request]:
        """Grant leases to waiting requests, as far as anything has changed since the last time.

        Yields each request after its leases are booked. Requests whose prefill is done go before new ones: their KV
        occupies a prefill worker until they are placed.
        """
        if not self.is_due(now):
            return
        self._changed = False
        self.ledger.start_slowly(now)
        if self.decode_queue.waits:
            yield from self.answers.walk(now)
        if self.prefill_queue.waits:
            yield from self.prefill.walk(now)
        self._opening = self.ledger.next_opening(now)

    def _grant_prefill(self, request: Request, choice: Choice, placement: Placement, now: float) -> bool:
        """Grant the P leg, in parallel mode both legs or none."""
        pool = self.pools.of(request.model)
        assert pool is not None
        decode: AnswerChoice | None = None
        if pool.mode is PARALLEL:
            partners = pool.partners.get(domain_of(choice.worker.spec), ())
            decode = self.answers.pick(request, partners, now)
            if decode is None:
                return False
        request.mode = pool.mode
        lease = self._booking.grant_prefill(request, placement, choice.uncached)
        choice.worker.backlog.granted(lease, choice.uncached, choice.cached, now)
        request.predicted_first_at = choice.finish + self.learning.handoff_s
        if decode is not None:
            self._booking.grant_decode(request, decode.placement, 0)
        return True

    def _work_s(self, request: Request) -> float:
        """For how long a prompt keeps all prefill workers together busy; 0 where there are none."""
        count = max(1, self.ledger.prefill_count)
        for worker in self.ledger:
            if worker.prefills and worker.takes_work:
                cached = request.best_cached
                return worker.backlog.cost.seconds(request.prompt_tokens - cached, cached) / count
        return 0.0

    def drain_s(self, now: float) -> float:
        """How long the prefill workers should take for all that waits by now; 0 where there are none."""
        queue, workers = self.prefill_queue, [w for w in self.ledger if w.prefills and w.takes_work]
        if not queue.waits or not workers:
            return 0.0
        mean = queue.tokens // len(queue)
        one = sum(w.backlog.cost.seconds(mean, 0) for w in workers) / len(workers)
        begun = sum(w.backlog.free_at(now) - now for w in workers)
        return (begun + one * len(queue)) / len(workers)

    def first_token_at(self, request: Request, now: float) -> float:
        """The instant at which the first token of a waiting request could come if its turn was next."""
        if request.stage is not Stage.PREFILL_WAITING:
            return now
        soonest = self.prefill.soonest(request, now)
        return now if soonest == inf else soonest + self.learning.handoff_s

    def place_alone(self, request: Request, now: float) -> bool:
        """Grant a decode worker a prompt that has just come, if a handoff is not worth it; False also for no room."""
        limit = self._alone.limit(request.model)
        if limit == 0 or (limit is None and self.prefill_queue.waits):  # the next walk looks at all that wait
            return False
        computed_at = self.prefill.soonest(request, now) if limit is None else inf
        return self._alone.place(request, computed_at, self.prefill.behind(), now)

    def adopt(
        self, request: Request, prefill: Lease | None, decode: Lease | None, handoff_from: str | None, now: float
    ) -> None:
        """Book the leases that a request already has; their workers must be members."""
        self._booking.adopt(request, prefill, decode, handoff_from, now)
