"""KV that a prefill worker keeps for a pull: until when it may be pulled, and whose load it is when nobody comes. Pure.

Parameters that are older than the worker's lease name blocks which may hold another prompt by now: a decode worker that
pulled them would answer with wrong tokens, and without an error. So they are never sent then; the prompt is computed
again instead.
"""

from __future__ import annotations

from typing import Final

from omni_proxy.errors import ErrorCode
from omni_proxy.flow.board import Board
from omni_proxy.lifecycle.enums import ON_PREFILL_DONE
from omni_proxy.lifecycle.request import Request
from omni_proxy.lifecycle.stages import On

SAFE_SHARE: Final = 0.9
"""Of a lease: the rest is for the way to the decode worker and for what waits there."""


def await_decode(board: Board, request: Request, prefill: str, now: float) -> None:
    """P has answered: its KV is held for this request and for no other, as long as P keeps it."""
    board.ledger.hold(request.rid, prefill, request.prompt_tokens)
    worker = board.ledger.get(prefill)
    lease_s = None if worker is None else worker.spec.kv_lease_s
    request.handoff_from = prefill
    request.handoff_until = None if lease_s is None else now + lease_s * SAFE_SHARE
    request.handoff_freed_at = None if lease_s is None else now + lease_s
    request.move(ON_PREFILL_DONE, now)
    wait_for_decode(board, request, now)


def wait_for_decode(board: Board, request: Request, now: float, first: bool = False) -> None:
    """Line up for D, at most as long as the KV may be pulled."""
    deadline = now + board.settings.queue_timeout_s
    until = request.handoff_until
    board.line_up(request, now, deadline if until is None else min(deadline, until), first)


def is_stale(request: Request, now: float) -> bool:
    """Has P's lease on the KV of this request ended, or will it before D can have pulled?"""
    return request.handoff_until is not None and now >= request.handoff_until


def drop_stale(board: Board, now: float) -> None:
    """Have the prompts computed again whose KV has waited for a D too long."""
    queue = board.planner.decode_queue
    if not queue.waits:
        return
    deadline = queue.next_deadline()
    if deadline is None or deadline > now:
        return
    for request in [r for r in queue.requests() if is_stale(r, now)]:
        if board.settings.retries.may_resume(request.retries):
            request.retries += 1
            board.planner.leave(request)
            board.start_over(request, now)
        else:
            detail = "The request waited too long for a decode worker: what was computed of it is gone."
            board.close(request, On.TIMED_OUT, now, ErrorCode.QUEUE_TIMEOUT, detail)
