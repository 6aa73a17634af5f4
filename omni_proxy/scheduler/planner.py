"""Gives waiting requests their workers: walks the queues and grants leases while there is room. Pure.

It decides and books in one step, so that the next decision of the same walk sees the load of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf

from omni_proxy.apc.homes import Homes
from omni_proxy.apc.index import NoIndex, PrefixIndex
from omni_proxy.lifecycle.request import Request
from omni_proxy.messages import Lease, Mode, Placement, Stage
from omni_proxy.scheduler.answers import AnswerChoice, pick_answering
from omni_proxy.scheduler.learning import Learning
from omni_proxy.scheduler.ledger import Ledger, WorkerLoad
from omni_proxy.scheduler.placement import fitting, has_decode_room, trusted
from omni_proxy.scheduler.pools import Pool, Pools, domain_of
from omni_proxy.scheduler.prefill import Choice, PrefillPlan
from omni_proxy.scheduler.queue import WaitingQueue
from omni_proxy.scheduler.registry import make_lineup
from omni_proxy.scheduler.settings import SchedulingSettings

_Place = Callable[[Request, float], bool]


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
        self._index = NoIndex() if index is None else index
        self.pools = pools
        self.prefill_queue = WaitingQueue()
        self.decode_queue = WaitingQueue()
        self.learning = Learning(ledger)
        self._aggregate_below = settings.aggregate_below_tokens
        self._aggregate_below_of = settings.model_aggregate_below_tokens
        self._lineup = make_lineup(settings)
        self.prefill = PrefillPlan(
            ledger,
            self.prefill_queue,
            self._index,
            homes,
            self._lineup,
            settings.work_weight,
            self._able,
            self._grant_prefill,
        )
        self._changed = False
        """Has anything happened since the last walk that could let one of those that wait go?"""
        self._opening: float | None = None

    def place_at_once(self, request: Request, now: float) -> bool:
        """Grant leases to a request that has not lined up yet, as `plan` would if it was the last in its queue.

        False when nobody has room, or others whose turn may be earlier wait.
        """
        for_decode = request.stage is Stage.DECODE_WAITING
        if self.decode_queue.waits or (self.prefill_queue.waits and not for_decode):
            self._changed = True
            return False
        self.ledger.start_slowly(now)
        placed = self.place_decode(request, now) if for_decode else self.prefill.place_at_once(request, now)
        if not placed:
            self._opening = self.ledger.next_opening(now)
        return placed

    def wait(self, request: Request, deadline: float, first: bool = False) -> None:
        """Line up: for P, in parallel mode P and D; or for D, behind those only who want the same D workers."""
        line: tuple[str, ...] = (request.spec.model,)
        if request.stage is Stage.PREFILL_WAITING:
            self._lineup.lines_up(request, self.drain_s(request.marks[-1].at))  # it has just entered its stage
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
        pool = self.pools.of(request.spec.model)
        return request.alone or (pool is not None and pool.mode is Mode.AGGREGATED)

    def _can_be_pulled(self, request: Request) -> bool:
        """P is there, and so is somebody to pull, if not now then later; or there is nothing better to do."""
        peer = None if request.handoff_from is None else self.ledger.get(request.handoff_from)
        pool = self.pools.of(request.spec.model)
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
        wake = self.prefill.wake_at if self.prefill_queue.waits else None
        if wake is None or self._opening is None:
            return self._opening if wake is None else wake
        return min(wake, self._opening)

    def plan(self, now: float) -> Iterator[Request]:
        """Grant leases to waiting requests, as far as anything has changed since the last time.

        Yields each request after its leases are booked. Requests whose prefill is done go before new ones: their KV
        occupies a prefill worker until they are placed.
        """
        wakeup = self.next_wakeup()
        if not self._changed and (wakeup is None or now < wakeup):
            return
        self._changed = False
        self.ledger.start_slowly(now)
        yield from self._serve(self.decode_queue, self.place_decode, now)
        if self.prefill_queue.waits:
            yield from self.prefill.walk(now)
        self._opening = self.ledger.next_opening(now)

    def _serve(self, queue: WaitingQueue, place: _Place, now: float) -> Iterator[Request]:
        for request in queue.fronts():
            if request.block_keys:  # caches have changed since it came
                request.match(self._index.match(request.block_keys), now)
            if place(request, now):
                queue.remove(request)
                yield request

    def _able(self, request: Request, now: float) -> Sequence[WorkerLoad]:
        """The prefill workers that a request may go to: in parallel mode those one of whose partners has room."""
        pool = self.pools.of(request.spec.model)
        if pool is None or pool.mode is Mode.AGGREGATED:
            return ()
        able = self._candidates(pool.prefill, request, now)
        if pool.mode is not Mode.PARALLEL:
            return able
        tokens = self.learning.kv_tokens(request)
        domains = {
            domain
            for domain, partners in pool.partners.items()
            if any(has_decode_room(w, tokens) for w in self._candidates(partners, request, now))
        }
        return able if len(domains) == len(pool.partners) else [w for w in able if domain_of(w.spec) in domains]

    def _grant_prefill(self, request: Request, choice: Choice, placement: Placement, now: float) -> bool:
        """Grant the P leg, in parallel mode both legs or none."""
        pool = self.pools.of(request.spec.model)
        assert pool is not None
        decode: AnswerChoice | None = None
        if pool.mode is Mode.PARALLEL:
            partners = pool.partners.get(domain_of(choice.worker.spec), ())
            decode = self._pick_decode(request, partners, now)
            if decode is None:
                return False
        request.mode = pool.mode
        lease = self._grant(request, placement, choice.uncached, request.prompt_tokens)
        choice.worker.backlog.granted(lease, choice.uncached, choice.cached, now)
        request.prefill_lease = lease
        request.predicted_first_at = choice.finish + self.learning.handoff_s
        if decode is not None:
            request.decode_lease = self._grant(request, decode.placement, 0, self.learning.kv_tokens(request))
        return True

    def place_decode(self, request: Request, now: float) -> bool:
        """Grant the D leg of a prefilled request, or the only leg of an aggregated one."""
        pool = self.pools.of(request.spec.model)
        if pool is None:
            return False
        choice = self._pick_decode(request, self._answering(request, pool), now)
        if choice is None:
            return False
        self._grant_answer(request, choice, now)
        return True

    def drain_s(self, now: float) -> float:
        """How long the prefill workers should take for all that waits by now; 0 where there are none."""
        queue, workers = self.prefill_queue, [w for w in self.ledger if w.prefills and w.up]
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
        """Grant a decode worker a prompt so short that a handoff is not worth it; False where it is, or for no room.

        It is worth it unless the worker can compute the prompt within one step of its own, so that no answer that it
        makes is held up by more than a token, and sooner than a prefill worker could.
        """
        pool = self.pools.of(request.spec.model)
        limit = self._aggregate_below
        if self._aggregate_below_of:
            limit = self._aggregate_below_of.get(request.spec.model, limit)
        if limit == 0 or pool is None or not pool.alone or self.decode_queue.waits:
            return False
        choice = self._pick_decode(request, pool.alone, now)
        if choice is None:
            return False
        tokens = request.prompt_tokens - choice.cached
        if tokens >= limit if limit is not None else not self._worth_alone(request, choice, tokens, pool, now):
            return False
        self._grant_answer(request, choice, now)
        return True

    def _worth_alone(self, request: Request, choice: AnswerChoice, tokens: int, pool: Pool, now: float) -> bool:
        worker = choice.worker
        if worker.prefill_tokens or worker.backlog.cost.seconds(tokens, choice.cached) > worker.decoding.cost.step_s(
            worker.seqs, worker.kv_tokens
        ):
            return False
        return not pool.prefill or choice.prefill_s < self.prefill.soonest(request, now) - now + self.learning.handoff_s

    def _grant_answer(self, request: Request, choice: AnswerChoice, now: float) -> None:
        prefill_tokens = 0
        if request.handoff_from is None:
            request.mode = Mode.AGGREGATED
            prefill_tokens = request.prompt_tokens - choice.cached
            request.predicted_first_at = now + choice.prefill_s
        lease = self._grant(request, choice.placement, prefill_tokens, self.learning.kv_tokens(request))
        request.decode_lease = lease
        if prefill_tokens:
            choice.worker.backlog.granted(lease, prefill_tokens, choice.cached, now)

    def adopt(
        self, request: Request, prefill: Lease | None, decode: Lease | None, handoff_from: str | None, now: float
    ) -> None:
        """Book the leases that a request already has; their workers must be members."""
        request.prefill_lease, request.decode_lease, request.handoff_from = prefill, decode, handoff_from
        request.attempt = max(lease.attempt for lease in (prefill, decode) if lease is not None)
        tokens = request.prompt_tokens
        if prefill is not None:
            request.mode = Mode.SEQUENTIAL if decode is None else Mode.PARALLEL
            self.ledger.grant(prefill, tokens, tokens)
            self.ledger.holder(prefill).backlog.granted(prefill, tokens, 0, now)
        if decode is not None:
            alone = prefill is None and handoff_from is None
            request.mode = Mode.AGGREGATED if alone else request.mode or Mode.SEQUENTIAL
            waits = alone and request.first_token_at is None
            self.ledger.grant(decode, tokens if waits else 0, self.learning.kv_tokens(request))
        if handoff_from is not None and request.first_token_at is None:
            self.ledger.hold(request.rid, handoff_from, tokens)

    def _answering(self, request: Request, pool: Pool) -> Sequence[WorkerLoad]:
        """Those that can make the answer: from P's KV where it waits for them, else on their own."""
        if request.handoff_from is None:
            if request.alone:
                return pool.alone
            return pool.decode if pool.mode is Mode.AGGREGATED else ()
        peer = self.ledger.get(request.handoff_from)
        return () if peer is None else pool.receivers.get(domain_of(peer.spec), ())

    def _pick_decode(self, request: Request, able: Sequence[WorkerLoad], now: float) -> AnswerChoice | None:
        able = self._candidates(able, request, now)
        return pick_answering(request, able, self.learning.answer_tokens(request), self.learning.handoff_s, now)

    def _candidates(self, workers: Sequence[WorkerLoad], request: Request, now: float) -> Sequence[WorkerLoad]:
        if request.prompt_tokens >= self.ledger.shortest_context:
            workers = fitting(workers, request.prompt_tokens)
        if not request.avoid and now >= self.ledger.trusted_from and not self.ledger.has_backups:
            return workers
        return trusted(workers, request.avoid, now)

    def _grant(self, request: Request, placement: Placement, prefill_tokens: int, kv_tokens: int) -> Lease:
        lease = request.new_lease(placement.worker, placement.leg)
        self.ledger.grant(lease, prefill_tokens, kv_tokens)
        request.placements.append(placement)
        return lease
