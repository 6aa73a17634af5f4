"""The stage table: every legal move of a request is one entry here, and `advance` is the only way to move. Pure.

The table does not know modes or retries: a guard is decided first and becomes a differently named move, so the table
stays plain data. In parallel mode a request has two tracks that walk the same table: the prefill track ends when P has
answered, the decode track ends the request.

       RECEIVED ─► TOKENIZING ─► APC_MATCHING ─► PREFILL_WAITING ─► PREFILL_SCHEDULED ─► PREFILL_RUNNING
                                      │                 ▲                                      │
                                      │ no handoff      └───────────── retried ────────────────┤
                                      ▼                                                        ▼
                                DECODE_WAITING ◄───────────────────────────────────────── P answered
                                      └─► DECODE_SCHEDULED ─► DECODE_RUNNING ─► FINISHED
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from omni_proxy.messages import Stage


class On(StrEnum):
    """The names of the moves."""

    TOKENIZE = "tokenize"
    MATCH = "match"
    ENQUEUE_PREFILL = "enqueue_prefill"
    ENQUEUE_DECODE = "enqueue_decode"
    GRANTED = "granted"
    SENT = "sent"
    ADOPTED_PREFILL = "adopted_prefill"
    ADOPTED_DECODE = "adopted_decode"
    PREFILL_DONE = "prefill_done"
    RETRIED = "retried"
    DECODE_RETRIED = "decode_retried"
    COMPLETED = "completed"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


_EXITS: Final[Mapping[On, Stage]] = {
    On.CANCELLED: Stage.FINISHED,
    On.FAILED: Stage.FINISHED,
    On.TIMED_OUT: Stage.FINISHED,
}
_REFUSABLE: Final[Mapping[On, Stage]] = {On.REJECTED: Stage.FINISHED, **_EXITS}
_QUEUES: Final[Mapping[On, Stage]] = {
    On.ENQUEUE_PREFILL: Stage.PREFILL_WAITING,
    On.ENQUEUE_DECODE: Stage.DECODE_WAITING,
}
_RETRIES: Final[Mapping[On, Stage]] = {
    On.RETRIED: Stage.PREFILL_WAITING,
    On.DECODE_RETRIED: Stage.DECODE_WAITING,
}

TRANSITIONS: Final[Mapping[Stage, Mapping[On, Stage]]] = {
    Stage.RECEIVED: {
        On.TOKENIZE: Stage.TOKENIZING,
        On.MATCH: Stage.APC_MATCHING,
        On.ADOPTED_PREFILL: Stage.PREFILL_RUNNING,
        On.ADOPTED_DECODE: Stage.DECODE_RUNNING,
        **_QUEUES,
        **_REFUSABLE,
    },
    Stage.TOKENIZING: {On.MATCH: Stage.APC_MATCHING, **_QUEUES, **_REFUSABLE},
    Stage.APC_MATCHING: {**_QUEUES, **_REFUSABLE},
    # A waiting request may change queues: the members, and with them the mode, may change under it.
    Stage.PREFILL_WAITING: {On.GRANTED: Stage.PREFILL_SCHEDULED, **_QUEUES, **_REFUSABLE},
    Stage.PREFILL_SCHEDULED: {On.SENT: Stage.PREFILL_RUNNING, **_RETRIES, **_EXITS},
    Stage.PREFILL_RUNNING: {
        On.PREFILL_DONE: Stage.DECODE_WAITING,
        On.COMPLETED: Stage.FINISHED,
        **_RETRIES,
        **_EXITS,
    },
    Stage.DECODE_WAITING: {On.GRANTED: Stage.DECODE_SCHEDULED, **_QUEUES, **_RETRIES, **_REFUSABLE},
    Stage.DECODE_SCHEDULED: {On.SENT: Stage.DECODE_RUNNING, **_RETRIES, **_EXITS},
    Stage.DECODE_RUNNING: {On.COMPLETED: Stage.FINISHED, **_RETRIES, **_EXITS},
    Stage.FINISHED: {},
}


_MOVES: Final[list[dict[On, Stage]]] = [dict(TRANSITIONS[stage]) for stage in Stage]
"""The same, as compiled code reads it fastest."""


class IllegalTransition(Exception):
    """A move that the table does not have: a fault of ours, never of a client or a worker."""

    def __init__(self, stage: Stage, on: On) -> None:
        super().__init__(f"no move {on.value!r} from stage {stage.name}")
        self.stage = stage
        self.on = on


def advance(stage: Stage, on: On) -> Stage:
    """The stage after a move. Raises IllegalTransition; changes nothing."""
    place: int = stage
    after = _MOVES[place].get(on)
    if after is None:
        raise IllegalTransition(stage, on)
    return after
