"""Who may take a leg of a request at all, and how a leg is booked once somebody does. Pure.

Shared by those who place prompts and those who place answers: both look at the same members and write into the same
ledger.
"""

from __future__ import annotations

from collections.abc import Sequence

from omni_proxy.lifecycle.request import Request
from omni_proxy.messages import Lease, Mode, Placement
from omni_proxy.scheduler.learning import Learning
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.load import WorkerLoad
from omni_proxy.scheduler.placement import fitting, has_decode_room, keeps_pace, trusted
from omni_proxy.scheduler.targets import Targets


class Booking:
    """One ledger, and what is known of requests' lengths and targets."""

    def __init__(self, ledger: Ledger, learning: Learning, targets: Targets) -> None:
        self.ledger = ledger
        self.learning = learning
        self.targets = targets

    def candidates(self, workers: Sequence[WorkerLoad], request: Request, now: float) -> Sequence[WorkerLoad]:
        """Of some workers those that a request may go to: trusted, and with a context that is long enough."""
        if request.prompt_tokens >= self.ledger.shortest_context:
            workers = fitting(workers, request.prompt_tokens)
        if not request.avoid and now >= self.ledger.trusted_from and not self.ledger.has_backups:
            return workers
        return trusted(workers, request.avoid, now)

    def can_answer(self, worker: WorkerLoad, request: Request, kv_tokens: int) -> bool:
        """Has a worker room for an answer that needs so much KV, and is it fast enough with it?"""
        if not has_decode_room(worker, kv_tokens):
            return False
        return keeps_pace(worker, kv_tokens, self.targets.tpot_s(request.spec))

    def grant_prefill(self, request: Request, placement: Placement, tokens: int) -> Lease:
        """Book a P leg that has so many tokens to compute."""
        lease = request.new_lease(placement.worker, placement.leg)
        self.ledger.grant(lease, tokens, request.prompt_tokens)
        request.prefill_lease = lease
        request.placements.append(placement)
        return lease

    def grant_decode(self, request: Request, placement: Placement, prefill_tokens: int) -> Lease:
        """Book a D leg; `prefill_tokens`: what this worker has to compute of the prompt."""
        lease = request.new_lease(placement.worker, placement.leg)
        limit_s = self.targets.tpot_s(request.spec)
        self.ledger.grant(lease, prefill_tokens, self.learning.kv_tokens(request), limit_s)
        request.decode_lease = lease
        request.placements.append(placement)
        return lease

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
            limit_s = self.targets.tpot_s(request.spec)
            self.ledger.grant(decode, tokens if waits else 0, self.learning.kv_tokens(request), limit_s)
        if handoff_from is not None and request.first_token_at is None:
            self.ledger.hold(request.rid, handoff_from, tokens)
