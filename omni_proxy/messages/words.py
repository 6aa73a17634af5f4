"""The words that messages are made of: stages, outcomes, roles. Pure."""

from __future__ import annotations

from enum import IntEnum, StrEnum

Name = str | None
Tokens = int | None
"""A count; None: nobody said."""
Seconds = float | None
"""A time or an instant; None: there is none."""


class Stage(IntEnum):
    """The ten stages of a request, in the order of the timeline, the metrics and the access log."""

    RECEIVED = 0
    TOKENIZING = 1
    APC_MATCHING = 2
    PREFILL_WAITING = 3
    PREFILL_SCHEDULED = 4
    PREFILL_RUNNING = 5
    DECODE_WAITING = 6
    DECODE_SCHEDULED = 7
    DECODE_RUNNING = 8
    FINISHED = 9


class Outcome(StrEnum):
    """How a request ended; few values, because it is a metric label."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    FAILED = "failed"
    TIMED_OUT = "timed_out"


class Role(StrEnum):
    """What a worker may be asked to do."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    ENCODE = "encode"
    """Turns images and sound into what P computes with; asked at the edge, before a request is scheduled."""


class Mode(StrEnum):
    """In which order the legs of a request run (design: the ten stages)."""

    SEQUENTIAL = "sequential"
    PARALLEL = "parallel"
    AGGREGATED = "aggregated"


class Leg(StrEnum):
    """The half of a request that a lease is for. An aggregated request has a decode leg only."""

    PREFILL = "prefill"
    DECODE = "decode"
    PREWARM = "prewarm"
    """Of no request: what a next turn will begin with, computed while a prefill worker idles."""


class FailureKind(StrEnum):
    """What went wrong on a leg, as far as the edge can tell."""

    CONNECT = "connect"
    """No connection, or a reused one that died before any response byte: nothing was processed."""
    CLOSED = "closed"
    """The worker closed the connection before its answer was whole."""
    TIMEOUT = "timeout"
    STATUS = "status"
    """A whole answer with an error status."""
    GARBAGE = "garbage"
    """An answer that is not HTTP, or not what the protocol promises."""
    GAVE_UP = "gave_up"
    """The worker ended the answer early and in good order: it needs the room (vLLM-Ascend: recomputed), or cannot go
    on through no fault of the request (the embedded engine: abandoned)."""
    LATE = "late"
    """Not sent: by the time there was a connection, what the leg was to pull might have been gone."""


Mark = tuple[Stage, float, int]
"""The stage, the instant at which a request entered it, and which of its attempts that was.

A request has eight or more, and each is looked at several times when it ends: to take a tuple apart costs a tenth of
what attributes do.
"""
