"""What follows the end of an exchange: its tenant's account, its span, its line in the access log.

Compiled: every request passes here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

from omni_proxy.access.gate import Gate
from omni_proxy.api.exchange import Exchange
from omni_proxy.errors import Rejected
from omni_proxy.messages import Close, RequestRecord
from omni_proxy.observe.access_log import AccessLog
from omni_proxy.observe.log_lines import Ending

STREAM_BYTES_PER_TOKEN: Final = 150
"""For answers that ended before anybody counted their tokens: a stream's event is about as long."""
_LEFT: Final = 499
"""The status, as nginx has it, of a request whose client left before it was told one."""
_monotonic: Final = time.monotonic


class Traced(Protocol):
    """Makes spans."""

    def ended(
        self, trace_id: int, parent_id: int | None, span_id: int, record: RequestRecord, status: int, now: float
    ) -> None: ...


class Endings:
    """Tells those who want to know of each exchange that has ended."""

    def __init__(
        self, gate: Gate, spans: Traced | None, log: AccessLog | None, rejected: Callable[[str, str], None]
    ) -> None:
        self._gate = gate
        self._spans = spans
        self._count_rejected = rejected
        self.log = log
        """Another one after a reload; None: nobody wants one."""

    def closed(self, exchange: Exchange, close: Close) -> None:
        """The core has closed a request."""
        record = close.record
        if exchange.tenant and record.placements:
            self._gate.spent(exchange.tenant, _tokens_used(exchange, record))
        trace, log = exchange.trace, self.log
        if trace is not None and self._spans is not None:
            ids = trace.trace_id, trace.parent_id, trace.span_id
            self._spans.ended(*ids, record, exchange.status or _LEFT, _monotonic())
        if log is not None:
            log.write(_ending_of(exchange, close.error), record, _monotonic())

    def answered(self, exchange: Exchange) -> None:
        """An answer without a worker, and so without a record."""
        if self.log is not None:
            self.log.write(_ending_of(exchange, None), None, _monotonic())

    def rejected(self, exchange: Exchange, rejected: Rejected) -> None:
        """The core never heard of it."""
        self._count_rejected(exchange.path.decode(), rejected.code.value)
        if self.log is not None:
            self.log.write(_ending_of(exchange, rejected.code), None, _monotonic())


def _ending_of(exchange: Exchange, error: str | None) -> Ending:
    """How an exchange ended; `error`: a code, where it went wrong."""
    return Ending(
        exchange.request_id.decode(),
        exchange.peer,
        "POST",
        exchange.path.decode("ascii", "replace"),
        exchange.status or _LEFT,
        exchange.bytes_out,
        exchange.user_agent,
        None if error is None else str(error),
    )


def _tokens_used(exchange: Exchange, record: RequestRecord) -> int:
    answer = record.completion_tokens
    if answer is None:
        answer = exchange.bytes_out // STREAM_BYTES_PER_TOKEN if record.stream else 0
    return record.prompt_tokens + answer
