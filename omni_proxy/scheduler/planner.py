"""Gives waiting requests their workers: walks the queues and grants leases while there is room. Pure.

It decides and books in one step, so that the next decision of the same walk sees the load of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from omni_proxy.lifecycle.request import Request
from omni_proxy.messages import Lease, Leg, Mode, Placement
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.placement import Placer, has_decode_room, has_prefill_room, pick, trusted
from omni_proxy.scheduler.pools import Pool, Pools
from omni_proxy.scheduler.queue import WaitingQueue

_Place = Callable[[Request, float], bool]

DEFAULT_ANSWER_TOKENS = 256
"""How long an answer is taken to be when the client names no limit, or a larger one."""


class Planner:
    """Placement of both legs over one ledger."""

    def __init__(self, ledger: Ledger, pools: Pools, prefill_placer: Placer, decode_placer: Placer) -> None:
        self.ledger = ledger
        self.pools = pools
        self.prefill_queue = WaitingQueue()
        self.decode_queue = WaitingQueue()
        self._prefill_placer = prefill_placer
        self._decode_placer = decode_placer

    def plan(self, now: float) -> Iterator[Request]:
        """Grant leases to waiting requests, in order, until the first of each model that finds no room.

        Yields each request after its leases are booked. Requests whose prefill is done go before new ones: their KV
        occupies a prefill worker until they are placed.
        """
        yield from self._serve(self.decode_queue, self.place_decode, now)
        yield from self._serve(self.prefill_queue, self.place_prefill, now)

    def _serve(self, queue: WaitingQueue, place: _Place, now: float) -> Iterator[Request]:
        for model in queue.models():
            while (request := queue.head(model)) is not None and place(request, now):
                queue.remove(request)
                yield request

    def place_prefill(self, request: Request, now: float) -> bool:
        """Grant the P leg, in parallel mode both legs; False when somebody has no room."""
        pool = self.pools.of(request.spec.model)
        if pool is None or not pool.ready or pool.mode is Mode.AGGREGATED:
            return False
        tokens = request.prompt_tokens
        candidates = trusted(pool.prefill, request.avoid, now)
        prefill = pick(candidates, self._prefill_placer, Leg.PREFILL, tokens, has_prefill_room)
        if prefill is None:
            return False
        if pool.mode is Mode.PARALLEL:
            decode = self._pick_decode(request, pool, prefill.worker, now)
            if decode is None:
                return False
            request.decode_lease = self._grant(request, decode, 0, _kv_tokens(request))
        request.mode = pool.mode
        request.prefill_lease = self._grant(request, prefill, tokens, tokens)
        return True

    def place_decode(self, request: Request, now: float) -> bool:
        """Grant the D leg of a prefilled request, or the only leg of an aggregated one."""
        pool = self.pools.of(request.spec.model)
        if pool is None or not pool.decode:
            return False
        placement = self._pick_decode(request, pool, request.handoff_from, now)
        if placement is None:
            return False
        if request.handoff_from is None:
            request.mode = Mode.AGGREGATED
        prefill_tokens = request.prompt_tokens if request.handoff_from is None else 0
        request.decode_lease = self._grant(request, placement, prefill_tokens, _kv_tokens(request))
        return True

    def _pick_decode(self, request: Request, pool: Pool, prefill: str | None, now: float) -> Placement | None:
        able = pool.decode
        if prefill is not None and (peer := self.ledger.get(prefill)) is not None:
            able = tuple(pool.decode_for(peer.spec))
        candidates = trusted(able, request.avoid, now)
        return pick(candidates, self._decode_placer, Leg.DECODE, _kv_tokens(request), has_decode_room)

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
