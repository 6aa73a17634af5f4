"""The home of a session: where its prompts go when nobody is known to hold their beginning. Pure.

That is so when the gateway cannot read prompts, and when another gateway served the session and no cache tells.
Gateways agree on homes without talking, except where a session could not go home: those who placed it tell the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from omni_proxy.apc.ring import Ring

MOST_SESSIONS: Final = 50_000


class Homes:
    """The ring, and which sessions live elsewhere."""

    def __init__(self) -> None:
        self._ring = Ring()
        self._elsewhere: OrderedDict[str, str] = OrderedDict()
        """Where other gateways placed sessions last."""

    def placed_elsewhere(self, placed: Iterable[tuple[str, str]]) -> None:
        """Other gateways sent these sessions to these workers."""
        for session, worker in placed:
            self._elsewhere[session] = worker
            self._elsewhere.move_to_end(session)
        while len(self._elsewhere) > MOST_SESSIONS:
            self._elsewhere.popitem(last=False)

    def order(self, session: str, names: Sequence[str]) -> Iterator[str]:
        """The workers from a session's home on. `names` is not empty."""
        if session in self._elsewhere:
            yield self._elsewhere[session]
        yield from self._ring.order(session, names)
