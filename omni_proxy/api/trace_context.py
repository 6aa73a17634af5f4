"""W3C trace context at the edge: whose trace a request belongs to, and what workers are told of it.

The span of a request gets its id when the request begins, because its workers have to be told of it; the spans are made
when it has ended (`observe.otel`).
"""

from __future__ import annotations

import random
import re
from typing import Final

_HEADER: Final = b"traceparent: "
_SHAPE: Final = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1


class TraceContext:
    """One request's place in a trace. Ids are numbers as OpenTelemetry has them."""

    __slots__ = ("parent_id", "span_id", "trace_id")

    def __init__(self, trace_id: int, parent_id: int | None, span_id: int) -> None:
        self.trace_id = trace_id
        self.parent_id = parent_id
        """The client's span; None: the trace begins here."""
        self.span_id = span_id
        """The span of the request itself, the parent of what workers do."""

    @property
    def header(self) -> bytes:
        return b"%b00-%032x-%016x-01\r\n" % (_HEADER, self.trace_id, self.span_id)


class TraceContexts:
    """Begins the context of each request. `share`: of requests whose client has no trace, so many get one."""

    def __init__(self, share: float, chance: random.Random) -> None:
        self._share = share
        self._random = chance

    def begin(self, forward: bytes) -> tuple[TraceContext | None, bytes]:
        """The context, and the client's header lines with ours in it; None: nobody wants to see this request.

        A `traceparent` that makes no sense is replaced; one that is not sampled stays as it is.
        """
        start = forward.find(_HEADER)
        if start < 0 or (start and forward[start - 2 : start] != b"\r\n"):
            return self._root(forward)
        end = forward.index(b"\r\n", start) + 2
        rest = forward[:start] + forward[end:]
        found = _SHAPE.fullmatch(forward[start + len(_HEADER) : end - 2])
        trace_id, parent_id = (int(found[2], 16), int(found[3], 16)) if found is not None else (0, 0)
        if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5]) or not trace_id or not parent_id:
            return self._root(rest)
        if not int(found[4], 16) & _SAMPLED:
            return None, forward
        context = TraceContext(trace_id, parent_id, self._id(64))
        return context, context.header + rest

    def _root(self, forward: bytes) -> tuple[TraceContext | None, bytes]:
        if self._random.random() >= self._share:
            return None, forward
        context = TraceContext(self._id(128), None, self._id(64))
        return context, context.header + forward

    def _id(self, bits: int) -> int:
        return self._random.getrandbits(bits) or 1
