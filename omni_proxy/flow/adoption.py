"""Requests that another scheduler began: their legs run in a front that has outlived it. Pure."""

from __future__ import annotations

from omni_proxy.errors import ErrorCode
from omni_proxy.flow.board import Board
from omni_proxy.lifecycle.request import Request
from omni_proxy.lifecycle.stages import On
from omni_proxy.messages import Abort, Adopted, Stage


def adopted(board: Board, event: Adopted, now: float) -> None:
    """Take over what another scheduler began: count its leases and wait for its legs to end."""
    leases = [lease for lease in (event.prefill, event.decode) if lease is not None]
    assert leases, f"{event.rid} has nothing to adopt"
    request = Request(event.rid, event.spec, now)
    board.requests[event.rid] = request
    known = all(board.ledger.get(lease.worker) is not None for lease in leases)
    if event.prefill is not None and event.decode is not None:
        request.prefill_stage = Stage.PREFILL_RUNNING
    request.move(On.ADOPTED_DECODE if event.decode is not None else On.ADOPTED_PREFILL, now)
    if not known:
        board.effects.extend(map(Abort, leases))
        board.fail(request, ErrorCode.NO_WORKER, "The worker of this request is no member any more.", now)
        return
    request.first_token_at = now if event.first_token else None
    request.answering = event.first_token and event.decode is not None
    board.planner.adopt(request, event.prefill, event.decode, event.handoff_from, now)
