"""What follows from a failed leg: try again, where, or give the failure to the client. Pure.

A leg is tried again only where nothing can have been processed, or where the worker said that it is busy; a decode leg
that died before its first byte may go on elsewhere, because its prompt is computed and nobody has seen an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import assert_never

from omni_proxy.errors import ErrorCode
from omni_proxy.messages import Failure, FailureKind, Leg

BUSY = frozenset({429, 503})
"""Statuses with which an engine says "not now", which is not "dead" and not "your fault"."""


class Verdict(Enum):
    """What to do after a failed leg."""

    FAIL = auto()
    START_OVER = auto()
    DECODE_AGAIN = auto()
    """Another D with the KV parameters that P gave."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`max_retries` bounds all attempts of one request together; 0 switches retries off."""

    max_retries: int = 2

    def verdict(
        self,
        leg: Leg,
        failure: Failure,
        retries: int,
        prefilled: bool,
        handoff_reusable: bool = False,
        source_lost: bool = False,
    ) -> Verdict:
        """What to do about a failed leg of a request that was retried `retries` times before.

        `prefilled`: a P had done its part, so that this leg only had to go on from there. `source_lost`: that P is
        down, which explains a D that could not get its KV.
        """
        if retries >= self.max_retries or (failure.answered and failure.kind is not FailureKind.STATUS):
            return Verdict.FAIL
        gave_up = failure.kind is FailureKind.GAVE_UP
        late = failure.kind is FailureKind.LATE
        untouched = failure.kind is FailureKind.CONNECT or failure.status in BUSY or gave_up or late
        if leg is Leg.PREFILL:
            return Verdict.START_OVER if untouched else Verdict.FAIL
        if untouched and handoff_reusable and not gave_up and not late:
            return Verdict.DECODE_AGAIN
        kv_lost = source_lost and failure.status is not None and failure.status >= 500
        retry = untouched or kv_lost or (prefilled and failure.kind is FailureKind.CLOSED)
        return Verdict.START_OVER if retry else Verdict.FAIL

    def may_resume(self, retries: int) -> bool:
        """May an answer that broke be continued elsewhere? It counts as one more retry."""
        return retries < self.max_retries

    def blames_worker(self, failure: Failure) -> bool:
        """Is this failure held against the worker? A client's 4xx and a busy worker are not."""
        if failure.kind is FailureKind.STATUS:
            return failure.status is not None and failure.status >= 500 and failure.status not in BUSY
        return failure.kind not in (FailureKind.GAVE_UP, FailureKind.LATE)


def error_of(failure: Failure) -> tuple[ErrorCode, str]:
    """Code and sentence for a client that gets no answer of a worker. Names no address."""
    match failure.kind:
        case FailureKind.CONNECT:
            return ErrorCode.WORKER_UNREACHABLE, "The worker cannot be reached."
        case FailureKind.CLOSED:
            return ErrorCode.WORKER_CLOSED, "The worker closed the connection before its answer was complete."
        case FailureKind.TIMEOUT:
            return ErrorCode.WORKER_TIMEOUT, f"The worker did not answer in time: {failure.detail}."
        case FailureKind.STATUS:
            return ErrorCode.WORKER_ERROR, f"The worker answered with status {failure.status}."
        case FailureKind.GARBAGE:
            return ErrorCode.WORKER_GARBAGE, f"The worker's answer is not valid: {failure.detail}."
        case FailureKind.GAVE_UP:
            return ErrorCode.WORKER_ERROR, "The worker gave the answer up before it was complete."
        case FailureKind.LATE:
            return ErrorCode.WORKER_UNREACHABLE, "The worker was reached too late: what was computed may be gone."
        case _:
            assert_never(failure.kind)
