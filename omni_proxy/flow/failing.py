"""What follows from a leg that failed: another attempt, or the end. Pure.

Whether another attempt is right is `lifecycle.retries`' judgement; this module carries it out on the board.
"""

from __future__ import annotations

from omni_proxy.flow.board import Board
from omni_proxy.flow.handoffs import is_stale, wait_for_decode
from omni_proxy.lifecycle.request import Request
from omni_proxy.lifecycle.retries import Verdict, error_of
from omni_proxy.lifecycle.stages import On
from omni_proxy.messages import DecodeBroke, Failure, FailureKind, Lease, LegFailed
from omni_proxy.scheduler.load import WorkerLoad


def leg_failed(board: Board, event: LegFailed, now: float) -> None:
    """Blame the worker where it is at fault, and try again or tell the client."""
    request = board.current(event.lease)
    if request is None:
        return
    lease, failure = event.lease, event.failure
    worker = _blame(board, lease, failure, now)
    verdict = _verdict(board, request, lease, failure, worker)
    board.drop_leases(request, keep=lease)
    if verdict is Verdict.FAIL or board.pools.of(request.model) is None:
        _give_up(board, request, lease, failure, now)
    else:
        _retry(board, request, lease, verdict, failure, now)
    board.plan(now)


def decode_broke(board: Board, event: DecodeBroke, now: float) -> None:
    """Have the answer continued by another pair, from the prompt and what has been shown, or tell the client."""
    request = board.current(event.lease)
    if request is None or event.lease != request.decode_lease:
        return
    lease, failure = event.lease, event.failure
    _blame(board, lease, failure, now)
    board.drop_leases(request, keep=lease)
    if board.settings.retries.may_resume(request.retries) and board.pools.of(request.model) is not None:
        request.resume(lease.worker, event.emitted_tokens, now)
        _retry(board, request, lease, Verdict.START_OVER, failure, now)
    else:
        _give_up(board, request, lease, failure, now)
    board.plan(now)


def _blame(board: Board, lease: Lease, failure: Failure, now: float) -> WorkerLoad:
    worker = board.ledger.holder(lease)
    if board.settings.retries.blames_worker(failure):
        board.ledger.failed(worker, failure.kind, now)
    return worker


def _give_up(board: Board, request: Request, lease: Lease, failure: Failure, now: float) -> None:
    code, detail = error_of(failure)
    board.close(request, On.FAILED, now, code, detail, lease)


def _verdict(board: Board, request: Request, lease: Lease, failure: Failure, worker: WorkerLoad) -> Verdict:
    if request.answering:
        return Verdict.FAIL  # the client has seen a part of what this attempt made
    reusable = request.handoff_from is not None and worker.spec.handoff_reusable
    prefilled = request.prefill_done_at is not None
    source = None if request.handoff_from is None else board.ledger.get(request.handoff_from)
    lost = source is not None and not source.up
    return board.settings.retries.verdict(lease.leg, failure, request.retries, prefilled, reusable, lost)


def _retry(board: Board, request: Request, lease: Lease, verdict: Verdict, failure: Failure, now: float) -> None:
    request.retries += 1
    request.avoid = request.avoid | {lease.worker}
    if failure.kind in (FailureKind.CONNECT, FailureKind.CLOSED):  # behind one address: gone together
        request.avoid = request.avoid | board.ledger.ranks_beside(lease.worker)
    if verdict is Verdict.DECODE_AGAIN and not is_stale(request, now):
        request.move(On.DECODE_RETRIED, now)
        wait_for_decode(board, request, now, first=True)
    else:
        board.start_over(request, now)
