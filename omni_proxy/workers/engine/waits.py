"""How long requests wait in the engine before they are admitted. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from omni_proxy.workers.engine.sequence import Sequence


class Waits:
    """Times of requests that have no token yet. Instants are of one monotonic clock."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._waited: dict[str, float] = {}

    def came(self, request_id: str, now: float) -> None:
        self._since[request_id] = now

    def admitted(self, sequences: Iterable[Sequence], now: float) -> None:
        """A step has admitted these; those that were preempted before have told their wait."""
        for seq in sequences:
            since = self._since.pop(seq.request_id, None)
            if since is not None:
                self._waited[seq.request_id] = now - since

    def told(self, request_id: str) -> float | None:
        """Seconds, once; None if it was told before, or the request was never admitted."""
        self._since.pop(request_id, None)
        return self._waited.pop(request_id, None)
