"""Gives waiting requests their workers: walks the queues and grants leases while there is room. Pure.

It decides and books in one step, so that the next decision of the same walk sees the load of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from omni_proxy.apc.homes import Homes
from omni_proxy.apc.index import NoIndex, PrefixIndex
from omni_proxy.lifecycle.request import Request
from omni_proxy.messages import Lease, Leg, Mode, Placement, Stage
from omni_proxy.scheduler.ledger import Ledger, WorkerLoad
from omni_proxy.scheduler.placement import Placer, fitting, has_decode_room, has_prefill_room, pick, trusted
from omni_proxy.scheduler.pools import Pool, Pools, domain_of
from omni_proxy.scheduler.queue import WaitingQueue

_Place = Callable[[Request, float], bool]

DEFAULT_ANSWER_TOKENS = 256
"""How long an answer is taken to be when the client names no limit, or a larger one."""


class Planner:
    """Placement of both legs over one ledger."""

    def __init__(
        self,
        ledger: Ledger,
        pools: Pools,
        prefill_placer: Placer,
        decode_placer: Placer,
        index: PrefixIndex | None = None,
        homes: Homes | None = None,
    ) -> None:
        self.ledger = ledger
        self._index = NoIndex() if index is None else index
        self._homes = homes
        self.pools = pools
        self.prefill_queue = WaitingQueue()
        self.decode_queue = WaitingQueue()
        self._prefill_placer = prefill_placer
        self._decode_placer = decode_placer

    def place_at_once(self, request: Request, now: float) -> bool:
        """Grant leases to a request that has not lined up yet, as `plan` would if it was the last in its queue.

        False when nobody has room, or others whose turn may be earlier wait.
        """
        if self.decode_queue.waits:
            return False
        self.ledger.start_slowly(now)
        if request.stage is Stage.DECODE_WAITING:
            return self.place_decode(request, now)
        return not self.prefill_queue.waits and self.place_prefill(request, now)

    def wait(self, request: Request, deadline: float, first: bool = False) -> None:
        """Line up: for P, in parallel mode P and D; or for D, behind those only who want the same D workers."""
        line: tuple[str, ...] = (request.spec.model,)
        if request.stage is Stage.PREFILL_WAITING:
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

    def plan(self, now: float) -> Iterator[Request]:
        """Grant leases to waiting requests, in order, until the first of each line that finds no room.

        Yields each request after its leases are booked. Requests whose prefill is done go before new ones: their KV
        occupies a prefill worker until they are placed.
        """
        self.ledger.start_slowly(now)
        yield from self._serve(self.decode_queue, self.place_decode, now)
        yield from self._serve(self.prefill_queue, self.place_prefill, now)

    def _serve(self, queue: WaitingQueue, place: _Place, now: float) -> Iterator[Request]:
        for request in queue.fronts():
            if request.block_keys:  # caches have changed since it came
                request.cached = self._index.match(request.block_keys)
            if place(request, now):
                queue.remove(request)
                yield request

    def place_prefill(self, request: Request, now: float) -> bool:
        """Grant the P leg, in parallel mode both legs; False when somebody has no room."""
        pool = self.pools.of(request.spec.model)
        if pool is None or pool.mode is Mode.AGGREGATED:
            return False
        able = self._candidates(pool.prefill, request, now)
        if pool.mode is Mode.PARALLEL:
            return self._place_pair(request, pool, able, now)
        prefill = self._pick_prefill(request, able)
        if prefill is None:
            return False
        request.mode = pool.mode
        request.prefill_lease = self._grant_prefill(request, prefill)
        return True

    def _place_pair(self, request: Request, pool: Pool, able: Sequence[WorkerLoad], now: float) -> bool:
        """Grant both legs or none: the least loaded P one of whose partners has room, and that partner."""
        while (prefill := self._pick_prefill(request, able)) is not None:
            domain = next(domain_of(w.spec) for w in able if w.spec.name == prefill.worker)
            decode = self._pick_decode(request, pool.partners.get(domain, ()), now)
            if decode is not None:
                request.mode = pool.mode
                request.prefill_lease = self._grant_prefill(request, prefill)
                request.decode_lease = self._grant(request, decode, 0, _kv_tokens(request))
                return True
            able = [w for w in able if domain_of(w.spec) != domain]
        return False

    def place_decode(self, request: Request, now: float) -> bool:
        """Grant the D leg of a prefilled request, or the only leg of an aggregated one."""
        pool = self.pools.of(request.spec.model)
        if pool is None:
            return False
        placement = self._pick_decode(request, self._answering(request, pool), now)
        if placement is None:
            return False
        prefill_tokens = 0
        if request.handoff_from is None:
            request.mode = Mode.AGGREGATED
            prefill_tokens = request.uncached_on(placement.worker)
        request.decode_lease = self._grant(request, placement, prefill_tokens, _kv_tokens(request))
        return True

    def adopt(self, request: Request, prefill: Lease | None, decode: Lease | None, handoff_from: str | None) -> None:
        """Book the leases that a request already has; their workers must be members."""
        request.prefill_lease, request.decode_lease, request.handoff_from = prefill, decode, handoff_from
        request.attempt = max(lease.attempt for lease in (prefill, decode) if lease is not None)
        tokens = request.prompt_tokens
        if prefill is not None:
            request.mode = Mode.SEQUENTIAL if decode is None else Mode.PARALLEL
            self.ledger.grant(prefill, tokens, tokens)
        if decode is not None:
            alone = prefill is None and handoff_from is None
            request.mode = Mode.AGGREGATED if alone else request.mode or Mode.SEQUENTIAL
            waits = alone and request.first_token_at is None
            self.ledger.grant(decode, tokens if waits else 0, _kv_tokens(request))
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

    def _pick_decode(self, request: Request, able: Sequence[WorkerLoad], now: float) -> Placement | None:
        able = self._candidates(able, request, now)
        return pick(able, self._decode_placer, Leg.DECODE, _kv_tokens(request), has_decode_room, request.cached)

    def _pick_prefill(self, request: Request, able: Sequence[WorkerLoad]) -> Placement | None:
        """The least loaded, counting what it has cached; the prompt's home where no cache speaks for anybody."""
        if len({request.cached.get(w.spec.name, 0) for w in able}) == 1:
            home = self._home(request, able)
            if home is not None:
                return Placement(home, Leg.PREFILL, "home of its prefix")
        return pick(able, self._prefill_placer, Leg.PREFILL, request.prompt_tokens, has_prefill_room, request.cached)

    def _home(self, request: Request, able: Sequence[WorkerLoad]) -> str | None:
        if self._homes is None or not (request.block_keys or request.spec.session):
            return None
        tokens = request.prompt_tokens
        open_to_it = {w.spec.name: w for w in able if has_prefill_room(w, tokens)}
        if not open_to_it:
            return None

        def load(name: str) -> float:
            worker = open_to_it[name]
            return worker.prefill_tokens / worker.weight

        return self._homes.home(request.spec.session, request.block_keys, tuple(open_to_it), load, tokens)

    def _grant_prefill(self, request: Request, placement: Placement) -> Lease:
        return self._grant(request, placement, request.uncached_on(placement.worker), request.prompt_tokens)

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


def _kv_tokens(request: Request) -> int:
    """KV that the answer will need: prompt and expected output, in tokens."""
    limit = request.spec.max_tokens
    answer = DEFAULT_ANSWER_TOKENS if limit is None else min(limit, DEFAULT_ANSWER_TOKENS)
    return request.prompt_tokens + answer
