"""What `x-omni-timing: 1` asks for: where the time went until the head of the answer, as this gateway's front saw it.

In the style of `Server-Timing`: `queue;dur=1.2, prefill;dur=340.0, handoff;dur=0.4, decode;dur=21.0, total;dur=362.6`,
milliseconds. A head that goes out first cannot tell more; a request's whole timeline is at `/omni/requests/<id>`.
"""

from __future__ import annotations

import time
from typing import Final

ASKED: Final = b"x-omni-timing: "
QUEUE: Final = "queue"
"""From the arrival, or from a leg that failed, to the next leg's start."""
PREFILL: Final = "prefill"
HANDOFF: Final = "handoff"
"""From P's answer to D's leg."""
DECODE: Final = "decode"
"""From the start of D's leg on; for a stream, to its first content."""


class Timing:
    """Spans of one request, each until the next begins."""

    __slots__ = ("_began", "_marks")

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._marks: list[tuple[str, float]] = [(QUEUE, self._began)]

    def mark(self, name: str) -> None:
        """A span begins, and the one before it ends."""
        self._marks.append((name, time.monotonic()))

    def line(self) -> bytes:
        """The response's header line by now; spans of one name are summed."""
        now = time.monotonic()
        ends = [at for _, at in self._marks[1:]]
        spans: dict[str, float] = {}
        for (name, begin), end in zip(self._marks, [*ends, now], strict=True):
            spans[name] = spans.get(name, 0.0) + end - begin
        spans["total"] = now - self._began
        told = ", ".join([f"{name};dur={s * 1e3:.3f}" for name, s in spans.items()])
        return b"x-omni-timing: %b\r\n" % told.encode()


def asks_for_timing(forward: bytes) -> bool:
    """Does the client want to see where the time goes? `forward`: its header lines."""
    at = forward.find(ASKED)
    if at < 0 or (at and forward[at - 2 : at] != b"\r\n"):
        return False
    asked = forward[at + len(ASKED) : forward.index(b"\r\n", at)].strip().lower()
    return asked in (b"1", b"true")
