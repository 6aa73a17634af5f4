"""What follows when workers come, go, or cannot be used: new pools, and new lines for those that wait. Pure."""

from __future__ import annotations

from typing import assert_never

from omni_proxy.flow.board import Board
from omni_proxy.messages import WorkerAdded, WorkerDown, WorkerDraining, WorkerRemoved, WorkerUp
from omni_proxy.scheduler.ledger import Ledger
from omni_proxy.scheduler.pools import serves

MemberEvent = WorkerAdded | WorkerUp | WorkerDown | WorkerDraining | WorkerRemoved


def members_changed(board: Board, event: MemberEvent, now: float) -> None:
    """Take a change of the members into account; whom it leaves in a line that leads nowhere changes lines."""
    match event:
        case WorkerAdded(spec):
            board.ledger.add(spec)
            if board.learner is not None:
                board.learner.member(spec)
        case WorkerUp(spec):
            board.ledger.put(spec, now)
            if board.learner is not None:
                board.learner.member(spec)
        case WorkerDown(name, reason):
            board.ledger.down(name, reason)
            if board.learner is not None:
                board.learner.lost(name, removed=False)
        case WorkerDraining(name):
            board.ledger.drain(name)
        case WorkerRemoved(name):
            board.ledger.remove(name)
            if board.learner is not None:
                board.learner.lost(name, removed=True)
        case _:
            assert_never(event)
    board.planner.members_changed()
    if isinstance(event, WorkerRemoved):
        _forget_handoffs(board, event.name)
    _realign(board, now)
    board.plan(now)


def _forget_handoffs(board: Board, name: str) -> None:
    """What a removed P had ready is gone, also when its name comes back."""
    for request in board.requests.values():
        if request.handoff_from == name:
            board.ledger.drop_hold(request.rid)
            request.handoff_from = None


def _realign(board: Board, now: float) -> None:
    """Let waiting requests change lines where theirs leads nowhere any more, because a member changed."""
    for request in board.planner.strayed():
        deadline = board.planner.leave(request)
        if request.prefill_done_at is None:
            board.enqueue(request, now, deadline=deadline)
        else:
            board.start_over(request, now)


def what_is_missing(model: str, ledger: Ledger) -> str:
    """One sentence on why a model cannot be served; worker names only, no addresses."""
    down = [f"{w.spec.name} ({w.reason})" for w in ledger if serves(w, model) and (not w.up or w.draining)]
    return f"No worker can serve {model!r} now" + (f"; not usable: {', '.join(down)}." if down else ".")
